"""Dice and IoU against sets of pixels, surface distances against all pairs of pixels, in NumPy."""

import jax
import numpy as np
import pytest
from scipy import ndimage

from fedjax_bn.task import segmentation
from fedjax_bn.tasks.segmentation import (
    dice_and_iou,
    hd95_and_assd,
    overlaps,
    surface_distances,
    surface_scores,
)

CLASSES = 4


def masks(count, seed, classes=CLASSES, size=8):
    return np.random.default_rng(seed).integers(0, classes, (count, size, size)).astype(np.uint8)


def logits_of(mask, classes=CLASSES):
    """Logits whose largest is at the mask's class."""
    return 3 * np.eye(classes, dtype=np.float32)[mask]


def by_hand(predicted, mask, volume, nested=False):
    """Dice and IoU of every volume and class, from sets of pixels."""
    rows = []
    for one in dict.fromkeys(volume):
        found, true = predicted[volume == one], mask[volume == one]
        known, row = true != 255, []
        for number in range(1, CLASSES):
            inside = (lambda m, c=number: m >= c) if nested else (lambda m, c=number: m == c)
            a = set(np.flatnonzero((inside(found) & known).ravel()).tolist())
            b = set(np.flatnonzero((inside(true) & known).ravel()).tolist())
            total, union = len(a) + len(b), len(a | b)
            row.append((2 * len(a & b) / total if total else 1, len(a & b) / union if union else 1))
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_dice_and_iou_are_those_of_sets_of_pixels_by_volume(seed, nested):
    mask, predicted = masks(7, seed), masks(7, seed + 10)
    mask[:, :2, :3] = 255  # without a label
    predicted[predicted == 3] = 2  # a class that is not predicted
    mask[:3][mask[:3] == 3] = 1  # nor in the truth of one volume
    volume = np.array([5, 5, 5, 2, 2, 9, 9], np.int32)
    expected = by_hand(predicted, mask, volume, nested)
    label = {"mask": mask, "volume": volume}
    found = jax.jit(overlaps, static_argnums=3, static_argnames="nested")(
        predicted, label, np.ones(7, bool), CLASSES, nested=nested
    )
    (dice, iou), weights = dice_and_iou(jax.tree.map(np.asarray, found))
    for number, row in zip((0, 3, 5), expected, strict=True):
        np.testing.assert_allclose((dice[number], iou[number]), row.T, rtol=1e-6)
    np.testing.assert_allclose(weights, [1 / 3] * 3 + [0.5] * 4, rtol=1e-6)
    score = segmentation(CLASSES, nested=nested).score(logits_of(predicted), label)
    np.testing.assert_allclose(score, 100 * expected[..., 0].mean(), rtol=1e-6)


def test_a_class_that_both_masks_lack_scores_1_and_one_that_one_mask_lacks_0():
    empty, full = np.zeros((1, 4, 4), np.uint8), np.ones((1, 4, 4), np.uint8)
    score = segmentation(2).score
    for predicted, mask, expected in ((empty, empty, 100), (empty, full, 0), (full, empty, 0)):
        assert score(logits_of(predicted, 2), {"mask": mask}) == expected
    nothing = np.full((1, 4, 4), 255, np.uint8)
    assert score(logits_of(full, 2), {"mask": nothing}) == 100
    assert score(logits_of(full, 2), {"mask": full}, np.array([False])) == 0


def test_one_logit_is_that_of_class_1_against_a_background_of_0():
    mask, predicted = masks(3, 0, 2), masks(3, 1, 2)
    logit = np.where(predicted, 0.5, -0.5)[..., None].astype(np.float32)
    task = segmentation(2)
    assert task.score(logit, {"mask": mask}) == task.score(logits_of(predicted, 2), {"mask": mask})


SHAPES = {"image": (17, 13), "volume": (5, 12, 9)}
SPACINGS = {"image": (0.7, 1.9), "volume": (3.5, 0.7, 1.1)}


def blob(shape, seed):
    noise = np.random.default_rng(seed).normal(size=shape)
    return ndimage.gaussian_filter(noise, 1.2) > 0.12


def surface(mask):
    """The places of pixels with a neighbour outside the mask, one side at a time."""
    padded, touches = np.pad(mask, 1), np.zeros(mask.shape, bool)
    for axis in range(mask.ndim):
        for step in (-1, 1):
            inner = tuple(slice(1, -1) for _ in mask.shape)
            touches |= ~np.roll(padded, step, axis)[inner]
    return np.argwhere(mask & touches)


def brute_force(one, other, spacing):
    places = [surface(mask) * np.float64(spacing) for mask in (one, other)]
    far = np.sqrt(((places[0][:, None] - places[1]) ** 2).sum(-1))
    return far.min(1), far.min(0)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_distances_are_those_of_all_pairs_of_surface_pixels(kind, seed):
    masks = blob(SHAPES[kind], seed), blob(SHAPES[kind], seed + 50)
    expected = brute_force(*masks, SPACINGS[kind])
    for found, wanted in zip(surface_distances(*masks, SPACINGS[kind]), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    hd95, assd = hd95_and_assd(*masks, SPACINGS[kind])
    np.testing.assert_allclose(hd95, max(np.percentile(one, 95) for one in expected), rtol=1e-12)
    np.testing.assert_allclose(assd, np.concatenate(expected).mean(), rtol=1e-12)


def test_a_mask_without_the_region_leaves_distances_undefined():
    one, nothing = blob((9, 9), 0), np.zeros((9, 9), bool)
    for pair in ((one, nothing), (nothing, one), (nothing, nothing)):
        assert np.isnan(hd95_and_assd(*pair)).all()
        with pytest.raises(ValueError, match="empty"):
            surface_distances(*pair)


def square(*places, side=3, size=12):
    """u8[n, size, size] with a square of ones in each mask; None leaves a mask empty."""
    masks = np.zeros((len(places), size, size), np.uint8)
    for mask, place in zip(masks, places, strict=True):
        if place is not None:
            mask[place[0] : place[0] + side, place[1] : place[1] + side] = 1
    return masks


def test_slices_of_a_volume_with_a_spacing_are_scored_together_in_millimetres():
    true = square((2, 2), (5, 5), (2, 2))
    predicted = square(None, (5, 5), (2, 2))
    label = {
        "mask": true,
        "volume": np.array([7, 3, 7], np.int32),
        "spacing": np.tile(np.float32([4, 1, 0.5]), (3, 1)),
    }
    found = surface_scores(predicted, label, 2)
    assert found.shape == (2, 1, 2)  # in the order of first slices
    expected = hd95_and_assd(predicted[[0, 2]] == 1, true[[0, 2]] == 1, (4, 1, 0.5))
    np.testing.assert_array_equal(found[0, 0], expected)
    assert expected[0] == 4  # the missing slice is that far away
    np.testing.assert_array_equal(found[1], 0)


def test_without_a_spacing_a_volume_has_the_mean_of_its_slices_or_tiles_in_pixels():
    true, predicted = square((2, 2), (2, 2), None, (2, 2)), square((2, 4), (2, 3), None, None)
    label = {"mask": true, "volume": np.array([0, 0, 0, 1], np.int32)}
    found = surface_scores(predicted, label, 2)
    np.testing.assert_array_equal(found[0, 0, 0], (2 + 1) / 2)  # of those with both masks
    assert np.isnan(found[1]).all()
    alone = surface_scores(predicted, {"mask": true}, 2)
    np.testing.assert_array_equal(alone[:, 0, 0], [2, 1, np.nan, np.nan])


def test_nested_regions_and_unlabelled_pixels_are_those_of_the_overlaps():
    mask = square((2, 2), side=6)
    mask[0, 4:6, 4:6] = 2
    predicted = mask.copy()
    predicted[predicted == 2] = 1
    apart, joined = (surface_scores(predicted, {"mask": mask}, 3, nested=n)[0] for n in (0, 1))
    assert apart[0, 0] > 0  # class 1 has a hole in the truth alone
    np.testing.assert_array_equal(joined[0], 0)  # the disc with its cup
    assert np.isnan(apart[1]).all()
    assert np.isnan(joined[1]).all()
    mask[0, :, 9:] = 255
    predicted[0, :, 9:] = 1
    np.testing.assert_array_equal(
        surface_scores(predicted, {"mask": mask}, 3, nested=True)[0, 0], 0
    )
