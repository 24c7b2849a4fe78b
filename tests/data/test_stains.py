"""The embedded segmentation dataset is what its docstring says."""

import numpy as np
import pytest
from scipy import ndimage

from fedjax_bn.data.domain import check_dataset, splits
from fedjax_bn.data.label_trees import MASK
from fedjax_bn.data.sets import scanners, stains

FEW = {"train": 12, "validation": 4, "test": 6}
PLAIN = stains.STAINS[0]._replace(
    tissue=(90, 80, 70), wall=(10, 20, 30), lumen=(200, 210, 220), texture=0, blur=0.0, noise=0.0
)


@pytest.fixture(scope="module")
def dataset():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stains, "IMAGES", FEW)
        yield check_dataset(stains.load_stains(3))


def masks_of(dataset):
    return [split.labels[MASK] for domain in dataset.domains for _, split in splits(domain)]


def test_five_stains_have_as_many_images_as_stated(dataset):
    names = ["eosin", "silver", "azan", "fluorescence", "faded"]
    assert [domain.name for domain in dataset.domains] == names
    for domain in dataset.domains:
        assert {name: len(split.images) for name, split in splits(domain)} == FEW
        assert domain.train.images.shape[1:] == (64, 64, 3)
    assert dataset.classes == ("tissue", "wall", "lumen")


def test_lumens_are_what_walls_enclose_and_every_image_has_one(dataset):
    for masks in masks_of(dataset):
        for mask in masks:
            filled = ndimage.binary_fill_holes(mask == 1)
            np.testing.assert_array_equal(filled, mask > 0)
            assert (mask == 2).sum() >= 12


def test_no_scan_is_on_both_sides_of_a_division(monkeypatch):
    ink, labels = scanners.handwriting()
    marked, seen = ink.copy(), []
    marked[:, 0, 0] = np.arange(len(ink))  # so that what is placed shows which scan it is

    def watched(some, rng):
        seen.append(some[:, 0, 0].astype(int))
        return place(np.clip(some, 0, 1), rng)

    place = stains.place
    monkeypatch.setattr(scanners, "handwriting", lambda: (marked, labels))
    monkeypatch.setattr(stains, "place", watched)
    monkeypatch.setattr(stains, "IMAGES", dict.fromkeys(FEW, 1))
    stains.load_stains(0)
    assert len(seen) == 15
    assert sum(map(len, seen)) == len(set(np.concatenate(seen)))


def test_masks_do_not_depend_on_what_a_stain_looks_like(dataset, monkeypatch):
    plain = [PLAIN._replace(name=s.name, resolution=s.resolution) for s in stains.STAINS]
    monkeypatch.setattr(stains, "IMAGES", FEW)
    monkeypatch.setattr(stains, "STAINS", plain)
    for masks, others in zip(masks_of(dataset), masks_of(stains.load_stains(3)), strict=True):
        np.testing.assert_array_equal(masks, others)
