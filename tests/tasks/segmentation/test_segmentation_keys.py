"""What `choose_task` makes of a model and masks."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.data.label_trees import MASK
from fedjax_bn.models import UNet
from fedjax_bn.run.experiment.method import MODELS, choose_task
from fedjax_bn.tasks.detection import Recipe

LABEL = {MASK: np.random.default_rng(0).integers(0, 3, (2, 8, 8)).astype(np.uint8)}
PART = Split(np.zeros((2, 8, 8, 3), np.uint8), LABEL)
DATA = Dataset("toy", 3, (Domain("a", PART, None, PART),), (0.0,), (1.0,))


IMAGES = jnp.zeros((1, 16, 16, 3))


def of(model=UNet, data=DATA, nested=False):
    given = model(num_classes=3), data, IMAGES, Recipe(), nested
    return choose_task("package.module:Own", *given)


class Own(nn.Module):
    """A network of a user: logits of each pixel, or of each second one."""

    num_classes: int
    stride: int = 1

    @nn.compact
    def __call__(self, images):
        return nn.Conv(self.num_classes, (1, 1), self.stride)(images)


def test_any_network_trains_masks_whose_outputs_are_logits_of_pixels():
    assert of(Own).segments == 3
    for wrong in (MODELS["DigitCNN"], partial(Own, stride=2)):
        with pytest.raises(ConfigError, match="UNet"):
            of(wrong)
    for wrong in (UNet, Own):
        with pytest.raises(ConfigError, match="classifier"):
            of(wrong, data=runs.DATA)
