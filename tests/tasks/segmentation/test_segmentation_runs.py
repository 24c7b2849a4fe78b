"""Runs on masks, by a configuration and by `simulate`."""

import csv
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import runs
import square_masks
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.methods import fedbn
from fedjax_bn.models import MLP, UNet
from fedjax_bn.report.page import write_report
from fedjax_bn.run import evaluate as evaluate_finished
from fedjax_bn.run.evaluate import Request
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.model import MODELS, choose_task
from fedjax_bn.simulation import simulate
from fedjax_bn.task import segmentation
from fedjax_bn.training import score_tables as tables
from fedjax_bn.training.evaluation.answers import read_answers


@pytest.mark.slow
def test_a_run_on_masks_has_scores_pictures_and_a_report(monkeypatch, tmp_path):
    data = square_masks.dataset(slices=2)
    monkeypatch.setitem(experiment.DATASETS, "squares", lambda config: data)
    keys = {"model": "UNet:width=4:levels=2", "rounds": 4, "local_epochs": 4, "target": "c"}
    keys |= {"optimizer__learning_rate": 0.1, "adaptations": ("running", "tsmobn")}
    keys |= {"eval_batch_size": 4, "adapt_batch_size": 4, "data__image_size": 16}
    summary = runs.run(tmp_path, **keys, data__name="squares", predictions="csv")
    assert summary["score"] == "Dice"
    assert tables.comparison([[summary]]).startswith("Dice %")
    names = {"iou", "dice_1", "dice_2", "hd95_mm", "assd_mm", "undefined"}
    assert set(summary["measures"]["internal"]) == names
    assert set(summary["measures"]["unseen"]["c"]["tsmobn"]) == names
    for name in "ab":
        of_classes = [summary["measures"]["internal"][f"dice_{c}"][name] for c in (1, 2)]
        dice = summary["accuracy"]["internal"][name]
        np.testing.assert_allclose(np.mean(of_classes), dice, rtol=1e-5)
    kept = read_answers(tmp_path)
    assert set(kept) == {("a", ""), ("b", ""), ("c", "running"), ("c", "tsmobn")}
    for (name, adaptation), one in kept.items():
        where = summary["accuracy"]["unseen" if adaptation else "internal"][name]
        dice = where[adaptation] if adaptation else where
        np.testing.assert_allclose(100 * one.dice.mean(), dice, rtol=1e-5)
    text = (tmp_path / "answers/unseen-predictions.csv").read_text()
    rows = [*csv.DictReader(text.splitlines())]
    assert len(rows) == 2 * len(kept["c", "running"].dice) * 2
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    headings = ("Beyond Dice", "HD95 mm", "Dice of corner %", "Pixels by class and client")
    for text in (*headings, "Truth and prediction", "train: pixels"):
        assert text in page, text
    assert "accuracy by client" not in page
    result, _ = evaluate_finished.run(tmp_path, Request(internal=True), say=str)
    assert result["unseen"] == summary["accuracy"]["unseen"]
    for name, row in summary["measures"]["internal"].items():
        assert result["measures"]["internal"][name] == pytest.approx(row)


class Own(nn.Module):
    """A network of a user: logits of each pixel, or of each second one."""

    num_classes: int
    stride: int = 1

    @nn.compact
    def __call__(self, images):
        return nn.Conv(self.num_classes, (1, 1), self.stride)(images)


def test_any_network_trains_masks_whose_outputs_are_logits_of_pixels():
    def of(model, data):
        config = runs.config(model="package.module:Own")
        return choose_task(config, model(num_classes=3), data, jnp.zeros((1, 16, 16, 3)))

    assert of(Own, square_masks.dataset()).segments == 3
    for wrong in (MODELS["DigitCNN"], partial(Own, stride=2)):
        with pytest.raises(ConfigError, match="UNet"):
            of(wrong, square_masks.dataset())
    for wrong in (UNet, Own):
        with pytest.raises(ConfigError, match="classifier"):
            of(wrong, runs.DATA)


METHOD = fedbn(UNet(num_classes=3, width=2, levels=1), optax.sgd(0.1), task=segmentation(3))
OPTIONS = {"rounds": 2, "batch_size": 4, "eval_every": 1, "show_progress": False}


def test_slices_of_one_volume_are_never_divided():
    """Of one volume there is nothing to validate on, whatever the number of its slices."""
    images, masks = square_masks.samples(40, 3)
    labels = {"mask": masks, "volume": np.zeros(40, int)}
    with pytest.raises(ValueError, match="validation"):
        simulate(METHOD, clients={"a": (images, labels)}, **OPTIONS)


IMAGES, MASKS = square_masks.samples(4, 0)


@pytest.mark.parametrize(
    ("method", "labels", "said"),
    [
        (METHOD, MASKS[:, :8], r"client 'a' .*\[4, 8, 16\]"),
        (METHOD, MASKS + 1, "class 3 in mask 0"),
        (METHOD, MASKS.astype(int) - 1, "client 'a' .* label -1"),
        (METHOD, {"masks": MASKS}, r"\['masks'\]"),
        (METHOD, np.zeros(4, int), "no masks"),
        (fedbn(MLP(num_classes=3), optax.sgd(0.1)), MASKS, "masks"),
    ],
)
def test_masks_that_do_not_suit_are_refused(method, labels, said):
    with pytest.raises(ValueError, match=said):
        simulate(method, clients={"a": (IMAGES, labels)}, **OPTIONS)
