"""The keys of `config.segmentation` are the arguments of the task."""

import numpy as np
import pytest

import runs
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.label_trees import MASK
from fedjax_bn.run.config.defaults import base
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.task import MODELS, choose_task
from fedjax_bn.task import segmentation

LABEL = {MASK: np.random.default_rng(0).integers(0, 3, (2, 8, 8)).astype(np.uint8)}
PART = Split(np.zeros((2, 8, 8, 3), np.uint8), LABEL)
DATA = Dataset("toy", 3, (Domain("a", PART, None, PART),), (0.0,), (1.0,))


def of(model="UNet", data=DATA, **changes):
    keys = base()
    keys.segmentation.update(changes)
    return choose_task("m", MODELS[model](num_classes=3), data, keys.detection, keys.segmentation)


@pytest.mark.parametrize(
    "changes", [{}, {"dice": 1.0}, {"dice": 0.2, "by_sample": True}, {"nested": True}]
)
def test_the_keys_reach_loss_and_score(changes):
    logits = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32)
    valid = np.ones(2, bool)
    found, wanted = of(**changes), segmentation(3, **changes)
    assert found.segments == 3
    assert found.loss(logits, LABEL, valid) == wanted.loss(logits, LABEL, valid)
    assert found.score(logits, LABEL) == wanted.score(logits, LABEL)
    if changes:
        usual = segmentation(3)
        differs = found.loss(logits, LABEL, valid) != usual.loss(logits, LABEL, valid)
        assert differs or found.score(logits, LABEL) != usual.score(logits, LABEL)


def test_a_model_that_does_not_suit_masks_is_refused_and_the_other_way_round():
    with pytest.raises(ConfigError, match="have a mask each: choose a network for segmentation"):
        of("DigitCNN")
    with pytest.raises(ConfigError, match="have one class each: choose a classifier"):
        of(data=runs.DATA)
