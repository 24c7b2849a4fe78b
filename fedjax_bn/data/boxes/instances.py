"""Boxes of the objects in a PNG whose every pixel holds the number of its object."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.data.boxes.assemble import Squares
from fedjax_bn.data.boxes.labelled import COMMON, Box, Labelled, Slips
from fedjax_bn.data.label_trees import PADDING, crowd
from fedjax_bn.data.pixels.cache import cached_numbers
from fedjax_bn.data.pixels.decode import hash_of_files
from fedjax_bn.data.pixels.raster import open_raster, read_image
from fedjax_bn.data.sets.files import corruption_named

_MOST = 512  # boxes of an image that are kept
_FIELDS = 5  # a row has class and corners; the last row has width, height and number of all boxes


def with_instances(
    images: Sequence[Labelled],
    class_of: Callable[[int], int],
    squares: Squares,
    slips: Slips,
    root: Path,
    name: str,
) -> list[Labelled]:
    """Returns the images with the boxes of their PNGs, the largest of an image first.

    Args:
      images: whose `place` is their PNG.
      class_of: number of an object -> the number of its class in `COMMON`, or of a crowd, see
        `label_trees`; -1 for an object that is left out.
      squares: whose `cache`, `progress` and `max_megapixels` hold for the PNGs too.
      slips: counts the boxes that are too many.
      root: see `pixels.decode.decode`.
      name: differs where `class_of` does; the cache is found by it.
    """
    files = [Path(one.place) for one in images]

    def read(file: Path) -> np.ndarray:
        most = squares.max_megapixels
        with corruption_named(file):
            image = open_raster(read_image(file, most), most)
            if not image.mode.startswith(("I", "L")):  # 16 or 8 bits
                raise ValueError(f"its pixels are {image.mode}, not numbers")
            ids = np.asarray(image).astype(np.int32)
        found = [(class_of(k), box) for k, box in _boxes_of(ids).items()]
        found = [(number, box) for number, box in found if number != PADDING]
        found.sort(key=lambda one: (one[1][0] - one[1][2]) * (one[1][3] - one[1][1]))
        table = np.full((_MOST + 1, _FIELDS), PADDING, np.int32)
        table[_MOST, 1:4] = (*ids.shape[::-1], len(found))
        for k, (number, box) in enumerate(found[:_MOST]):
            table[k] = (number, *box)
        return table.ravel()

    key = f"{name}-{hash_of_files(files, root, _MOST + 1)}"
    width = (_MOST + 1) * _FIELDS
    rows = cached_numbers(squares.cache, key, files, read, width, squares.progress)
    tables = rows.reshape(len(files), _MOST + 1, _FIELDS)
    labelled = []
    for one, table in zip(images, tables, strict=True):
        _, width, height, count, _ = table[_MOST].tolist()
        kept = table[table[:, 0] != PADDING].tolist()
        boxes = [
            Box(row, COMMON[max(kind, crowd(kind))], tuple(corners), kind < PADDING)
            for row, (kind, *corners) in enumerate(kept, 1)
        ]
        left_out = f"instances left out, the smallest of images with more than {_MOST}"
        slips.add(left_out, one.place, count - len(boxes))
        labelled.append(one._replace(boxes=boxes, size=(width, height)))
    return labelled


def _boxes_of(ids: np.ndarray) -> dict[int, tuple[int, int, int, int]]:
    """Returns number -> x1, y1, x2, y2 of the pixels of i[H, W] that hold it, except for 0.

    x2 and y2 are one pixel after the last.
    """
    from scipy.ndimage import find_objects

    values, dense = np.unique(ids, return_inverse=True)
    # Numbered without gaps: `find_objects` makes room for every number up to the largest.
    places = find_objects(dense.reshape(ids.shape).astype(np.int32) + 1)
    return {
        int(value): (across.start, down.start, across.stop, down.stop)
        for value, (down, across) in zip(values, places, strict=True)
        if value
    }
