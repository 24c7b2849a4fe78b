"""Labelled images as a source: letterboxed pixels, and boxes of one form.

Boxes refer to the image as viewers show it, turned upright by its EXIF (or, with the orientation
"stored", as it lies in its file). Where the labels state a width and height that are those of the
other of the two, their boxes refer to that one, and are turned with the image.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.boxes.labelled import Labelled, Slips
from fedjax_bn.data.label_trees import BOXES, CLASS, PADDING
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.decode import decode, hash_of_files, relative_names
from fedjax_bn.data.pixels.letterbox import to_square
from fedjax_bn.data.pixels.orientation import STORED, UPRIGHT, tag_of_other_frame, turn_corners
from fedjax_bn.data.pixels.raster import MEGAPIXELS, open_raster, read_image
from fedjax_bn.data.source import Pool, Source, check_source

_NO_AREA = "boxes without area, or outside their image, left out"
_CLIPPED = "boxes that reach out of their image cut at its border"
_BORDER = 1.0  # pixels by which formats disagree on where a box ends
_NO_SPLIT = (
    "domains whose files name a part (train, val, test) of some images only, or none that train, "
    "and are divided as those without"
)
_TURNED = (
    "images whose labels state the size without EXIF's turn (or, of stored pixels, with it), and "
    "whose boxes are turned"
)
_OTHER_SIZE = "images of another size than their labels say, whose own size counts"


class Squares(NamedTuple):
    """How images and their boxes become squares of one size.

    Attributes:
      image_size: pixels a side.
      max_boxes: of an image; one with more keeps its largest.
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
    classes: Sequence[str],
    slips: Slips,
    squares: Squares,
    notes: Sequence[str] = (),
) -> Source:
    """Reads the images of all domains: u8[N, image_size, image_size, 3], see `letterbox`.

    Boxes are cut at the border of their image; what is left out is counted in the notes.

    Args:
      name: of the dataset.
      root: folder of the images, from which their names count.
      domains: name -> its images.
      classes: their names.
      slips: what the reader has changed or left out.
      squares: what becomes of them.
      notes: further sentences for the user.

    Raises:
      ValueError: a box is not finite, there is no box at all, or an image cannot be read.
      FileNotFoundError: images are missing.
      OSError: the cache cannot be written.
    """
    image_size, cache = squares.image_size, squares.cache
    everything = [one for owned in domains.values() for one in owned]
    files = [one.file for one in everything]
    _check_present(files, root)
    for one in everything:  # before hours of decoding
        _check_finite(one)
    images, converted = decode(
        files,
        image_size,
        root=root,
        cache=cache,
        progress=squares.progress,
        max_megapixels=squares.max_megapixels,
        letterbox=True,
        orientation=squares.orientation,
    )
    sizes = _image_sizes(files, root, squares)
    place = partial(_place_boxes, squares=squares, slips=slips)
    placed = [place(one, *map(int, row)) for one, row in zip(everything, sizes, strict=True)]
    labels = _padded(placed)
    if not (labels[CLASS] >= 0).any():
        said = "; ".join(slips.notes()) or "see its labels"
        raise ValueError(f"{root} has {len(files)} images, but none with a box: {said}")
    pools, start = [], 0
    for domain, owned in domains.items():
        rows = slice(start, start + len(owned))
        start = rows.stop
        own = {key: leaf[rows] for key, leaf in labels.items()}
        pools.append(Pool(domain, images[rows], own, _names(owned, root), _parts(owned)))
        if pools[-1].parts is None and any(one.part is not None for one in owned):
            slips.add(_NO_SPLIT, domain)
    notes = (*notes, *_counts(domains, labels), *slips.notes(), *converted)
    key = hash_of_files(files, root, image_size, times=False)
    no_shift, no_scale = (0.0,) * 3, (1.0,) * 3  # YOLO's detectors read u8/255
    pools = tuple(pools)
    return check_source(
        Source(name, tuple(classes), pools, no_shift, no_scale, notes, key=f"letterbox {key}")
    )


def _place_boxes(
    one: Labelled, width: int, height: int, tag: int, *, squares: Squares, slips: Slips
) -> tuple[np.ndarray, np.ndarray]:
    """The boxes f64[n, 4] of an image in shares of its square, and their classes i32[n].

    Width, height and tag are those that `tag_of_other_frame` returns.
    """
    most = squares.max_boxes
    corners = np.asarray(one.corners, np.float64).reshape(-1, 4)
    image = np.array([width, height] * 2, np.float64)
    if tag > 4 and width != height and one.size == (height, width):
        slips.add(_TURNED, one.place)
        corners = turn_corners(corners / image[[1, 0, 1, 0]], tag)
    elif not squares.shares:
        corners = corners / image
        if one.size is not None and one.size != (width, height) and min(one.size) > 0:
            slips.add(_OTHER_SIZE, f"{one.place} ({one.size[0]} x {one.size[1]})")
    inside = np.clip(corners, 0, 1)
    area = (inside[:, 2:] > inside[:, :2]).all(1)
    out = (np.abs(inside - corners) * image > _BORDER).any(1) & area
    for row in np.flatnonzero(~area):
        slips.add(_NO_AREA, f"{one.place}, row {one.rows[row]}")
    for row in np.flatnonzero(out):
        slips.add(_CLIPPED, f"{one.place}, row {one.rows[row]}")
    kept = np.flatnonzero(area)
    if len(kept) > most:
        extent = np.prod(inside[kept, 2:] - inside[kept, :2], axis=1)
        largest = np.sort(np.argsort(-extent, kind="stable")[:most])
        for _ in range(len(kept) - most):
            slips.add(
                f"boxes left out, the smallest of images with more than data.max_boxes={most}",
                str(one.file),
            )
        kept = kept[largest]
    placed = to_square(inside[kept], width, height, squares.image_size)
    return placed, np.asarray(one.classes, np.int32).reshape(-1)[kept]


def _check_finite(one: Labelled) -> None:
    for row, corners in zip(one.rows, one.corners, strict=True):
        if not all(map(math.isfinite, corners)):
            raise ValueError(
                f"{one.place}, row {row} has the box {list(map(float, corners))}, which is not "
                "finite: correct or remove it"
            )


def _padded(placed: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """Boxes f32[N, M, 4] and classes i32[N, M]; M is at least 1."""
    most = max(1, *(len(classes) for _, classes in placed))
    boxes = np.zeros((len(placed), most, 4), np.float32)
    numbers = np.full((len(placed), most), PADDING, np.int32)
    for k, (corners, classes) in enumerate(placed):
        boxes[k, : len(corners)], numbers[k, : len(corners)] = corners, classes
    # What rounding to float32 makes of a box of next to no area is none.
    sound = (boxes[..., 2:] > boxes[..., :2]).all(-1)
    return {BOXES: np.where(sound[..., None], boxes, 0), CLASS: np.where(sound, numbers, PADDING)}


def _check_present(files: Sequence[Path], root: Path) -> None:
    if not files:
        raise ValueError(f"{root} has no images that are labelled")
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} labelled images are not in {root}: "
            f"{first_few(relative_names(missing, root))}; fetch or unpack them again"
        )


def _image_sizes(files: Sequence[Path], root: Path, squares: Squares) -> np.ndarray:
    """i64[N, 3] of images that can be read: what `tag_of_other_frame` returns."""
    orientation, most = squares.orientation, squares.max_megapixels

    def size(file: Path) -> tuple[int, int, int]:
        return tag_of_other_frame(open_raster(read_image(file, most), most), orientation)

    def make(write: Write) -> tuple[str, ...]:
        with ThreadPoolExecutor() as threads:
            sizes = np.array(list(threads.map(size, files)), "<i4").reshape(-1, 3)
        write(sizes.view(np.uint8).reshape(len(files), 12))
        return ()

    form = f"-{STORED}" * (orientation == STORED)
    name = f"{root.resolve().name or 'images'}-sizes{form}-{hash_of_files(files, root, 0)}"
    folder = None if squares.cache is None else Path(squares.cache)
    rows = cached_array(folder, name, (len(files), 12), make)[0]
    return np.ascontiguousarray(rows).view("<i4").astype(np.int64)


def _names(owned: Sequence[Labelled], root: Path) -> np.ndarray:
    files = relative_names([one.file for one in owned], root)
    return np.array([one.name or file for one, file in zip(owned, files, strict=True)])


def _parts(owned: Sequence[Labelled]) -> np.ndarray | None:
    """i8[N]; None where not all images have a part, or none trains."""
    parts = [one.part for one in owned]
    return None if None in parts or 0 not in parts else np.array(parts, np.int8)


def _counts(
    domains: Mapping[str, Sequence[Labelled]], labels: Mapping[str, np.ndarray]
) -> list[str]:
    """A sentence on how many images and boxes there are."""
    boxes = (labels[CLASS] >= 0).sum(1)
    without = int((boxes == 0).sum())
    counts = ", ".join(f"{name} {len(owned)}" for name, owned in domains.items())
    return [
        f"{boxes.sum()} boxes in {len(boxes)} images ({counts}), {without} of them without boxes, "
        f"at most {boxes.max()} in one"
    ]
