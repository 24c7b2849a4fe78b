"""The embedded dataset: real digits, each with one owner, through scanners that differ."""

import numpy as np
import pytest
from scipy import ndimage

from fedjax_bn.data.division.by_class import stratified_split
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.data.domain import check_dataset, splits, whole
from fedjax_bn.data.seeds import generator
from fedjax_bn.data.sets import scanners

PLAIN = scanners._Scanner("plain", (200, 150, 100), (10, 20, 30), 28, 0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def dataset():
    return scanners.load(seed=0)


def test_six_scanners_own_the_documented_numbers_of_images(dataset):
    sizes = [[len(split.labels) for _, split in splits(d)] for d in dataset.domains]
    assert sizes == [[180, 30, 90]] * 3 + [[180, 30, 89]] * 3
    assert [d.name for d in dataset.domains] == [s.name for s in scanners.SCANNERS]
    assert dataset.domains[-1].name == "fax"


def test_the_dataset_is_sound_and_images_are_bytes_of_28_by_28(dataset):
    check_dataset(dataset)
    assert dataset.domains[0].train.images.dtype == np.uint8
    assert dataset.domains[0].train.images.shape == (180, 28, 28, 3)
    assert dataset.num_classes == 10


def test_every_class_is_in_every_split_in_equal_numbers_up_to_two(dataset):
    for domain in dataset.domains:
        for _, split in splits(domain):
            counts = np.bincount(split.labels, minlength=10)
            assert counts.max() - counts.min() <= 2


def test_every_source_image_is_used_exactly_once(monkeypatch):
    """Scans that show nothing but the number of their source, in the paper's red and green."""

    def show_number(scanner, ink, photograph, rng):
        number = np.round(ink[:, 0, 0] * 4096).astype(int)
        image = np.zeros((len(ink), 28, 28, 3), np.uint8)
        image[..., 0], image[..., 1] = (part[:, None, None] for part in np.divmod(number, 256))
        return image

    _, labels = scanners.handwriting()
    numbers = np.broadcast_to(np.arange(1797)[:, None, None] / 4096, (1797, 8, 8))
    monkeypatch.setattr(scanners, "handwriting", lambda: (numbers, labels))
    monkeypatch.setattr(scanners, "_scan", show_number)
    parts = [whole(domain) for domain in scanners.load(seed=5).domains]
    corners = np.concatenate([part.images[:, 0, 0].astype(int) for part in parts])
    used = corners[:, 0] * 256 + corners[:, 1]
    np.testing.assert_array_equal(np.sort(used), np.arange(1797))
    np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), labels[used])


def test_another_seed_gives_other_bytes(monkeypatch):
    """`test_goldens` checks that the same seed gives the same bytes."""
    ink, labels = scanners.handwriting()
    monkeypatch.setattr(scanners, "handwriting", lambda: (ink[:240], labels[:240]))
    monkeypatch.setattr(scanners, "TRAIN", 20)
    monkeypatch.setattr(scanners, "VALIDATION", 10)
    assert fingerprint(scanners.load(seed=1)) != fingerprint(scanners.load(seed=0))


def test_scanners_differ_in_the_distribution_of_features(dataset):
    """Mean colours are further apart between any two scanners than within one."""
    means = [domain.train.images.mean(axis=(1, 2)) for domain in dataset.domains]
    centres = np.array([mean.mean(axis=0) for mean in means])
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
    assert apart[~np.eye(6, dtype=bool)].min() > 20


def test_polarity_is_inverted_where_ink_is_lighter_than_paper():
    inverted = {s.name for s in scanners.SCANNERS if sum(s.ink) > sum(s.paper)}
    assert inverted == {"blueprint", "microfilm", "magazine"}


def test_ink_is_shown_in_its_colour_on_paper_in_its_colour():
    photograph = np.zeros((40, 40, 3), np.uint8)
    image = scanners._scan(PLAIN, np.ones((2, 8, 8)), photograph, generator(0))
    np.testing.assert_array_equal(image[:, 14, 14], [[10, 20, 30]] * 2)
    np.testing.assert_array_equal(image[:, 0, 0], [[200, 150, 100]] * 2)


def test_strokes_grow_and_shrink_by_whole_pixels():
    ink = np.zeros((1, 28, 28))
    ink[0, 10:15, 10:15] = 1
    assert [scanners._sense(ink, PLAIN._replace(stroke=p)).sum() for p in (-1, 0, 1)] == [9, 25, 49]


def test_blur_keeps_the_amount_of_ink_and_zero_blur_every_pixel():
    ink = np.zeros((1, 28, 28))
    ink[0, 12:16, 12:16] = 1
    blurred = scanners._sense(ink, PLAIN._replace(blur=1.0))
    assert blurred.sum() == pytest.approx(16, rel=1e-9)
    assert blurred.max() < 1
    np.testing.assert_array_equal(scanners._sense(ink, PLAIN), ink)


def test_resolution_14_shows_block_means_of_two_by_two():
    ink = generator(0).random((3, 28, 28))
    blocks = ink.reshape(3, 14, 2, 14, 2).mean(axis=(2, 4))
    expected = blocks.repeat(2, axis=1).repeat(2, axis=2)
    seen = scanners._sense(ink, PLAIN._replace(resolution=14))
    np.testing.assert_allclose(seen, expected, atol=1e-12)
    np.testing.assert_allclose(scanners._sense(ink, PLAIN), ink, atol=1e-12)


def test_a_sheet_lies_askew_but_its_writing_stays_in_the_picture():
    ink, _ = scanners.handwriting()
    placed = scanners.place(ink[:200], generator(0))
    assert placed.shape == (200, 28, 28)
    assert 0 <= placed.min() <= placed.max() <= 1
    middles = np.array([ndimage.center_of_mass(one) for one in placed])
    assert np.abs(middles - 13.5).max() < 5
    assert np.abs(middles - middles.mean(axis=0)).max() > 1


def test_crops_are_windows_of_the_photograph_and_differ():
    photograph = generator(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    crops = scanners._random_crops(photograph, 5, generator(1))
    windows = {photograph[y : y + 28, x : x + 28].tobytes() for y in range(13) for x in range(23)}
    assert crops.shape == (5, 28, 28, 3)
    assert {crop.tobytes() for crop in crops} <= windows
    assert len({crop.tobytes() for crop in crops}) > 1


def test_ties_round_the_same_way_whatever_their_last_bits():
    levels = np.array([-3.0, 0.5, 0.5 + 1e-9, 0.5 - 1e-9, 254.9, 300.0])
    assert scanners.to_pixels(levels).tolist() == [0, 0, 0, 0, 255, 255]


def test_noise_has_the_documented_deviation():
    noisy = PLAIN._replace(paper=(128, 128, 128), noise=10.0)
    image = scanners._scan(
        noisy, np.zeros((40, 8, 8)), np.zeros((28, 28, 3), np.uint8), generator(0)
    )
    assert image.astype(float).std() == pytest.approx(10, rel=0.02)


def test_owners_are_drawn_with_the_classes_in_proportion():
    _, labels = scanners.handwriting()
    owners = stratified_split(labels, [300, 300, 300, 299, 299, 299], generator(0, 0))
    counts = np.array([np.bincount(labels[owned]) for owned in owners])
    assert (counts.max(axis=0) - counts.min(axis=0) <= 2).all()
