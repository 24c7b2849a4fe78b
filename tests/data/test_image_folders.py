"""Rows of the table of image folders, from small trees in the forms in which they are published."""

import itertools

import numpy as np
import pytest

from fedjax_bn.data.sets import image_folders
from trees import assert_in_place, write_shade, write_tree

FOLDERS = image_folders.IMAGE_FOLDERS
NUMBERS = tuple(map(str, range(5)))
AUTHORS = ("CALTECH", "LABELME", "SUN", "PASCAL")  # VLCS' domains as its authors write them
COUNTS = {
    "digits_dg": [6000] * 4,
    "office_caltech10": [958, 1123, 157, 295],
    "officehome": [2427, 4365, 4439, 4357],
    "vlcs": [1415, 2656, 3282, 3376],
}


def load(name, path):
    return image_folders.load_image_folders(name, path, image_size=6, progress=False)


def write(name, root, count=1):
    """A tree in the usual form."""
    row = FOLDERS[name]
    parts = [f"{domain}/{part}" for part in row.parts for domain in row.domains]
    return write_tree(root, parts if row.always_divided else row.domains, [*row.classes], count)


@pytest.mark.parametrize("name", COUNTS)
def test_domains_and_classes_are_in_the_published_order_and_counts_are_expected(tmp_path, name):
    source = load(name, write(name, tmp_path))
    assert [pool.name for pool in source.pools] == list(FOLDERS[name].domains)
    assert source.classes == tuple(FOLDERS[name].classes)
    expected = [int(note.split("expected ")[1].split()[0]) for note in source.notes]
    assert expected == COUNTS[name]
    if not FOLDERS[name].always_divided:
        assert_in_place(source)
        assert all(pool.parts is None for pool in source.pools)


def test_classes_are_numbered_as_in_domainbed_and_fedbns_code():
    home = list(FOLDERS["officehome"].classes)
    assert (len(home), home) == (65, sorted(home))
    assert tuple(FOLDERS["office_caltech10"].classes) == (
        *("back_pack", "bike", "calculator", "headphones", "keyboard"),
        *("laptop_computer", "monitor", "mouse", "mug", "projector"),
    )
    assert FOLDERS["office_caltech10"].mean == (0.0, 0.0, 0.0)
    assert FOLDERS["office_caltech10"].std == (1.0, 1.0, 1.0)


def test_a_domain_is_found_under_any_of_its_names(tmp_path):
    write("officehome", tmp_path)
    for old, new in itertools.pairwise(("Real World", "Real_World", "RealWorld", "real")):
        (tmp_path / old).rename(tmp_path / new)
        source = load("officehome", tmp_path)
        assert_in_place(source)
        assert source.pools[3].name == "Real World"


def test_the_form_of_office_31_serves_without_its_other_classes(tmp_path):
    row = FOLDERS["office_caltech10"]
    write_tree(tmp_path, [f"{domain}/images" for domain in row.domains], [*row.classes])
    for domain in list(row.domains)[:3]:
        write_shade(tmp_path / domain / "images" / "stapler" / "0.png", 1)
        (tmp_path / domain / "interest_points").mkdir()
    source = load("office_caltech10", tmp_path)
    assert_in_place(source)
    assert all(name.split("/")[1] == "images" for name in source.pools[0].names)
    assert any(note.startswith("left out 3 files or folders") for note in source.notes)


def test_classes_may_have_the_names_of_caltech_256(tmp_path):
    write("office_caltech10", tmp_path)
    for usual, name in (("bike", "touring-bike"), ("laptop_computer", "laptop-101")):
        (tmp_path / "caltech" / usual).rename(tmp_path / "caltech" / name)
    (tmp_path / "dslr" / "back_pack").rename(tmp_path / "dslr" / "backpack")
    assert_in_place(load("office_caltech10", tmp_path))


@pytest.mark.parametrize("train", ["train", "TRAIN"])
def test_vlcs_authors_form_divides_by_folder(tmp_path, train):
    for part, count in ((train, 3), ("crossval", 1), ("test", 2)):
        write_tree(tmp_path, [f"{domain}/{part}" for domain in AUTHORS], NUMBERS, count)
    write_tree(tmp_path, [f"{domain}/full" for domain in AUTHORS], NUMBERS, 6)
    source = load("vlcs", tmp_path)
    for pool in source.pools:
        np.testing.assert_array_equal(pool.parts, [0] * 15 + [1] * 5 + [2] * 10)
        assert not any("/full/" in name for name in pool.names)
    assert_in_place(source)


def test_without_train_the_full_folder_counts(tmp_path):
    source = load("vlcs", write_tree(tmp_path, [f"{one}/full" for one in AUTHORS], NUMBERS))
    assert [len(pool.labels) for pool in source.pools] == [10] * 4
    assert all(pool.parts is None for pool in source.pools)
    assert_in_place(source)


def test_a_class_may_be_rare_but_not_absent(tmp_path):
    for part in ("train", "test"):
        write_tree(tmp_path, [f"{domain}/{part}" for domain in AUTHORS], NUMBERS[1:])
    for domain in AUTHORS[:3]:
        write_shade(tmp_path / domain / "train" / "0" / "0.png", 0)
    with pytest.raises(ValueError, match="'VOC2007'"):
        load("vlcs", tmp_path)
    write_shade(tmp_path / "PASCAL" / "train" / "0" / "0.png", 0)
    assert (load("vlcs", tmp_path).pools[3].labels == 0).sum() == 1


def test_train_and_val_of_digits_dg_become_training_and_validation_parts(tmp_path):
    for part, count in (("train", 2), ("val", 1)):
        write_tree(
            tmp_path, [f"{one}/{part}" for one in FOLDERS["digits_dg"].domains], "0123456789", count
        )
    source = load("digits_dg", tmp_path)
    for pool in source.pools:
        np.testing.assert_array_equal(pool.parts, [0] * 20 + [1] * 10)
    assert_in_place(source)
    (tmp_path / "syn" / "train").rename(tmp_path / "syn" / "training")
    (tmp_path / "syn" / "val").rename(tmp_path / "syn" / "validation")
    with pytest.raises(ValueError, match="'syn'"):
        load("digits_dg", tmp_path)
