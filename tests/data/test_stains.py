"""The embedded segmentation dataset is what its docstring says."""

import numpy as np
import pytest
from scipy import ndimage

from fedjax_bn.data.domain import check_dataset, splits
from fedjax_bn.data.label_trees import MASK
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.sets import scanners, stains

FEW = {"train": 12, "validation": 4, "test": 6}
PLAIN = stains._Stain("plain", (90, 80, 70), (10, 20, 30), (200, 210, 220), 0, 0.0, 64, 0.0, 0.0)


@pytest.fixture(scope="module")
def dataset():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stains, "IMAGES", FEW)
        yield check_dataset(stains.load(3))


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
            assert (mask == 2).sum() >= stains._LEAST


def test_an_image_has_one_to_three_glands(dataset):
    quarters = [
        mask.reshape(2, 32, 2, 32).any((1, 3)).sum()
        for mask in np.concatenate([*masks_of(dataset)])
    ]
    assert set(quarters) == {1, 2, 3}


def test_no_scan_is_on_both_sides_of_a_division(monkeypatch):
    ink, labels = scanners.handwriting()
    marked, seen = ink.copy(), []
    marked[:, 0, 0] = np.arange(len(ink))  # so that what is placed shows which scan it is

    def watched(some, rng):
        seen.append(some[:, 0, 0].astype(int))
        return place(np.clip(some, 0, 1), rng)

    place = stains.place
    monkeypatch.setattr(stains, "handwriting", lambda: (marked, labels))
    monkeypatch.setattr(stains, "place", watched)
    monkeypatch.setattr(stains, "IMAGES", dict.fromkeys(FEW, 1))
    stains.load(0)
    assert len(seen) == 15
    assert sum(map(len, seen)) == len(set(np.concatenate(seen)))


def test_masks_do_not_depend_on_what_a_stain_looks_like(dataset, monkeypatch):
    plain = [PLAIN._replace(name=s.name, resolution=s.resolution) for s in stains.STAINS]
    monkeypatch.setattr(stains, "IMAGES", FEW)
    monkeypatch.setattr(stains, "STAINS", plain)
    for masks, others in zip(masks_of(dataset), masks_of(stains.load(3)), strict=True):
        np.testing.assert_array_equal(masks, others)


def seen(stain, texture=0.0):
    """An image with one wall around a lumen of 20 x 20 pixels, and what is of which class."""
    mask = np.zeros((64, 64), int)
    mask[16:44, 16:44], mask[20:40, 20:40] = 1, 2
    texture = np.full((64, 64, 1), texture)
    return stains._seen(stain, (mask == 1) * 1.0, mask == 2, texture, generator(0)), mask


def test_tissue_walls_and_lumens_have_their_colours():
    image, mask = seen(PLAIN)
    colours = np.array([PLAIN.tissue, PLAIN.wall, PLAIN.lumen])
    np.testing.assert_array_equal(image, colours[mask])


def test_texture_is_on_the_tissue_alone():
    image, mask = seen(PLAIN._replace(texture=20), texture=0.5)
    np.testing.assert_array_equal(image - seen(PLAIN)[0], 10 * (mask == 0)[..., None].repeat(3, -1))


def test_half_the_resolution_has_blocks_of_two_by_two():
    image, _ = seen(PLAIN._replace(resolution=32, noise=20.0))
    blocks = image.reshape(32, 2, 32, 2, 3)
    np.testing.assert_array_equal(blocks, np.broadcast_to(blocks[:, :1, :, :1], blocks.shape))


def test_light_is_uneven_by_the_stated_share_and_noise_has_its_deviation():
    plain = PLAIN._replace(tissue=(100,) * 3, wall=(100,) * 3, lumen=(100,) * 3)
    image, _ = seen(plain._replace(shade=0.25))
    assert 75 <= image.min() < 85 < 115 < image.max() <= 125
    assert seen(plain._replace(noise=10.0))[0].std() == pytest.approx(10, rel=0.02)


def test_polarity_is_inverted_in_fluorescence_alone():
    inverted = [stain.name for stain in stains.STAINS if sum(stain.wall) > sum(stain.tissue)]
    assert inverted == ["fluorescence"]
