"""Measures of answers against scikit-learn; what a run writes of them and of its batch norms."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import norm
from sklearn import metrics

import runs
from fedjax_bn.arguments.errors import WorkdirError
from fedjax_bn.data.domain import Split
from fedjax_bn.report.results import difference_of_parts, over_seeds, welch
from fedjax_bn.task import accuracy, auc, classification, confusion
from fedjax_bn.training.callbacks.client_logs import read_distances
from fedjax_bn.training.evaluation.answers import Answers, read_answers, write_answers


def some_answers(classes, count=60, seed=0):
    random = np.random.default_rng(seed)
    label = random.integers(0, classes, count).astype(np.int32)
    logits = random.standard_normal((count, classes)) + 1.5 * np.eye(classes)[label]
    return Answers(logits.astype(np.float32).round(1), label)  # with ties


def measure(answers):
    split = Split(answers.logits, answers.label)
    return answers.measures(split)


@pytest.mark.parametrize("classes", [2, 4])
def test_measures_are_those_of_scikit_learn(classes):
    answers = some_answers(classes)
    p = softmax(answers.logits.astype(np.float64), axis=1)
    told, said = answers.label, answers.logits.argmax(1)
    found = measure(answers)
    area = (told, p[:, 1]) if classes == 2 else (told, p)
    expected = metrics.roc_auc_score(*area, multi_class="ovr")
    np.testing.assert_allclose(found["auc"], expected, rtol=1e-12)
    np.testing.assert_allclose(found["loss"], metrics.log_loss(told, p))
    if classes == 2:
        sensitivity = 100 * metrics.recall_score(told, said)
        np.testing.assert_allclose(found["sensitivity"], sensitivity, rtol=1e-12)
    balanced = 100 * metrics.balanced_accuracy_score(told, said)
    np.testing.assert_allclose(found["balanced_accuracy"], balanced, rtol=1e-12)
    np.testing.assert_allclose(answers.percent, 100 * metrics.accuracy_score(told, said))


def test_public_scores_are_those_of_scikit_learn():
    logits, labels = some_answers(4)
    labels = np.where(labels == 2, 1, labels).astype(np.int64)  # a class without samples
    said, half = logits.argmax(1), np.arange(60) < 30
    expected = 100 * metrics.accuracy_score(labels, said)
    np.testing.assert_allclose(accuracy(logits, labels), expected, rtol=1e-12)
    np.testing.assert_allclose(accuracy(softmax(logits, axis=1), labels), expected, rtol=1e-12)
    matrix = metrics.confusion_matrix(labels, said, labels=range(4))
    np.testing.assert_array_equal(confusion(jnp.asarray(logits), labels.astype(float)), matrix)
    score = classification().score
    np.testing.assert_allclose(score(logits, labels), expected, rtol=1e-12)
    expected = 100 * metrics.accuracy_score(labels[half], said[half])
    np.testing.assert_allclose(score(logits, labels, half), expected, rtol=1e-12)
    assert accuracy(np.zeros((0, 3)), np.zeros(0, int)) == 0


def placements_of(scores, positive):
    """How often each sample is ranked right against one of the other side, by all pairs."""
    pairs = np.sign(scores[positive][:, None] - scores[~positive]) / 2 + 0.5
    placements = np.empty(len(scores))
    placements[positive], placements[~positive] = pairs.mean(1), pairs.mean(0)
    return placements


@pytest.mark.parametrize("classes", [2, 3])
def test_the_areas_interval_is_delongs(classes):
    """Of a mean of areas by its gradient: a sample moves each by its placement over its side."""
    answers = some_answers(classes)  # with ties
    label, p = answers.label, answers.probabilities
    numbers = range(classes) if classes > 2 else [1]
    sides = [label == number for number in numbers]
    placed = [placements_of(p[:, number], label == number) for number in numbers]
    area = np.mean([x[side].mean() for x, side in zip(placed, sides, strict=True)])
    moves = sum(x / np.where(s, s.sum(), (~s).sum()) for x, s in zip(placed, sides, strict=True))
    groups = [moves[label == number] / len(numbers) for number in range(classes)]
    deviation = np.sqrt(sum(len(group) * np.var(group, ddof=1) for group in groups))
    limits = area + np.array([0, -1, 1]) * norm.ppf(0.975) * deviation
    np.testing.assert_allclose(auc(p, label), limits.clip(0, 1), rtol=1e-12)


def test_the_area_is_the_mean_over_the_classes_that_have_samples():
    answers = some_answers(3)
    wider = Answers(np.pad(answers.logits, ((0, 0), (0, 2)), constant_values=-99), answers.label)
    np.testing.assert_allclose(measure(wider)["auc"], measure(answers)["auc"], rtol=1e-12)
    one = measure(Answers(answers.logits[:, :2], np.zeros_like(answers.label)))
    undefined = "auc", "auc_interval", "balanced_accuracy", "sensitivity"
    assert all(np.isnan(one[name]).all() for name in undefined)
    assert one["counts"] == [60, 0]
    assert np.isnan(auc([[0.2, 0.8], [0.7, 0.3], [0.6, 0.4]], [1, 0, 0])[1:]).all()
    assert np.isnan(auc([[np.nan] * 2] * 4, [1, 0, 0, 1])).all()  # of a model that diverged


def test_the_calibration_error_is_the_distance_of_confidence_and_accuracy_by_bin():
    confidence = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    label = np.array([0, 0, 0, 1, 0, 1])
    answers = Answers(np.log(np.stack([confidence, 1 - confidence], axis=1)), label)
    expected = 100 * (4 * abs(0.95 - 0.75) + 2 * abs(0.55 - 0.5)) / 6
    np.testing.assert_allclose(measure(answers)["ece"], expected)


def test_the_difference_of_two_shares_has_the_interval_that_newcombe_prints():
    """56/70 and 48/80: 0.0524 to 0.3339 (Newcombe, Stat. Med. 17, 1998, Table II, method 10)."""
    found = difference_of_parts([(80.0, 70)], [(60.0, 80)])
    np.testing.assert_allclose(found, (20, 5.24, 33.39), atol=0.005)


def test_seeds_that_are_not_shared_are_compared_as_welch_does():
    from scipy.stats import ttest_ind

    one, other = [80.0, 82.5, 81.0], [70.0, 79.0, 74.0, 72.0]
    limits = ttest_ind(one, other, equal_var=False).confidence_interval()
    found = welch(one, other)
    np.testing.assert_allclose((found.low, found.high), (limits.low, limits.high))
    assert not over_seeds([3.0]).known


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of FedBN, which other modules have too."""
    return runs.finished(tmp_path_factory.mktemp("answers") / "run")


@pytest.mark.slow
def test_a_run_tells_measures_of_its_selected_round_that_its_predictions_have(tmp_path):
    keys = {"predictions": "csv", "adaptations": ("running", "tsmobn")}
    folder = runs.finished(tmp_path / "run", rounds=4, **keys)
    # JSON has no NaN: what is not defined is null.
    summary = json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)
    rows = {}
    for name in ("internal", "unseen"):
        text = (folder / "answers" / f"{name}-predictions.csv").read_text()
        for row in csv.DictReader(text.splitlines()):
            p = [float(row[f"probability_{c}"]) for c in range(3)]
            rows.setdefault((row["client"], row["adaptation"]), []).append((int(row["label"]), p))
    clients = {(name, "") for name in ("ant", "bee", "cow")}
    assert set(rows) == clients | {("dog", "running"), ("dog", "tsmobn")}
    for (name, adaptation), every in rows.items():
        label, p = (np.array(column) for column in zip(*every, strict=True))
        if adaptation:
            accuracy = summary["accuracy"]["unseen"][name][adaptation]
            told = summary["measures"]["unseen"][name][adaptation]
        else:
            accuracy = summary["accuracy"]["internal"][name]
            told = {k: v[name] for k, v in summary["measures"]["internal"].items()}
        np.testing.assert_allclose(accuracy, 100 * np.mean(p.argmax(1) == label))
        np.testing.assert_allclose(told["loss"], metrics.log_loss(label, p, labels=[0, 1, 2]))
        if len(set(label)) == 3:
            area = metrics.roc_auc_score(label, p, multi_class="ovr")
            np.testing.assert_allclose(told["auc"], area)


def test_the_answers_that_a_report_reads_are_those_of_the_summary(folder):
    summary = json.loads((folder / "summary.json").read_text())
    found = read_answers(folder)
    for name in ("ant", "bee", "cow"):
        one = found[name, ""]
        np.testing.assert_allclose(100 * one.right.mean(), summary["accuracy"]["internal"][name])
        assert one.confusion.diagonal().sum() == one.right.sum()
        split = next(d for d in runs.DATA.domains if d.name == name).test
        sure = [mistake.confidence for mistake in one.mistakes]
        assert sure == sorted(sure, reverse=True)
        for mistake in one.mistakes:
            assert not one.right[mistake.sample]
            assert split.labels[mistake.sample] == mistake.label != mistake.answer
            np.testing.assert_array_equal(mistake.picture, split.images[mistake.sample])


def test_a_run_writes_how_far_its_clients_batch_norms_lie_apart(folder):
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        _, _, start = runs.train.prepare(runs.config())
    summary = json.loads((folder / "summary.json").read_text())
    state = runs.saved(folder, jax.eval_shape(start), "selected", summary["selected_round"])
    found, first = (read_distances(folder, name) for name in ("selected", "first"))
    assert found["clients"].tolist() == ["ant", "bee", "cow"]
    for layer, row in zip(found["layers"], found["scale"], strict=True):
        scale = np.float64(state.personal["params"][layer]["scale"])
        expected = np.sqrt(((scale - scale.mean(0)) ** 2).mean(1))
        np.testing.assert_allclose(row, expected, rtol=1e-5)
    assert first["layers"].tolist() == found["layers"].tolist()
    assert (first["mean"] > 0).all()


def test_a_damaged_file_of_answers_is_told_in_a_sentence(tmp_path):
    split = Split(np.zeros((4, 3, 3, 1), np.uint8), np.zeros(4, np.int32))
    answers = Answers(np.eye(4, dtype=np.float32), np.zeros(4, np.int32))
    write_answers(tmp_path, {("ant", ""): (answers, split, "test")})
    path = tmp_path / "answers" / "internal.npz"
    assert read_answers(tmp_path)["ant", ""].right.tolist() == [True] + [False] * 3
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(WorkdirError, match=r"internal\.npz"):
        read_answers(tmp_path)
