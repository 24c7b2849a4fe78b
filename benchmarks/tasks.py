"""Defines the tasks of the benchmarks beside PyTorch: networks, sample counts, random data."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.models import DigitCNN, ResNet18, UNet, YOLOv5n

LEARNING_RATE = 0.01
CLASSES = 10
BOXES = 20  # of an image


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


# Few clients make short pieces.
DIGITS = Task("DigitCNN", DigitCNN(), 28, 2, 256, 32, 0.0955)
UNET = Task("UNet", UNet(2, width=16, levels=3), 64, 3, 16, 8, 0.290)
RESNET = Task("ResNet18", ResNet18(num_classes=CLASSES), 64, 2, 64, 16, 0.2956)
YOLO = Task("YOLOv5n", YOLOv5n(CLASSES), 320, 2, 8, 4, 1.0418)


def make_batches(task: Task) -> dict[str, Any]:
    """Returns random images as bytes, in batches; the last one of an epoch may be short."""
    random = np.random.default_rng(0)
    steps = -(-task.samples // task.batch)
    shape = (task.clients, steps, task.batch)
    image = random.integers(0, 256, (*shape, task.side, task.side, 3), dtype=np.uint8)
    valid = (np.arange(steps * task.batch) < task.samples).reshape(steps, task.batch)
    label: Any = random.integers(0, CLASSES, shape).astype(np.int32)
    if task.name == "UNet":
        label = {"mask": random.integers(0, 2, image.shape[:-1], dtype=np.uint8)}
    elif task.name == "YOLOv5n":
        corner = random.uniform(0, 0.6, (*shape, BOXES, 2))
        boxes = np.concatenate([corner, corner + random.uniform(0.03, 0.4, corner.shape)], -1)
        label = {
            "boxes": boxes.astype(np.float32),
            "class": random.integers(0, CLASSES, (*shape, BOXES)).astype(np.int32),
        }
    return {"image": image, "label": label, "valid": np.broadcast_to(valid, shape)}


def make_test_images(task: Task, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random images u8[N, side, side, 3] and labels i32[N]."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, task.side, task.side, 3), dtype=np.uint8)
    return pixels, random.integers(0, CLASSES, count).astype(np.int32)


def draw_variables(task: Task) -> dict[str, Any]:
    """Returns random variables of a task's model, drawn without a compiled program."""
    random = np.random.default_rng(0)
    images = jax.ShapeDtypeStruct((2, task.side, task.side, 3), jnp.float32)
    shapes = jax.eval_shape(task.model.init, jax.random.key(0), images)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].key != "kernel":
            return jnp.full(leaf.shape, float(path[-1].key in ("scale", "var")), leaf.dtype)
        bound = np.sqrt(3 / np.prod(leaf.shape[:-1]))
        return jnp.asarray(random.uniform(-bound, bound, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
