"""VLCS in DomainBed's and its authors' form, from small trees that the tests write."""

import numpy as np
import pytest

from fedjax_bn.data.sets import image_folders
from trees import assert_in_place, write_shade, write_tree

VLCS = image_folders.IMAGE_FOLDERS["vlcs"]
CLASSES = tuple(VLCS.classes)
NUMBERS = tuple(map(str, range(5)))
AUTHORS = ("CALTECH", "LABELME", "SUN", "PASCAL")


def load(path):
    return image_folders.load(VLCS, path, image_size=6, progress=False)


def test_domainbeds_form_has_no_parts(tmp_path):
    source = load(write_tree(tmp_path, VLCS.domains, CLASSES))
    assert source.classes == CLASSES
    assert [pool.name for pool in source.pools] == ["Caltech101", "LabelMe", "SUN09", "VOC2007"]
    assert all(pool.parts is None for pool in source.pools)
    assert_in_place(source)


@pytest.mark.parametrize("train", ["train", "TRAIN"])
def test_the_authors_form_divides_by_folder(tmp_path, train):
    for part, count in ((train, 3), ("crossval", 1), ("test", 2)):
        write_tree(tmp_path, [f"{domain}/{part}" for domain in AUTHORS], NUMBERS, count)
    write_tree(tmp_path, [f"{domain}/full" for domain in AUTHORS], NUMBERS, 6)
    source = load(tmp_path)
    for pool in source.pools:
        np.testing.assert_array_equal(pool.parts, [0] * 15 + [1] * 5 + [2] * 10)
        assert not any("/full/" in name for name in pool.names)
    assert_in_place(source)


def test_without_train_the_full_folder_counts(tmp_path):
    source = load(write_tree(tmp_path, [f"{domain}/full" for domain in AUTHORS], NUMBERS))
    assert [len(pool.labels) for pool in source.pools] == [10] * 4
    assert all(pool.parts is None for pool in source.pools)
    assert_in_place(source)


def test_a_class_may_be_rare_but_not_absent(tmp_path):
    for part in ("train", "test"):
        write_tree(tmp_path, [f"{domain}/{part}" for domain in AUTHORS], NUMBERS[1:])
    for domain in AUTHORS[:3]:
        write_shade(tmp_path / domain / "train" / "0" / "0.png", 0)
    with pytest.raises(ValueError, match=r"vlcs, 'VOC2007': no images of bird in"):
        load(tmp_path)
    write_shade(tmp_path / "PASCAL" / "train" / "0" / "0.png", 0)
    assert (load(tmp_path).pools[3].labels == 0).sum() == 1


def test_published_counts_are_expected(tmp_path):
    notes = load(write_tree(tmp_path, VLCS.domains, CLASSES, 1)).notes
    assert [note.split("expected ")[1].split()[0] for note in notes] == [
        "1415",
        "2656",
        "3282",
        "3376",
    ]
