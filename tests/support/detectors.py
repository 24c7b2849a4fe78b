"""What tests of detection share: anchors, random boxes and outputs, the loss as a plain loop."""

import math
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


def loop_ciou(one, other, slack=None):
    """Of (x, y, w, h) and (x, y, w, h), and a; `slack` is an a to be taken instead."""
    (x, y, w, h), (u, v, s, t) = one, other
    across = min(x + w / 2, u + s / 2) - max(x - w / 2, u - s / 2)
    down = min(y + h / 2, v + t / 2) - max(y - h / 2, v - t / 2)
    both = max(across, 0) * max(down, 0)
    iou = both / (w * h + s * t - both)
    wide = max(x + w / 2, u + s / 2) - min(x - w / 2, u - s / 2)
    high = max(y + h / 2, v + t / 2) - min(y - h / 2, v - t / 2)
    nu = 4 / math.pi**2 * (math.atan(s / t) - math.atan(w / h)) ** 2
    a = nu / (nu - iou + 1 + 1e-7) if slack is None else slack
    return iou - ((x - u) ** 2 + (y - v) ** 2) / (wide**2 + high**2) - a * nu, a


def loop_matches(corners, cells, sizes, stride, ratio=4.0):
    """(row, column, anchor, box relative to the cell) of one box on one level."""
    height, width = cells
    x = (corners[0] + corners[2]) / 2 * width
    y = (corners[1] + corners[3]) / 2 * height
    w, h = (corners[2] - corners[0]) * width, (corners[3] - corners[1]) * height
    for number, (aw, ah) in enumerate(sizes):
        aw, ah = aw / stride, ah / stride
        if not w > 0 < h or max(w / aw, aw / w, h / ah, ah / h) >= ratio:
            continue
        near = {
            (0, 0): True,
            (-1, 0): x % 1 < 0.5 and x > 1,
            (0, -1): y % 1 < 0.5 and y > 1,
            (1, 0): 0 < (width - x) % 1 < 0.5 and width - x > 1,
            (0, 1): 0 < (height - y) % 1 < 0.5 and height - y > 1,
        }
        for right, below in (step for step, holds in near.items() if holds):
            column = min(max(int(x) + right, 0), width - 1)
            row = min(max(int(y) + below, 0), height - 1)
            yield row, column, number, (x - column, y - row, w, h)


def bce(logit, target):
    return np.log1p(np.exp(-abs(logit))) + max(logit, 0) - logit * target


def loop_loss(outs, label, valid, anchors=ANCHORS, held=None, scaled=True):
    """The loss one box at a time in float64; `held` gives what has no gradient."""
    held, images = outs if held is None else held, np.flatnonzero(valid)
    classes = outs[0].shape[-1] - 5
    box_sum = object_sum = class_sum = 0.0
    for out, still, sizes, stride, balance in zip(outs, held, *anchors, (4, 1, 0.4), strict=False):
        target, ones, hots = np.zeros(out.shape[:4]), [], []
        for i in images:
            for corners, number in zip(label["boxes"][i], label["class"][i], strict=True):
                if number < 0:
                    continue
                for row, column, a, box in loop_matches(corners, out.shape[1:3], sizes, stride):
                    guess = [_decoded(o[i, row, column, a], sizes[a], stride) for o in (out, still)]
                    fixed, slack = loop_ciou(guess[1], box)
                    ones.append(1 - loop_ciou(guess[0], box, slack)[0])
                    target[i, row, column, a] = max(target[i, row, column, a], fixed)
                    for c in range(classes):
                        hot = float(c == number)
                        hots.append(bce(out[i, row, column, a, 5 + c], hot))
        box_sum += np.mean(ones) if ones else 0
        class_sum += np.mean(hots) if hots and classes > 1 else 0
        costs = [
            bce(*pair) for pair in zip(out[images, ..., 4].flat, target[images].flat, strict=True)
        ]
        object_sum += balance * np.mean(costs)
    height, width = outs[0].shape[1] * anchors.strides[0], outs[0].shape[2] * anchors.strides[0]
    by_area, by_class = (height * width / 640**2, classes / 80) if scaled else (1, 1)
    total = 0.05 * box_sum + by_area * object_sum + 0.5 * by_class * class_sum
    return total * len(images)


def encoded(centres, anchors):
    """The raw outputs f[..., 4] of centres f[..., 4] relative to the cell: the formula solved."""
    share = np.concatenate(
        [(centres[..., :2] + 0.5) / 2, np.sqrt(centres[..., 2:] / anchors) / 2], -1
    )
    return np.log(share / (1 - share))


def _decoded(raw, size, stride):
    x, y, w, h = 2 * sigmoid(raw[:4])
    return x - 0.5, y - 0.5, w**2 * size[0] / stride, h**2 * size[1] / stride


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
    """Images with boxes that they show, bright by class; the last one is padding, one has none."""
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
