"""Defines the tasks of the benchmarks beside PyTorch: networks, sample counts, random images."""

from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.models import DigitCNN, ResNet18, UNet

LEARNING_RATE = 0.01


class Task(NamedTuple):
    """A round to time."""

    name: str
    model: Any
    side: int
    clients: int
    samples: int
    batch: int
    # of one training sample forward (a multiplication and an addition are two), counted by hand
    # from the layers; training costs three times as much
    gigaflops: float


# Two clients make short pieces; each trains a whole epoch, so that copying and averaging models
# has the same share of a round as with more clients.
DIGITS = Task("DigitCNN", DigitCNN(), 28, 2, 743, 32, 0.0955)
UNET = Task("UNet", UNet(2, width=16, levels=3), 64, 3, 16, 8, 0.290)
RESNET = Task("ResNet18", ResNet18(num_classes=10), 64, 2, 128, 16, 0.2956)


def make_batches(task: Task) -> dict[str, Any]:
    """Returns random images as bytes, in batches; the last one of an epoch may be short."""
    random = np.random.default_rng(0)
    steps = -(-task.samples // task.batch)
    shape = (task.clients, steps, task.batch)
    image = random.integers(0, 256, (*shape, task.side, task.side, 3), dtype=np.uint8)
    valid = (np.arange(steps * task.batch) < task.samples).reshape(steps, task.batch)
    label: Any = random.integers(0, 10, shape).astype(np.int32)
    if task.name == "UNet":
        label = {"mask": random.integers(0, 2, image.shape[:-1], dtype=np.uint8)}
    return {"image": image, "label": label, "valid": np.broadcast_to(valid, shape)}


def make_test_images(task: Task, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random images u8[N, side, side, 3] and labels i32[N]."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, task.side, task.side, 3), dtype=np.uint8)
    return pixels, random.integers(0, 10, count).astype(np.int32)
