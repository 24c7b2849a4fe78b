"""Rows of the table of image folders, from small trees in the forms in which they are published."""

from pathlib import Path

import numpy as np
import pytest

from fedjax_bn.data.sets import image_folders
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION
from trees import assert_in_place, write_shade, write_tree

FOLDERS = image_folders.IMAGE_FOLDERS
COUNTS = {
    "digits_dg": [6000] * 4,
    "office_caltech10": [958, 1123, 157, 295],
    "officehome": [2427, 4365, 4439, 4357],
    "pacs": [1670, 2048, 2344, 3929],
    "vlcs": [1415, 2656, 3282, 3376],
}
DOMAINNET = FOLDERS["domainnet"]
TEN = tuple(DOMAINNET.classes)


def load(name, path, **options):
    return image_folders.load_image_folders(name, path, image_size=6, progress=False, **options)


@pytest.fixture
def listed(tmp_path) -> Path:
    """DomainNet with images of ten classes, and lists of twelve: 0 and 1 train, 2 tests."""
    root = write_tree(tmp_path / "domainnet", DOMAINNET.domains, TEN, 3)
    for domain in DOMAINNET.domains:
        for ending, numbers in (("train", (0, 1)), ("test", (2,))):
            lines = [
                f"{domain}/{name}/{k}.png {label}\n"
                for label, name in enumerate(sorted((*TEN, "airplane", "zigzag")))
                for k in numbers
            ]
            (root / f"{domain}_{ending}.txt").write_text("".join(lines))
    return root


@pytest.mark.parametrize("name", COUNTS)
def test_domains_and_classes_are_in_the_published_order_and_counts_are_expected(tmp_path, name):
    source = load(name, write_tree(tmp_path, FOLDERS[name].domains, [*FOLDERS[name].classes], 1))
    assert [pool.name for pool in source.pools] == list(FOLDERS[name].domains)
    assert source.classes == tuple(FOLDERS[name].classes)
    expected = [int(note.split("expected ")[1].split(":")[0]) for note in source.notes]
    assert expected == COUNTS[name]
    assert_in_place(source)
    assert all(pool.parts is None for pool in source.pools)


def test_classes_of_officehome_are_numbered_as_in_domainbed():
    home = list(FOLDERS["officehome"].classes)
    assert (len(home), home) == (65, sorted(home))


def test_the_form_of_office_31_serves_without_other_classes(tmp_path):
    row = FOLDERS["office_caltech10"]
    write_tree(tmp_path, [f"{domain}/images" for domain in row.domains], [*row.classes])
    for domain in list(row.domains)[:3]:
        write_shade(tmp_path / domain / "images" / "stapler" / "0.png", 1)
        (tmp_path / domain / "interest_points").mkdir()
    source = load("office_caltech10", tmp_path)
    assert_in_place(source)
    assert all(name.split("/")[1] == "images" for name in source.pools[0].names)


def test_train_and_val_of_digits_dg_become_parts_and_a_class_may_be_rare_but_not_absent(tmp_path):
    domains = FOLDERS["digits_dg"].domains
    for part, count in (("train", 2), ("val", 1)):
        write_tree(tmp_path, [f"{name}/{part}" for name in domains], "123456789", count)
    for name in list(domains)[:3]:
        write_shade(tmp_path / name / "train" / "0" / "0.png", 0)
    with pytest.raises(ValueError, match="'syn'"):
        load("digits_dg", tmp_path)
    write_shade(tmp_path / "syn" / "train" / "0" / "0.png", 0)
    for pool in load("digits_dg", tmp_path).pools:
        np.testing.assert_array_equal(pool.parts, [TRAIN] * 19 + [VALIDATION] * 9)


def test_lists_divide_a_domain_and_other_images_are_left_out(listed):
    write_shade(listed / "sketch" / "bird" / "9.png", 0)
    source = load("domainnet", listed)
    for pool in source.pools:
        assert pool.labels.tolist() == [label for label in range(10) for _ in "ab"] + [*range(10)]
        assert pool.parts.tolist() == [TRAIN] * 20 + [TEST] * 10
    assert_in_place(source)


def test_any_classes_of_the_lists_may_be_chosen_and_are_numbered_in_that_order(listed):
    source = load("domainnet", listed, classes=("zebra", "bird"))
    assert source.classes == ("zebra", "bird")
    pool = source.pools[1]
    names = [name.split("/")[1] for name in pool.names]
    assert names == [source.classes[label] for label in pool.labels]
    for classes in (("bird", "brid"), ("bird", "bird")):
        with pytest.raises(ValueError, match=r"data\.classes"):
            load("domainnet", listed, classes=classes)
    write_tree(listed, DOMAINNET.domains, ("airplane", "zigzag"), 3)
    source = load("domainnet", listed, classes=("all",))
    assert source.classes == ("airplane", *TEN, "zigzag")


def test_an_image_in_both_lists_tests(listed):
    path = listed / "sketch_test.txt"
    path.write_text(path.read_text() + "sketch/tiger/0.png 5\n")
    pool = load("domainnet", listed).pools[5]
    assert len(pool.labels) == 30
    assert pool.parts[pool.names == "sketch/tiger/0.png"].tolist() == [TEST]


def test_a_listed_image_or_a_list_that_is_missing_is_named(listed):
    (listed / "real" / "whale" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"real/whale/1\.png"):
        load("domainnet", listed)
    (listed / "painting_test.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"painting_test\.txt.*ai\.bu\.edu/M3SDA"):
        load("domainnet", listed)


@pytest.mark.parametrize("content", [b"clipart/bird/0.jpg one\n", b"\xff\xfe\x00"])
def test_lists_of_another_form_are_named(listed, content):
    (listed / "clipart_train.txt").write_bytes(content)
    with pytest.raises(ValueError, match=str(listed / "clipart_train.txt")):
        load("domainnet", listed)


def test_the_real_images_of_pacs_have_the_published_counts(shared, monkeypatch):
    def blank(files, size, **options):
        return np.zeros((len(files), size, size, 3), np.uint8), ()

    monkeypatch.setattr("fedjax_bn.data.sets.folders.decode", blank)
    source = load("pacs", shared / "data" / "pacs")
    assert {pool.name: len(pool.labels) for pool in source.pools} == FOLDERS["pacs"].counts
    for pool in source.pools:
        names = [name.split("/")[1] for name in pool.names]
        assert names == [source.classes[label] for label in pool.labels]
