"""What an evaluation keeps of masks: measures by volume, rows of answers/, predictions."""

import csv
import json

import jax
import numpy as np
import pytest

from fedjax_bn.data.domain import Split
from fedjax_bn.engine.segmentation import dice_and_iou
from fedjax_bn.task import segmentation
from fedjax_bn.tasks.segmentation import surface_scores
from fedjax_bn.training.evaluation.answers import (
    answering,
    predictions_of,
    read_answers,
    write_answers,
)

VOLUME = np.array([4, 4, 4, 8, 8, 6], np.int32)


def some(classes=3, seed=0, size=20, **label):
    """A task, its answers to six samples with masks in blocks, and their split."""
    rng = np.random.default_rng(seed)
    mask, predicted = (
        np.kron(rng.integers(0, classes, (6, 5, 5)), np.ones((4, 4))).astype(np.uint8)[:, :size]
        for _ in range(2)
    )
    task = segmentation(classes)
    label = {"mask": mask} | label
    logits = np.eye(classes, dtype=np.float32)[predicted]
    score = answering(task).score
    kept = []
    for start in (0, 4):  # batches of four, the last padded
        rows = np.arange(start, start + 4)
        batch = jax.tree.map(lambda leaf, rows=rows: leaf[rows % 6], (logits, label))
        kept.append(score.of_batch(*batch, rows < 6))
    answers = score.of_all(jax.tree.map(lambda *leaves: np.stack(leaves), *kept))
    names = np.array([f"case{n}" for n in label.get("volume", range(6))])
    split = Split(rng.integers(0, 255, (6, size, 20, 3)).astype(np.uint8), label, names)
    return task.score(logits, label), answers, split, predicted


def test_answers_have_the_score_of_the_task_and_a_byte_a_pixel():
    score, answers, _, predicted = some(volume=VOLUME)
    np.testing.assert_array_equal(answers.predicted, predicted)
    assert answers.predicted.dtype == np.uint8
    np.testing.assert_allclose(answers.percent, score, rtol=1e-6)


def test_measures_are_means_over_volumes():
    spacing = np.tile(np.float32([3, 1, 0.5]), (6, 1))
    _, answers, split, predicted = some(volume=VOLUME, spacing=spacing)
    found = answers.measures(split)
    (dice, iou), weights = dice_and_iou(answers.overlaps)
    assert found["iou"] == pytest.approx(100 * np.average(iou.mean(-1), weights=weights))
    for number in (1, 2):
        mean = np.average(dice[:, number - 1], weights=weights)
        assert found[f"dice_{number}"] == pytest.approx(100 * mean)
    far = surface_scores(predicted, split.labels, 3)
    assert found["hd95_mm"] == pytest.approx(far[..., 0].mean())
    assert found["assd_mm"] == pytest.approx(far[..., 1].mean())
    assert found["undefined"] == 0
    assert (found["dice_1"] + found["dice_2"]) / 2 == pytest.approx(answers.percent)


def test_undefined_distances_are_counted_and_left_out_of_the_mean():
    _, answers, split, predicted = some(classes=2)
    predicted[1], split.labels["mask"][2:4] = 0, 0
    predicted[3] = 0
    answers = answers._replace(predicted=predicted)
    found = answers.measures(split)
    assert found["undefined"] == 3
    rest = surface_scores(predicted[[0, 4, 5]], {"mask": split.labels["mask"][[0, 4, 5]]}, 2)
    assert found["hd95_pixels"] == pytest.approx(rest[..., 0].mean())
    assert "dice_1" not in found  # it is the score
    answers = answers._replace(predicted=0 * predicted)
    found = answers.measures(split)
    assert found["undefined"] == 6
    assert np.isnan([found["hd95_pixels"], found["assd_pixels"]]).all()


def test_a_folder_keeps_dice_by_volume_and_the_best_the_median_and_the_worst(tmp_path):
    _, answers, split, predicted = some(volume=VOLUME, size=12)
    wide = split._replace(images=np.repeat(np.repeat(split.images, 20, 1), 20, 2))
    write_answers(
        tmp_path, {("a", ""): (answers, split, "test"), ("z", "running"): (answers, wide, "test")}
    )
    found = read_answers(tmp_path)
    assert set(found) == {("a", ""), ("z", "running")}
    one = found["a", ""]
    dice = dice_and_iou(answers.overlaps)[0][0][[0, 3, 5]]
    np.testing.assert_allclose(one.dice, dice, rtol=1e-6)
    ranked = np.argsort(-dice.mean(-1))
    moments = zip(("best", "median", "worst"), ranked, one.pictures, strict=True)
    for moment, number, (image, truth, own, title) in moments:
        case = ("case4", "case8", "case6")[number]
        assert title == f"{moment}, {100 * dice[number].mean():.1f} %: {case}"
        sample = next(n for n in range(6) if (split.images[n] == image).all())
        np.testing.assert_array_equal(truth, split.labels["mask"][sample])
        np.testing.assert_array_equal(own, predicted[sample])
    assert found["z", "running"].pictures[0][0].shape == (96, 160, 3)


def test_predictions_are_written_as_masks_or_as_scores_by_volume_and_class(tmp_path):
    spacing = np.tile(np.float32([3, 1, 0.5]), (6, 1))
    _, answers, split, predicted = some(volume=VOLUME, spacing=spacing)
    keep = {("a", ""): (answers, split, "test")}
    rows = [*csv.DictReader(predictions_of(keep, "csv").splitlines())]
    assert [(r["client"], r["sample"], r["class"]) for r in rows[:3]] == [
        ("a", "case4", "1"),
        ("a", "case4", "2"),
        ("a", "case8", "1"),
    ]
    assert len(rows) == 6
    mean = np.mean([float(row["dice"]) for row in rows])
    assert 100 * mean == pytest.approx(answers.percent)
    mean = np.mean([float(row["hd95_mm"]) for row in rows])
    assert mean == pytest.approx(answers.measures(split)["hd95_mm"])
    (tmp_path / "p.npz").write_bytes(predictions_of(keep, "npz"))
    with np.load(tmp_path / "p.npz") as stored:
        assert json.loads(str(stored["names"])) == [["a", ""]]
        np.testing.assert_array_equal(stored["predicted0"], predicted)
