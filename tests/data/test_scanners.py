"""The embedded dataset: real digits, each with one owner, through scanners that differ."""

import numpy as np
import pytest
from scipy import ndimage

from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.data.domain import check_dataset, splits, whole
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.sets import scanners

PLAIN = scanners.SCANNERS[0]._replace(
    paper=(200, 150, 100), ink=(10, 20, 30), stroke=0, blur=0.0, photograph=0.0, noise=0.0
)


def seen_by(**changes) -> np.ndarray:
    """Training images of one scanner, u8[180, 28, 28, 3]."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanners, "SCANNERS", [PLAIN._replace(**changes)] * 6)
        return scanners.load_scanners(0).domains[0].train.images


@pytest.fixture(scope="module")
def dataset():
    return scanners.load_scanners(seed=0)


def test_six_scanners_own_the_documented_numbers_of_images(dataset):
    sizes = [[len(split.labels) for _, split in splits(d)] for d in dataset.domains]
    assert sizes == [[180, 30, 90]] * 3 + [[180, 30, 89]] * 3
    assert [d.name for d in dataset.domains] == [s.name for s in scanners.SCANNERS]
    assert check_dataset(dataset).domains[-1].name == "fax"
    assert dataset.domains[0].train.images.shape == (180, 28, 28, 3)


def test_every_class_is_in_every_split_in_equal_numbers_up_to_two(dataset):
    for domain in dataset.domains:
        for _, split in splits(domain):
            counts = np.bincount(split.labels, minlength=10)
            assert counts.max() - counts.min() <= 2


def test_every_source_image_is_used_exactly_once(monkeypatch):
    """Labels that are the numbers of the scans."""
    ink, _ = scanners.handwriting()
    monkeypatch.setattr(scanners, "handwriting", lambda: (ink, np.arange(1797)))
    parts = [whole(domain) for domain in scanners.load_scanners(seed=5).domains]
    used = np.concatenate([part.labels for part in parts])
    np.testing.assert_array_equal(np.sort(used), np.arange(1797))


def test_another_seed_gives_other_bytes(dataset):
    """`test_goldens` checks that the same seed gives the same bytes."""
    assert fingerprint(scanners.load_scanners(seed=1)) != fingerprint(dataset)


def test_scanners_differ_in_the_distribution_of_features(dataset):
    """Mean colours are further apart between any two scanners than within one."""
    means = [domain.train.images.mean(axis=(1, 2)) for domain in dataset.domains]
    centres = np.array([mean.mean(axis=0) for mean in means])
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
    assert apart[~np.eye(6, dtype=bool)].min() > 20


def test_ink_is_shown_in_its_colour_on_paper_in_its_colour():
    images = seen_by()
    np.testing.assert_array_equal(images[:, 0, 0], [[200, 150, 100]] * 180)
    darkest = images.reshape(180, -1, 3).min(1)
    assert np.abs(np.median(darkest, 0) - (10, 20, 30)).max() <= 10


def test_strokes_grow_and_shrink_and_blur_keeps_the_amount_of_ink():
    thin, plain, broad, blurred = (
        255.0 - seen_by(paper=(255,) * 3, ink=(0,) * 3, **changes)[..., 0]
        for changes in ({"stroke": -1}, {}, {"stroke": 1}, {"blur": 0.6})
    )
    assert (thin <= plain).all()
    assert (plain <= broad).all()
    assert blurred.mean() == pytest.approx(plain.mean(), rel=1e-3)
    assert blurred.std() < plain.std()


def test_resolution_14_shows_block_means_of_two_by_two():
    blocks = seen_by().astype(float).reshape(180, 14, 2, 14, 2, 3).mean((2, 4))
    coarse = seen_by(resolution=14)
    np.testing.assert_allclose(coarse[:, ::2, ::2], blocks, atol=1)
    np.testing.assert_array_equal(coarse[:, ::2, ::2], coarse[:, 1::2, 1::2])


def test_a_sheet_lies_askew_but_its_writing_stays_in_the_picture():
    ink, _ = scanners.handwriting()
    placed = scanners.place(ink[:200], generator(0))
    assert placed.shape == (200, 28, 28)
    assert 0 <= placed.min() <= placed.max() <= 1
    middles = np.array([ndimage.center_of_mass(one) for one in placed])
    assert np.abs(middles - 13.5).max() < 5
    assert np.abs(middles - middles.mean(axis=0)).max() > 1


def test_ties_round_the_same_way_whatever_their_last_bits():
    levels = np.array([-3.0, 0.5, 0.5 + 1e-9, 0.5 - 1e-9, 254.9, 300.0])
    assert scanners.to_pixels(levels).tolist() == [0, 0, 0, 0, 255, 255]


def test_noise_has_the_documented_deviation():
    images = seen_by(paper=(128,) * 3, ink=(128,) * 3, noise=10.0)
    assert images.astype(float).std() == pytest.approx(10, rel=0.02)
