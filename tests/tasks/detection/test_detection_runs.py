"""A run on images with boxes: from a configuration to mAP, a table and pictures."""

import jax.numpy as jnp
import numpy as np
import pytest

import boxed
import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.report.page import write_report
from fedjax_bn.run import evaluate as evaluate_finished
from fedjax_bn.run.evaluate import Request
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.model import MODELS, choose_task
from fedjax_bn.training import score_tables as tables

SIDE = 32


def split(count: int, seed: int) -> Split:
    """Grey images with a bright square for every box."""
    labels = boxed.boxes(np.random.default_rng(seed), count, 2)
    images = np.full((count, SIDE, SIDE, 3), 60, np.uint8)
    for image, boxes in zip(images, labels["boxes"], strict=True):
        for x1, y1, x2, y2 in np.round(boxes * SIDE).astype(int):
            image[y1:y2, x1:x2] = 220
    return Split(images, labels)


def dataset() -> Dataset:
    domains = [
        Domain(name, split(6, k), split(3, k + 9), split(4, k + 19)) for k, name in enumerate("abc")
    ]
    return Dataset("squares", 3, tuple(domains), (0.0,), (1.0,), boxed.CLASSES)


@pytest.mark.slow
def test_a_detectors_run_reports_map_and_shows_its_boxes_and_can_be_tested_again(
    monkeypatch, tmp_path
):
    monkeypatch.setitem(experiment.DATASETS, "squares", lambda config: dataset())
    # Compiled in a third of the time of TinyDetector.
    keys = {"model": "detectors:Detector", "rounds": 1, "eval_every": 1, "target": "c"}
    keys |= {"eval_batch_size": 8, "adapt_batch_size": 8, "data__image_size": SIDE}
    summary = runs.run(tmp_path, **keys, data__name="squares", data__augment="boxes")
    assert summary["score"] == "mAP50"
    assert set(summary["accuracy"]["internal"]) == {"a", "b", "mean"}
    assert all(0 <= x <= 100 for x in summary["accuracy"]["internal"].values())
    assert tables.comparison([[summary]]).startswith("mAP50 %")
    assert (tmp_path / "plots/boxes.png").stat().st_size > 10_000
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "Boxes found in test images" in page
    assert "accuracy by client" not in page
    result, _ = evaluate_finished.run(tmp_path, Request(changes=(), trust=True))
    assert result["score"] == "mAP50"
    assert result["unseen"] == summary["accuracy"]["unseen"]


def test_a_model_that_does_not_suit_the_labels_is_refused():
    def task(model, data, **changes):
        config, network = runs.config(model=model, **changes), MODELS[model](num_classes=3)
        return choose_task(config, network, data, jnp.zeros((1, 28, 28, 3)))

    with pytest.raises(ConfigError, match="TinyDetector"):
        task("DigitCNN", dataset())
    with pytest.raises(ConfigError, match="have one class each: choose a classifier"):
        task("TinyDetector", runs.DATA)
    with pytest.raises(ConfigError, match=r"config\.task=segmentation .* choose detection"):
        task("TinyDetector", dataset(), task="segmentation")
    assert task("DigitCNN", runs.DATA).classifies
    assert task("TinyDetector", dataset()).score.name == "mAP50"
