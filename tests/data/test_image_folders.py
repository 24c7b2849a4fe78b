"""Image folders: rows of the table in their published forms; what is left out, what is an error."""

from pathlib import Path

import numpy as np
import pytest

from fedjax_bn.data.sets import image_folders
from fedjax_bn.data.sets.folders import Published, domain_folders, files_below
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
    with pytest.raises(ValueError, match="/syn "):
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


def test_a_listed_image_that_is_missing_and_a_list_of_another_form_or_none_are_named(listed):
    (listed / "real" / "whale" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"real/whale/1\.png"):
        load("domainnet", listed)
    (listed / "painting_test.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"painting_test\.txt.*ai\.bu\.edu/M3SDA"):
        load("domainnet", listed)
    (listed / "clipart_train.txt").write_bytes(b"clipart/bird/0.jpg one\n")
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


DOMAINS, CLASSES = ("north", "Far South"), ("ant", "big_bee", "cow")
PETS = Published(
    name="pets",
    about="Pets: small and large",
    domains={"north": (), "Far South": ("south",)},
    classes={"ant": (), "big_bee": (), "cow": ("0",)},
    counts={"north": 6, "Far South": 6},
    where="it must hold north and Far South (from example.org)",
    mean=(0.5,),
    std=(0.5,),
)


def load_pets(path: Path):
    return load(PETS, path, cache=None)


@pytest.fixture
def tree(tmp_path) -> Path:
    return write_tree(tmp_path / "pets", DOMAINS, CLASSES)


def test_images_come_by_domain_class_and_name(tree, tmp_path):
    source = load_pets(tree)
    assert source.classes == CLASSES
    assert source.notes == ()
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    assert source.pools[1].names.tolist() == [
        f"Far South/{name}/{k}.png" for name in CLASSES for k in range(2)
    ]
    assert source.pools[0].labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert_in_place(source)
    assert source.key == load_pets(write_tree(tmp_path / "copy" / "pets", DOMAINS, CLASSES)).key
    write_shade(tree / "north" / "ant" / "0.png", 7, size=40)
    assert load_pets(tree).key != source.key


@pytest.mark.parametrize("spelling", ["far_south", "FAR-SOUTH", "South"])
def test_folders_may_be_spelled_in_other_ways(tree, spelling):
    (tree / "Far South").rename(tree / spelling)
    (tree / "north" / "big_bee").rename(tree / "north" / "Big Bee")
    (tree / "north" / "cow").rename(tree / "north" / "0")
    source = load_pets(tree)
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    assert_in_place(source)


def test_domains_and_classes_may_lie_one_folder_deeper(tree):
    assert domain_folders(tree.parent, PETS)[0] == tree
    (tree / "north").rename(tree / "images")
    (tree / "north").mkdir()
    (tree / "images").rename(tree / "north" / "images")
    assert_in_place(load_pets(tree))


def test_what_is_no_image_of_a_class_is_left_out(tree):
    count = len(files_below(tree))
    for place in (tree, tree / "north", tree / "north" / "ant"):
        for name in ("__MACOSX", "@eaDir"):
            write_shade(place / name / "0.png", 1)
    assert load_pets(tree).notes == ()
    assert len(files_below(tree)) == count
    for name in ("Thumbs.db", ".DS_Store", "._0.png", "notes.txt"):
        (tree / "north" / "ant" / name).write_bytes(b"x")
    write_shade(tree / "Far South" / "dingo" / "0.png", 1)
    write_shade(tree / "north" / "cow" / "calves" / "0.png", 1)
    assert [len(pool.labels) for pool in load_pets(tree).pools] == [6, 6]


def test_another_count_than_published_is_a_note(tree):
    write_shade(tree / "north" / "ant" / "2.png", 0)
    (tree / "Far South" / "ant" / "0.png").unlink()
    for note, name, count in zip(load_pets(tree).notes, DOMAINS, (7, 5), strict=True):
        assert note.startswith(f"pets, {name}: found {count} images, expected 6")


def test_classes_without_images_are_named_together_with_what_to_do(tree):
    (tree / "north" / "big_bee").rename(tree / "north" / "wasp")
    for file in (tree / "north" / "ant").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"ant, big_bee.*example\.org"):
        load_pets(tree)


@pytest.mark.parametrize("path", ["nowhere", "pets/Far South", ""])
def test_a_wrong_path_and_missing_domains_are_named_with_what_to_do(tree, path):
    (tree / "north").rename(tree / "northwest")
    for place in (path and tree.parent / path, tree):
        with pytest.raises(FileNotFoundError, match=r"data.path .*pets.*example\.org"):
            load_pets(place)
