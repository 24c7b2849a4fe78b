"""DomainNet from small trees and lists that the tests write."""

from pathlib import Path

import pytest

from fedjax_bn.data.sets import domainnet
from fedjax_bn.data.sets.domainnet import DOMAINNET, TEN
from trees import assert_in_place, write_shade, write_tree

DOMAINS = tuple(DOMAINNET.domains)
CLASSES = sorted((*TEN, "airplane", "zigzag"))


def write_lists(root: Path, first: int = 0) -> None:
    """Of each class images 0 and 1 train, and image 2 tests."""
    root.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        for part, numbers in (("train", (0, 1)), ("test", (2,))):
            lines = [
                f"{domain}/{name}/{k}.png {label}\n"
                for label, name in enumerate(CLASSES, first)
                for k in numbers
            ]
            (root / f"{domain}_{part}.txt").write_text("".join(lines))


@pytest.fixture
def tree(tmp_path) -> Path:
    """Only the ten classes' images are there."""
    write_tree(tmp_path, DOMAINS, TEN, 3)
    write_lists(tmp_path)
    return tmp_path


def load(path, **options):
    return domainnet.load_domainnet(path, image_size=6, progress=False, **options)


def change(path: Path, old: str, new: str) -> None:
    """Changes the first appearance of a text in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_fedbns_ten_classes_are_the_default_and_lists_give_parts(tree):
    source = load(tree)
    assert source.classes == TEN
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    for pool in source.pools:
        assert pool.labels.tolist() == [label for label in range(10) for _ in "ab"] + list(
            range(10)
        )
        assert pool.parts.tolist() == [0] * 20 + [2] * 10
    assert_in_place(source)
    assert source.notes[0] == ("domainnet: clipart_train.txt has 24 lines, the official one 33525")


def test_any_classes_may_be_chosen_and_are_numbered_in_that_order(tree):
    source = load(tree, classes=("zebra", "bird"))
    assert source.classes == ("zebra", "bird")
    pool = source.pools[1]
    assert [name.split("/")[1] for name in pool.names] == [
        source.classes[label] for label in pool.labels
    ]


def test_all_classes_of_the_lists_may_be_chosen(tmp_path):
    write_tree(tmp_path, DOMAINS, CLASSES, 3)
    write_lists(tmp_path / "splits")
    assert load(tmp_path, classes=("all",)).classes == tuple(CLASSES)


@pytest.mark.parametrize("classes", [("bird", "brid"), (), ("bird", "bird")])
def test_impossible_classes_are_named(tree, classes):
    with pytest.raises(ValueError, match=r"data\.classes"):
        load(tree, classes=classes)


def test_images_in_no_list_are_left_out_and_counted(tree):
    write_shade(tree / "real" / "bird" / "9.png", 0)
    source = load(tree)
    assert len(source.pools[4].labels) == 30
    assert "domainnet, real: left out 1 images that are in no list" in source.notes


def test_images_of_another_format_than_in_the_lists_are_found(tmp_path):
    write_tree(tmp_path, DOMAINS, TEN, 3, suffix=".bmp")
    write_lists(tmp_path)
    assert_in_place(load(tmp_path))


def test_an_image_in_both_lists_is_a_test_image(tree):
    path = tree / "sketch_test.txt"
    path.write_text(path.read_text() + f"sketch/tiger/0.png {CLASSES.index('tiger')}\n")
    source = load(tree)
    pool = source.pools[5]
    assert pool.parts[pool.names == "sketch/tiger/0.png"].tolist() == [2]
    assert "domainnet, sketch: 1 lines repeat an image; it is used once" in source.notes


def test_listed_images_that_are_missing_are_named(tree):
    for k in range(2):
        (tree / "real" / "whale" / f"{k}.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"real/whale/0\.png, real/whale/1\.png"):
        load(tree)


def test_labels_that_count_from_one_are_refused(tree):
    write_lists(tree, first=1)
    with pytest.raises(ValueError, match=str(tree)):
        load(tree)


def test_labels_that_differ_between_lists_are_named(tree):
    label = CLASSES.index("tiger")
    change(tree / "real_test.txt", f"real/tiger/2.png {label}", f"real/tiger/2.png {label + 1}")
    with pytest.raises(ValueError, match=r"real_test\.txt: tiger"):
        load(tree)


def test_two_classes_with_one_label_are_refused(tree):
    for domain in DOMAINS:
        for part in ("train", "test"):
            path = tree / f"{domain}_{part}.txt"
            path.write_text(path.read_text().replace(" 11\n", " 10\n"))
    with pytest.raises(ValueError, match=str(tree)):
        load(tree)


def test_a_missing_list_says_where_to_fetch_it(tree):
    (tree / "painting_test.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"painting_test\.txt.*ai\.bu\.edu/M3SDA"):
        load(tree)


def test_lines_of_another_form_are_named(tree):
    change(tree / "clipart_train.txt", "clipart/airplane/0.png", "airplane/0.png")
    with pytest.raises(ValueError, match=r"airplane/0\.png"):
        load(tree)


def test_a_class_that_a_domain_lacks_is_named(tree):
    for part in ("train", "test"):
        path = tree / f"infograph_{part}.txt"
        lines = [line for line in path.read_text().splitlines(True) if "/teapot/" not in line]
        path.write_text("".join(lines))
    with pytest.raises(ValueError, match="teapot of infograph"):
        load(tree)
