"""Makes a source from labelled images: letterboxed pixels, and boxes in one form.

Boxes refer to the image as viewers show it, turned upright by its EXIF, or, with the orientation
"stored", to the rows of its file. If the labels state the width and height of the other one of
these two frames, the boxes are turned from that frame into the used one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.boxes.labelled import Labelled, Slips
from fedjax_bn.data.label_trees import BOXES, CLASS, PADDING, crowd
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.cache import cached_numbers
from fedjax_bn.data.pixels.decode import decode, hash_of_files, relative_names, to_square
from fedjax_bn.data.pixels.raster import (
    MEGAPIXELS,
    STORED,
    UPRIGHT,
    open_raster,
    orientation_of,
    turned_by_pillow,
)
from fedjax_bn.data.source import TRAIN, Pool, Source, check_source

_CROWDS = "crowds (groups of objects): no client learns them, no detection is wrong there"
_OTHER_CLASS = "boxes of classes that data.classes does not name left out"
_NO_AREA = "boxes without area, or outside their image, left out"
_CLIPPED = "boxes that reach out of their image cut at its border"
_BORDER = 1.0  # pixels by which formats disagree on where a box ends
_NO_SPLIT = (
    "domains whose files name a part (train, val, test) for some images only, or for no training "
    "image; they are divided as if no part were named"
)
_TURNED = (
    "images whose labels state the size before EXIF's turn (where pixels stay as stored, after "
    "it), and whose boxes are turned"
)
_OTHER_SIZE = "images of another size than their labels state; the size of the image is used"


class Squares(NamedTuple):
    """The conversion of images and their boxes into squares of one size.

    Attributes:
      image_size: pixels a side.
      max_boxes: of an image; an image with more keeps its largest.
      shares: whether corners are shares of the image's width and height, not pixels.
      cache, progress, max_megapixels, orientation: see `pixels.decode`.
    """

    image_size: int
    max_boxes: int = 100
    shares: bool = False
    cache: str | Path | None = None
    progress: bool = True
    max_megapixels: float = MEGAPIXELS
    orientation: str = UPRIGHT


def box_source(
    name: str,
    root: Path,
    domains: Mapping[str, Sequence[Labelled]],
    numbers: Mapping[str, int],
    slips: Slips,
    squares: Squares,
) -> Source:
    """Returns the images of all domains, u8[N, image_size, image_size, 3], see `pixels.decode`.

    Boxes of classes not in `numbers` are left out, the others are cut at the border of their image;
    the notes count both.

    Args:
      name: of the dataset.
      root: folder of the images, to which their names are relative.
      domains: name -> its images.
      numbers: name of each class -> its number.
      slips: counts what the reader changed or left out; this function adds to it.
      squares: how images become squares.

    Raises:
      ValueError: a box is not finite, there is no box at all, or an image cannot be read.
      FileNotFoundError: images are missing.
      OSError: the cache cannot be written.
    """
    rows = [row for labelled in domains.values() for row in labelled]
    files = [row.file for row in rows]
    if missing := [file for file in files if not file.is_file()]:  # before hours of decoding
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} labelled images are not in {root}: "
            f"{first_few(relative_names(missing, root))}; fetch or unpack them again"
        )
    images, converted = decode(
        files,
        squares.image_size,
        root=root,
        cache=squares.cache,
        progress=squares.progress,
        max_megapixels=squares.max_megapixels,
        letterbox=True,
        orientation=squares.orientation,
    )
    frames = _frames_of(files, root, squares).tolist()
    placed = [
        _place(row, frame, numbers, squares, slips) for row, frame in zip(rows, frames, strict=True)
    ]
    longest = max(1, *(len(image_classes) for _, image_classes in placed))
    boxes = np.zeros((len(placed), longest, 4), np.float32)
    classes = np.full((len(placed), longest), PADDING, np.int32)
    for k, (corners, image_classes) in enumerate(placed):
        boxes[k, : len(corners)], classes[k, : len(corners)] = corners, image_classes
    # Rounded to float32, a box of nearly no area may have none.
    sound = (boxes[..., 2:] > boxes[..., :2]).all(-1)
    boxes, classes = np.where(sound[..., None], boxes, 0), np.where(sound, classes, PADDING)
    counts = (classes >= 0).sum(1)
    if not counts.any():
        reason = "; ".join(slips.notes()) or "see its labels"
        raise ValueError(f"{root} has {len(files)} images, but none with a box: {reason}")
    names = np.array(relative_names(files, root))
    pools, start = [], 0
    for domain, labelled in domains.items():
        part = slice(start, start := start + len(labelled))
        parts = _official_parts(domain, labelled, slips)
        labels = {BOXES: boxes[part], CLASS: classes[part]}
        pools.append(Pool(domain, images[part], labels, names[part], parts))
    sizes = ", ".join(f"{pool.name} {len(pool.images)}" for pool in pools)
    about = (
        f"{counts.sum()} boxes in {len(files)} images ({sizes}), {(counts == 0).sum()} of them "
        f"without boxes, at most {counts.max()} in one"
    )
    return check_source(
        Source(
            name,
            tuple(numbers),
            tuple(pools),
            mean=(0.0,) * 3,  # YOLO's detectors read u8/255
            std=(1.0,) * 3,
            notes=(about, *slips.notes(), *converted),
            # Without times of change, which differ between copies of the same files.
            key=f"letterbox {hash_of_files(files, root, squares.image_size)}",
        )
    )


def _official_parts(domain: str, labelled: Sequence[Labelled], slips: Slips) -> np.ndarray | None:
    """Returns i8[N], the parts of a domain's images, if all have one and some train."""
    parts = [row.part for row in labelled]
    if None not in parts and TRAIN in parts:
        return np.array(parts, np.int8)
    slips.add(_NO_SPLIT, domain, count=int(set(parts) != {None}))
    return None


def _place(
    row: Labelled, frame: Sequence[int], numbers: Mapping[str, int], squares: Squares, slips: Slips
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the boxes f64[n, 4] of an image in shares of its square, and their classes i32[n]."""
    width, height, tag = frame
    chosen = [box for box in row.boxes if box.label in numbers]
    slips.add(_OTHER_CLASS, count=len(row.boxes) - len(chosen))
    slips.add(_CROWDS, count=sum(box.crowd for box in chosen))
    corners = np.array([box.corners for box in chosen], np.float64).reshape(-1, 4)
    if not np.isfinite(corners).all():
        number = chosen[np.argwhere(~np.isfinite(corners))[0][0]].row
        raise ValueError(f"{row.place}, row {number} has a box that is not finite: remove it")
    image = np.array([width, height] * 2, np.float64)
    # Only tags above 4 exchange width and height, so only there the size shows the boxes' frame.
    if tag > 4 and width != height and row.size == (height, width):
        slips.add(_TURNED, row.place)
        top, left, bottom, right = (corners / image[[1, 0, 1, 0]]).T  # rows become columns
        if tag in (6, 7):
            left, right = 1 - right, 1 - left
        if tag in (7, 8):
            top, bottom = 1 - bottom, 1 - top
        corners = np.stack([left, top, right, bottom], axis=1)
    elif not squares.shares:
        corners = corners / image
        if row.size not in (None, (width, height)):
            slips.add(_OTHER_SIZE, f"{row.place} ({row.size[0]} x {row.size[1]})")
    inside = np.clip(corners, 0, 1)
    has_area = (inside[:, 2:] > inside[:, :2]).all(1)
    is_cut = (np.abs(inside - corners) * image > _BORDER).any(1) & has_area
    for kind, culprits in ((_NO_AREA, ~has_area), (_CLIPPED, is_cut)):
        for k in np.flatnonzero(culprits):
            slips.add(kind, f"{row.place}, row {chosen[k].row}")
    index, limit = np.flatnonzero(has_area), squares.max_boxes
    if len(index) > limit:
        left_out = f"boxes left out, the smallest of images with more than {limit}"
        slips.add(left_out, str(row.file), len(index) - limit)
        areas = np.prod(inside[index, 2:] - inside[index, :2], axis=1)
        largest = np.argsort(-areas, kind="stable")[:limit]
        index = index[np.sort(largest)]
    classes = [crowd(numbers[box.label]) if box.crowd else numbers[box.label] for box in chosen]
    square = to_square(inside[index], width, height, squares.image_size)
    return square, np.array(classes, np.int32)[index]


def _frames_of(files: Sequence[Path], root: Path, squares: Squares) -> np.ndarray:
    """Returns i32[N, 3], cached: width and height of each image as used, and a tag.

    The EXIF tag turns boxes of the image's other frame into this one: from the stored frame if
    images are used upright, else from the upright frame.
    """
    orientation, limit = squares.orientation, squares.max_megapixels

    def frame(file: Path) -> tuple[int, int, int]:
        image = open_raster(file.read_bytes(), limit)
        tag, (width, height) = orientation_of(image), image.size
        if not turned_by_pillow(image):
            if orientation == STORED:
                tag = {6: 8, 8: 6}.get(tag, tag)  # every other turn is its own inverse
            elif tag > 4:
                width, height = height, width
        return width, height, tag

    form = f"-{STORED}" * (orientation == STORED)
    name = f"{root.resolve().name or 'images'}-sizes{form}-{hash_of_files(files, root, 0)}"
    return cached_numbers(squares.cache, name, files, frame, 3)
