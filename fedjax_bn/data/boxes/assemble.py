"""Makes a source from labelled images: letterboxed pixels, and boxes in one form.

`with_instances` reads boxes from a PNG whose every pixel holds the number of its object.

Boxes refer to the image as viewers show it, turned upright by its EXIF, or, with the orientation
"stored", to the rows of its file. If the labels state the width and height of the other one of
these two frames, the boxes are turned from that frame into the used one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.boxes.labelled import COMMON, Box, Labelled, Slips
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
    read_image,
    turned_by_pillow,
)
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.source import Pool, Source, check_source

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
_MOST = 512  # most boxes kept from a PNG of instances
_FIELDS = 5  # class and corners; the last row has width, height and number of all boxes
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


def to_source(
    name: str,
    root: Path,
    domains: Mapping[str, Sequence[Labelled]],
    numbers: Mapping[str, int],
    slips: Slips,
    squares: Squares,
    notes: Sequence[str] = (),
) -> Source:
    """Returns the images of all domains, u8[N, image_size, image_size, 3], see `pixels.decode`.

    Boxes of classes not in `numbers` are left out, the others are cut at the border of their image;
    the notes count both.

    Args:
      name: of the dataset.
      root: folder of the images, to which their names are relative.
      domains: name -> its images.
      numbers: name of each class -> its number, see `numbers_of`.
      slips: counts what the reader changed or left out; this function adds to it.
      squares: how images become squares.
      notes: further notes for the user.

    Raises:
      ValueError: a box is not finite, there is no box at all, or an image cannot be read.
      FileNotFoundError: images are missing.
      OSError: the cache cannot be written.
    """
    everything = []
    for one in (one for owned in domains.values() for one in owned):
        chosen = [box for box in one.boxes if box.label in numbers]
        slips.add(_OTHER_CLASS, count=len(one.boxes) - len(chosen))
        slips.add(_CROWDS, count=sum(box.crowd for box in chosen))
        everything.append(one._replace(boxes=chosen))
    files = [one.file for one in everything]
    _check(everything, root)  # before hours of decoding
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
        _place(one, frame, numbers, squares, slips)
        for one, frame in zip(everything, frames, strict=True)
    ]
    most = max(1, *(len(classes) for _, classes in placed))
    boxes = np.zeros((len(placed), most, 4), np.float32)
    classes = np.full((len(placed), most), PADDING, np.int32)
    for k, (corners, own) in enumerate(placed):
        boxes[k, : len(corners)], classes[k, : len(corners)] = corners, own
    # Rounded to float32, a box of nearly no area may have none.
    sound = (boxes[..., 2:] > boxes[..., :2]).all(-1)
    boxes, classes = np.where(sound[..., None], boxes, 0), np.where(sound, classes, PADDING)
    counts = (classes >= 0).sum(1)
    if not counts.any():
        reason = "; ".join(slips.notes()) or "see its labels"
        raise ValueError(f"{root} has {len(files)} images, but none with a box: {reason}")
    names = relative_names(files, root)
    pools, start = [], 0
    for domain, owned in domains.items():
        rows = slice(start, start + len(owned))
        start = rows.stop
        parts = [one.part for one in owned]
        divided = None not in parts and 0 in parts
        if not divided and set(parts) != {None}:
            slips.add(_NO_SPLIT, domain)
        pools.append(
            Pool(
                domain,
                images[rows],
                {BOXES: boxes[rows], CLASS: classes[rows]},
                np.array([one.name or file for one, file in zip(owned, names[rows], strict=True)]),
                np.array(parts, np.int8) if divided else None,
            )
        )
    sizes = ", ".join(f"{domain} {len(owned)}" for domain, owned in domains.items())
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
            notes=(*notes, about, *slips.notes(), *converted),
            # Without times of change, which differ between copies of the same files.
            key=f"letterbox {hash_of_files(files, root, squares.image_size)}",
        )
    )


def _check(everything: Sequence[Labelled], root: Path) -> None:
    """Raises FileNotFoundError or ValueError where images are missing or a box is not finite."""
    if not everything:
        raise ValueError(f"{root} has no images that are labelled")
    missing = [one.file for one in everything if not one.file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(everything)} labelled images are not in {root}: "
            f"{first_few(relative_names(missing, root))}; fetch or unpack them again"
        )
    for one in everything:
        for box in one.boxes:
            if not all(map(math.isfinite, box.corners)):
                raise ValueError(
                    f"{one.place}, row {box.row} has the box {list(map(float, box.corners))}, "
                    "which is not finite: correct or remove it"
                )


def _place(
    one: Labelled, frame: Sequence[int], numbers: Mapping[str, int], squares: Squares, slips: Slips
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the boxes f64[n, 4] of an image in shares of its square, and their classes i32[n]."""
    width, height, tag = frame
    corners = np.array([box.corners for box in one.boxes], np.float64).reshape(-1, 4)
    image = np.array([width, height] * 2, np.float64)
    # Only tags above 4 exchange width and height, so only there the size shows the boxes' frame.
    if tag > 4 and width != height and one.size == (height, width):
        slips.add(_TURNED, one.place)
        top, left, bottom, right = (corners / image[[1, 0, 1, 0]]).T  # rows become columns
        if tag in (6, 7):
            left, right = 1 - right, 1 - left
        if tag in (7, 8):
            top, bottom = 1 - bottom, 1 - top
        corners = np.stack([left, top, right, bottom], axis=1)
    elif not squares.shares:
        corners = corners / image
        if one.size is not None and one.size != (width, height) and min(one.size) > 0:
            slips.add(_OTHER_SIZE, f"{one.place} ({one.size[0]} x {one.size[1]})")
    inside = np.clip(corners, 0, 1)
    has_area = (inside[:, 2:] > inside[:, :2]).all(1)
    is_cut = (np.abs(inside - corners) * image > _BORDER).any(1) & has_area
    for what, rows in ((_NO_AREA, ~has_area), (_CLIPPED, is_cut)):
        for k in np.flatnonzero(rows):
            slips.add(what, f"{one.place}, row {one.boxes[k].row}")
    kept, most = np.flatnonzero(has_area), squares.max_boxes
    if len(kept) > most:
        left_out = f"boxes left out, the smallest of images with more than data.max_boxes={most}"
        slips.add(left_out, str(one.file), len(kept) - most)
        areas = np.prod(inside[kept, 2:] - inside[kept, :2], axis=1)
        kept = kept[np.sort(np.argsort(-areas, kind="stable")[:most])]
    own = [numbers[box.label] for box in one.boxes]
    own = [
        crowd(number) if box.crowd else number for box, number in zip(one.boxes, own, strict=True)
    ]
    classes = np.array(own, np.int32)[kept]
    return to_square(inside[kept], width, height, squares.image_size), classes


def _frames_of(files: Sequence[Path], root: Path, squares: Squares) -> np.ndarray:
    """Returns i32[N, 3], cached: width and height of each image as used, and a tag.

    The EXIF tag turns boxes of the image's other frame into this one: from the stored frame if
    images are used upright, else from the upright frame.
    """
    orientation, most = squares.orientation, squares.max_megapixels

    def frame(file: Path) -> tuple[int, int, int]:
        image = open_raster(read_image(file, most), most)
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


def with_instances(
    images: Sequence[Labelled],
    class_of: Callable[[int], int],
    squares: Squares,
    slips: Slips,
    root: Path,
    name: str,
) -> list[Labelled]:
    """Returns the images with the boxes of their PNGs, each image's largest box first.

    Args:
      images: each with its PNG as `place`.
      class_of: maps the number of an object to that of its class in `COMMON`, or of a crowd, see
        `label_trees`; -1 leaves the object out.
      squares: `cache`, `progress` and `max_megapixels` apply to the PNGs too.
      slips: counts the boxes over the limit.
      root: see `pixels.decode.decode`.
      name: of the cached numbers; must differ for another `class_of`.
    """
    files = [Path(one.place) for one in images]

    def read(file: Path) -> np.ndarray:
        most = squares.max_megapixels
        with corruption_named(file):
            image = open_raster(read_image(file, most), most)
            if not image.mode.startswith(("I", "L")):  # 16 or 8 bits
                raise ValueError(f"its pixels are {image.mode}, not numbers")
            ids = np.asarray(image).astype(np.int32)
        every = ((class_of(value), box) for value, box in _boxes_of(ids).items())
        found = [(number, box) for number, box in every if number != PADDING]
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
    """Returns number -> x1, y1, x2, y2 around its pixels in i[H, W], except for 0.

    x2 and y2 are one past the last pixel.
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
