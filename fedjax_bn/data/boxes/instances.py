"""Boxes of images whose every pixel holds the number of its instance."""

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.boxes.assemble import Squares
from fedjax_bn.data.boxes.labelled import CROWDS, Labelled, Slips
from fedjax_bn.data.label_trees import PADDING
from fedjax_bn.data.messages import progress_bar
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.decode import hash_of_files
from fedjax_bn.data.pixels.raster import MEGAPIXELS, open_raster, read_image
from fedjax_bn.data.sets.files import corruption_named

_MOST = 512  # boxes that are kept of an image
_FIELDS = 5  # the class and four corners; of the row behind all boxes the size and the count


class Instances(NamedTuple):
    """What a PNG of instances holds.

    Attributes:
      classes: of each box, largest first, see `label_trees`.
      corners: x1, y1, x2, y2 of each, in pixels.
      size: width and height of the PNG.
      count: of boxes, those that were too many included.
    """

    classes: list[int]
    corners: list[tuple[int, ...]]
    size: tuple[int, int]
    count: int


def with_instances(one: Labelled, found: Instances, slips: Slips) -> Labelled:
    """An image with the boxes that its PNG has; crowds and boxes left out are counted."""
    for _ in range(sum(number < PADDING for number in found.classes)):
        slips.add(CROWDS)
    for _ in range(found.count - len(found.classes)):
        slips.add(f"instances left out, the smallest of images with more than {_MOST}", one.place)
    rows = range(1, len(found.classes) + 1)
    return one._replace(classes=found.classes, corners=found.corners, rows=rows, size=found.size)


def boxes_of(ids: np.ndarray) -> dict[int, tuple[int, int, int, int]]:
    """Number -> x1, y1, x2, y2 of the pixels that hold it, for i[H, W]; x2 and y2 lie behind them.

    0 has no box.
    """
    from scipy.ndimage import find_objects

    values, dense = np.unique(ids, return_inverse=True)
    places = find_objects(dense.reshape(ids.shape).astype(np.int32) + 1)
    return {
        int(value): (across.start, down.start, across.stop, down.stop)
        for value, (down, across) in zip(values, places, strict=True)
        if value
    }


def read_ids(path: Path, max_megapixels: float = MEGAPIXELS) -> np.ndarray:
    """The numbers i32[H, W] of a PNG of 8 or 16 bits.

    Raises:
      ValueError: it cannot be read, or has colours.
    """
    with corruption_named(path):
        image = open_raster(read_image(path, max_megapixels), max_megapixels)
        if not image.mode.startswith(("I", "L")):
            raise ValueError(f"its pixels are {image.mode}, not numbers")
        return np.asarray(image).astype(np.int32)


def read_all(
    files: Sequence[Path],
    classes_of: Callable[[int], int],
    squares: Squares,
    *,
    root: Path,
    name: str,
) -> list[Instances]:
    """The instances of each file, kept in the cache.

    Args:
      files: PNGs of instances.
      classes_of: instance -> its class, see `label_trees`; -1 for none.
      squares: whose `cache`, `progress` and `max_megapixels` hold for the PNGs too.
      root: see `pixels.decode.decode`.
      name: tells `classes_of` from others, in the cache.
    """

    def row(file: Path) -> np.ndarray:
        ids = read_ids(file, squares.max_megapixels)
        found = [(classes_of(k), box) for k, box in boxes_of(ids).items()]
        found = [(number, box) for number, box in found if number != PADDING]
        found.sort(
            key=lambda one: (one[1][0] - one[1][2]) * (one[1][3] - one[1][1])
        )  # largest first
        placed = np.full((_MOST + 1, _FIELDS), PADDING, "<i4")
        placed[_MOST, 1:4] = (*ids.shape[::-1], len(found))
        for k, (number, box) in enumerate(found[:_MOST]):
            placed[k] = (number, *box)
        return placed

    def make(write: Write) -> tuple[str, ...]:
        with (
            ThreadPoolExecutor() as threads,
            progress_bar(len(files), "instances", squares.progress) as bar,
        ):
            for placed in threads.map(row, files):
                write(placed.view(np.uint8).reshape(1, -1))
                bar.update(1)
        return ()

    shape = (len(files), (_MOST + 1) * _FIELDS * struct.calcsize("<i"))
    digest = f"{name}-{hash_of_files(files, root, _MOST + 1)}"
    folder = None if squares.cache is None else Path(squares.cache)
    rows = cached_array(folder, digest, shape, make)[0]
    placed = np.ascontiguousarray(rows).view("<i4").reshape(len(files), _MOST + 1, _FIELDS)
    return list(map(_kept, placed))


def _kept(placed: np.ndarray) -> Instances:
    rows = placed[placed[:, 0] != PADDING].tolist()
    _, width, height, count, _ = placed[_MOST].tolist()
    corners = [tuple(row[1:]) for row in rows]
    return Instances([row[0] for row in rows], corners, (width, height), count)
