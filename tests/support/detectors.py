"""What tests of detection share: anchors, random boxes and outputs, a detector."""

import flax.linen as nn
import numpy as np

from fedjax_bn.models.layers import Tap
from fedjax_bn.normalization import BatchNorm
from fedjax_bn.tasks.detection import Anchors

ANCHORS = Anchors((((10, 13), (16, 30)), ((40, 30), (60, 70))), (8, 16))
CELLS, CLASSES = ((8, 6), (4, 3)), 3  # of 64 x 48 pixels
HEIGHT, WIDTH = 64, 48


def labels(images=4, most=6, seed=0, classes=CLASSES):
    """Random boxes, some of them at borders and in each other's place, with padding behind."""
    rng = np.random.default_rng(seed)
    middle, side = rng.uniform(0, 1, (images, most, 2)), rng.uniform(0.1, 0.9, (images, most, 2))
    middle[:, 1] = middle[:, 0]  # two in one place
    low, high = np.clip(middle - side / 2, 0, 1), np.clip(middle + side / 2, 0, 1)
    number = rng.integers(0, classes, (images, most)).astype(np.int32)
    number[0, 3:], number[1] = -1, -1  # an image with fewer, and one with none
    return {"boxes": np.concatenate([low, high], -1), "class": number}


def outputs(images=4, seed=0, classes=CLASSES):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(images, *cells, 2, 5 + classes)) for cells in CELLS)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Detector(nn.Module):
    """The least detector with batch norm: one level of stride 8, a tap before predictions."""

    num_classes: int = CLASSES
    anchors: Anchors = Anchors((((7, 7), (14, 14)),), (8,))
    taps = {"tap0": 6}  # noqa: RUF012

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(6, (8, 8), 8, "VALID", name="conv")(images)
        x = Tap(name="tap0")(nn.silu(BatchNorm(name="norm")(x)))
        few = nn.initializers.constant(-2.0)  # an untrained detector finds next to nothing
        y = nn.Conv(2 * (5 + self.num_classes), (1, 1), bias_init=few, name="predict0")(x)
        return (y.reshape(*y.shape[:3], 2, -1),)
