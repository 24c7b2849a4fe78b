"""What tests of detection share: anchors, random boxes and outputs, a detector."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
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


def detector_batches(clients=2, steps=2, size=3, seed=0):
    """Images with boxes that they show, bright by class; the last image of the last client is
    padding, and one has no box.
    """
    rng = np.random.default_rng(seed)
    lead = (clients, steps, size)
    image = rng.normal(0, 0.1, (*lead, 32, 32, 3))
    boxes, number = np.zeros((*lead, 2, 4)), np.full((*lead, 2), -1, np.int32)
    for at in np.ndindex(*lead):
        for j in range(2 if at != (0, 0, 0) else 0):
            low = rng.integers(0, 20, 2)
            high = low + rng.integers(6, 12, 2)
            number[(*at, j)] = rng.integers(0, CLASSES)
            boxes[(*at, j)] = np.concatenate([low, high]) / 32
            image[at][low[1] : high[1], low[0] : high[0], number[(*at, j)]] += 1 + at[0]
    valid = np.ones(lead, bool)
    valid[-1, -1, -1] = False
    label = {"boxes": jnp.asarray(boxes, float), "class": jnp.asarray(number)}
    return {"image": jnp.asarray(image, float), "label": label, "valid": jnp.asarray(valid)}


@cache
def detector_start():
    """Variables of `Detector`, every leaf moved a little, in NumPy's float64."""
    model = Detector()
    like = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3), jnp.float32))
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        name = path[-1].key
        centre = {"scale": 1.0, "var": 1.0}.get(name, 0.0)
        spread = 0.3 / np.sqrt(leaf.size / leaf.shape[-1]) if name == "kernel" else 0.1
        return centre + spread * rng.uniform(-1, 1, leaf.shape)

    return jax.tree_util.tree_map_with_path(draw, like)
