"""Dice and IoU by class and volume against sets of pixels, counted by hand in NumPy."""

import jax
import numpy as np
import pytest

from fedjax_bn.task import segmentation
from fedjax_bn.tasks.segmentation import dice_and_iou, overlaps

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


def test_the_score_is_that_of_all_samples_however_they_are_batched():
    """Volumes that two batches share, and padding that does not count."""
    mask, predicted, volume = masks(6, 3), masks(6, 4), np.array([1, 1, 2, 2, 2, 3], np.int32)
    score = segmentation(CLASSES).score
    whole = score(logits_of(predicted), {"mask": mask, "volume": volume})
    parts = []
    for start in (0, 4):
        rows = np.resize(np.arange(start, min(start + 4, 6)), 4)
        label = {"mask": mask[rows], "volume": volume[rows]}
        valid = np.arange(4) < 6 - start
        parts.append(score.of_batch(logits_of(predicted[rows]), label, valid))
    joined = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    np.testing.assert_allclose(score.of_all(joined), whole, rtol=1e-6)
