"""Small labels, splits and sources with boxes whose samples can be followed, and their files."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from fedjax_bn.data.domain import Split
from fedjax_bn.data.labels import BOXES, CLASS
from fedjax_bn.data.source import Pool, Source

CLASSES = ("cat", "dog", "elk")


def boxes(rng: np.random.Generator, count: int, most: int = 3) -> dict[str, np.ndarray]:
    """Random boxes of `count` images, 0 to `most` each."""
    start = rng.uniform(0, 0.5, (count, most, 2))
    corners = np.concatenate([start, start + rng.uniform(0.1, 0.5, (count, most, 2))], -1)
    own = np.arange(most) < rng.integers(0, most + 1, (count, 1))
    classes = np.where(own, rng.integers(0, len(CLASSES), (count, most)), -1)
    corners = np.where(own[..., None], corners, 0)
    return {BOXES: corners.astype(np.float32), CLASS: classes.astype(np.int32)}


def split(count: int, seed: int = 0, most: int = 3) -> Split:
    """Images u8[count, 2, 2, 3] that hold their own number."""
    images = np.broadcast_to(
        np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 2, 2, 3)
    )
    return Split(images, boxes(np.random.default_rng(seed), count, most))


def source(*sizes: int) -> Source:
    pools = []
    for name, size in zip("abc", sizes, strict=False):
        images, labels, _ = split(size, size)
        names = np.array([f"{name}/{k}.jpg" for k in range(size)])
        pools.append(Pool(name, images, labels, names))
    return Source("toy", CLASSES, tuple(pools), (0.0,), (1.0,))


def picture(path: Path, width: int = 64, height: int = 32, box=None) -> Path:
    """A black image, white where the box (x1, y1, x2, y2) is."""
    pixels = np.zeros((height, width, 3), np.uint8)
    if box is not None:
        x1, y1, x2, y2 = box
        pixels[y1:y2, x1:x2] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def text(path: Path, content) -> Path:
    """A text file, or one of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def instances(path: Path, *boxes, size: tuple[int, int] = (64, 32)) -> Path:
    """A PNG of 16 bits; (value, x1, y1, x2, y2) each."""
    ids = np.zeros(size[::-1], np.uint16)
    for value, x1, y1, x2, y2 in boxes:
        ids[y1:y2, x1:x2] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(ids).save(path)
    return path
