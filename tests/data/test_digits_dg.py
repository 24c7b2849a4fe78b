"""Digits-DG from small trees that the tests write."""

import numpy as np
import pytest

from fedjax_bn.data.sets import image_folders
from trees import assert_in_place, write_tree

DOMAINS = ("mnist", "mnist_m", "svhn", "syn")
DIGITS = tuple(map(str, range(10)))


def tree(root):
    for part, count in (("train", 2), ("val", 1)):
        write_tree(root, [f"{domain}/{part}" for domain in DOMAINS], DIGITS, count)
    return root


def load(path):
    return image_folders.load("digits_dg", path, image_size=6, progress=False)


def test_train_and_val_become_training_and_validation_parts(tmp_path):
    source = load(tree(tmp_path))
    assert source.classes == DIGITS
    assert [pool.name for pool in source.pools] == list(DOMAINS)
    for pool in source.pools:
        np.testing.assert_array_equal(pool.parts, [0] * 20 + [1] * 10)
    assert_in_place(source)
    assert all("found 30 images, expected 6000" in note for note in source.notes)


def test_an_empty_class_folder_is_named(tmp_path):
    tree(tmp_path)
    (tmp_path / "svhn" / "val" / "7" / "0.png").unlink()
    with pytest.raises(ValueError, match=r"class folders without images: .*svhn/val/7; fetch"):
        load(tmp_path)


def test_a_domain_without_its_two_folders_is_an_error(tmp_path):
    tree(tmp_path)
    (tmp_path / "syn" / "train").rename(tmp_path / "syn" / "training")
    (tmp_path / "syn" / "val").rename(tmp_path / "syn" / "validation")
    with pytest.raises(ValueError, match=r"'syn': no images of 0, 1, .* each with train and val"):
        load(tmp_path)
