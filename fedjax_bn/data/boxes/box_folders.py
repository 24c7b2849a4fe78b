"""Any folder of images with boxes, in COCO's or YOLO's form; domains are subfolders.

    clear/images/1.jpg  clear/labels/1.txt  fog/images/2.jpg  fog/labels/2.txt     (YOLO)
    clear/annotations/instances_train.json  clear/images/1.jpg  ...                (COCO)

A folder that is itself in such a form is one domain, which `data.num_clients` divides. If folders
or files name the part (train, val, test) of every image of a domain, the parts are its official
split. Images keep their shape, see `pixels.decode`.

Boxes refer to the image as viewers show it, turned upright by its EXIF, or, with the orientation
"stored", to the rows of its file. If the labels state the width and height of the other one of
these two frames, the boxes are turned from that frame into the used one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.boxes.box_files import WHERE, Labelled, read_labels
from fedjax_bn.data.label_trees import BOXES, CLASS, PADDING, crowd
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.pixels.cache import cached_numbers
from fedjax_bn.data.pixels.decode import (
    STORED,
    UPRIGHT,
    decode,
    hash_of_files,
    open_raster,
    orientation_of,
    relative_names,
    to_square,
)
from fedjax_bn.data.sets.folders import is_image, subfolders
from fedjax_bn.data.source import TRAIN, Pool, Source, check_source, part_in

_CROWDS = "crowds (groups of objects): no client learns them, no detection is wrong there"
_OTHER_CLASS = "boxes of classes that data.classes does not name left out"
_NO_AREA = "boxes without area, or outside their image, left out"
_CLIPPED = "boxes that reach out of their image cut at its border"
_BORDER = 1.0  # pixels by which formats disagree on where a box ends


def load_boxes(
    path: str | Path | None,
    *,
    image_size: int,
    domains: Sequence[str] = (),
    classes: Sequence[str] = (),
    name: str = "boxes",
    max_boxes: int = 100,
    cache: str | Path | None = None,
    progress: bool = True,
    orientation: str = UPRIGHT,
) -> Source:
    """Reads images as u8[N, image_size, image_size, 3] with their boxes, one pool a domain.

    Boxes are cut at the border of their image; the notes count what was cut or left out.

    Args:
      path: the folder.
      image_size: pixels a side of the squares.
      domains: names of folders in it; empty for all.
      classes: names, in the order of their numbers; empty for all. Boxes of others are left out.
      name: of the source.
      max_boxes: of an image; an image with more keeps its largest.
      cache, progress, orientation: see `pixels.decode`.
    """
    root = Path(path or "PATH")
    folders = _domain_folders(root, domains)
    named_classes, labelled, in_pixels = read_labels(root, folders)
    if absent := [label for label in classes if label not in named_classes]:
        raise ValueError(
            f"data.classes names {first_few(absent)}, but {root} has {first_few(named_classes)}"
        )
    numbers = {label: number for number, label in enumerate(classes or named_classes)}
    rows = [row for of_domain in labelled.values() for row in of_domain]
    files = [row.file for row in rows]
    if missing := [file for file in files if not file.is_file()]:  # before hours of decoding
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} labelled images are not in {root}: "
            f"{first_few(relative_names(missing, root))}; fetch or unpack them again"
        )
    options = {"cache": cache, "orientation": orientation}
    images, converted = decode(
        files, image_size, root=root, progress=progress, letterbox=True, **options
    )
    placed, counted = [], Counter()  # what is changed or left out, and how often
    for row, frame in zip(rows, _frames_of(files, root, **options).tolist(), strict=True):
        corners, numbers_of_boxes = _place(row, frame, numbers, in_pixels, max_boxes, counted)
        placed.append((to_square(corners, *frame[:2], image_size), numbers_of_boxes))
    longest = max(1, *(len(image_classes) for _, image_classes in placed))
    boxes = np.zeros((len(placed), longest, 4), np.float32)
    box_classes = np.full((len(placed), longest), PADDING, np.int32)
    for k, (corners, image_classes) in enumerate(placed):
        boxes[k, : len(corners)], box_classes[k, : len(corners)] = corners, image_classes
    # Rounded to float32, a box of nearly no area may have none.
    sound = (boxes[..., 2:] > boxes[..., :2]).all(-1)
    labels = {
        BOXES: np.where(sound[..., None], boxes, 0),
        CLASS: np.where(sound, box_classes, PADDING),
    }
    counts = (labels[CLASS] >= 0).sum(1)
    notes = [f"{count} {kind}" for kind, count in counted.items() if count]
    if not counts.any():
        reason = "; ".join(notes) or "see its labels"
        raise ValueError(f"{root} has {len(files)} images, but none with a box: {reason}")
    sample_names = np.array(relative_names(files, root))
    pools, start = [], 0
    for domain, of_domain in labelled.items():
        members = slice(start, start := start + len(of_domain))
        parts = [row.part for row in of_domain]
        # A split is official only if it says of every image what it is for.
        is_official = None not in parts and TRAIN in parts
        pools.append(
            Pool(
                domain,
                images[members],
                {leaf: array[members] for leaf, array in labels.items()},
                sample_names[members],
                np.array(parts, np.int8) if is_official else None,
            )
        )
    about = (
        f"{counts.sum()} boxes in {len(files)} images, {(counts == 0).sum()} of them without "
        f"boxes, at most {counts.max()} in one"
    )
    return check_source(
        Source(
            name,
            tuple(numbers),
            tuple(pools),
            mean=(0.0,) * 3,  # YOLO's detectors read u8/255
            std=(1.0,) * 3,
            notes=(about, *notes, *converted),
            key=f"letterbox {hash_of_files(files, root, image_size)}",
        )
    )


def _place(
    row: Labelled,
    frame: Sequence[int],
    numbers: Mapping[str, int],
    in_pixels: bool,
    max_boxes: int,
    counted: Counter[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the boxes f64[n, 4] of an image in shares of it, and their classes i32[n]."""
    width, height, tag = frame
    chosen = [box for box in row.boxes if box.label in numbers]
    counted[_OTHER_CLASS] += len(row.boxes) - len(chosen)
    counted[_CROWDS] += sum(box.crowd for box in chosen)
    corners = np.array([box.corners for box in chosen], np.float64).reshape(-1, 4)
    image = np.array([width, height] * 2, np.float64)
    # Only tags above 4 exchange width and height, so only there the size shows the boxes' frame.
    if tag > 4 and width != height and row.size == (height, width):
        top, left, bottom, right = (corners / image[[1, 0, 1, 0]]).T  # rows become columns
        if tag in (6, 7):
            left, right = 1 - right, 1 - left
        if tag in (7, 8):
            top, bottom = 1 - bottom, 1 - top
        corners = np.stack([left, top, right, bottom], axis=1)
    elif in_pixels:
        corners = corners / image
    inside = np.clip(corners, 0, 1)
    has_area = (inside[:, 2:] > inside[:, :2]).all(1)
    is_cut = (np.abs(inside - corners) * image > _BORDER).any(1) & has_area
    counted[_NO_AREA] += int((~has_area).sum())
    counted[_CLIPPED] += int(is_cut.sum())
    index = np.flatnonzero(has_area)
    if len(index) > max_boxes:
        counted[f"boxes left out, the smallest of images with more than {max_boxes}"] += (
            len(index) - max_boxes
        )
        areas = np.prod(inside[index, 2:] - inside[index, :2], axis=1)
        largest = np.argsort(-areas, kind="stable")[:max_boxes]
        index = index[np.sort(largest)]
    classes = [crowd(numbers[box.label]) if box.crowd else numbers[box.label] for box in chosen]
    return inside[index], np.array(classes, np.int32)[index]


def _frames_of(files: Sequence[Path], root: Path, *, cache: Any, orientation: str) -> np.ndarray:
    """Returns i32[N, 3], cached: width and height of each image as used, and a tag.

    The EXIF tag turns boxes of the image's other frame into this one: from the stored frame if
    images are used upright, else from the upright frame.
    """

    def frame(file: Path) -> tuple[int, int, int]:
        image = open_raster(file.read_bytes())
        tag, (width, height) = orientation_of(image), image.size
        if image.format != "TIFF":  # which Pillow turns itself
            if orientation == STORED:
                tag = {6: 8, 8: 6}.get(tag, tag)  # every other turn is its own inverse
            elif tag > 4:
                width, height = height, width
        return width, height, tag

    form = f"-{STORED}" * (orientation == STORED)
    name = f"{root.resolve().name or 'images'}-sizes{form}-{hash_of_files(files, root, 0)}"
    return cached_numbers(cache, name, files, frame, 3)


def _domain_folders(root: Path, domains: Sequence[str]) -> dict[str, Path]:
    """Returns the folder of each domain: those in `root`, or `root` itself if it is one set."""
    folders = {folder.name: folder for folder in subfolders(root)}
    is_set = any(
        name in ("images", "labels", "annotations") or part_in([name]) is not None
        for name in folders
    )
    # So is a folder that itself holds images with labels beside them; a lone picture is none.
    images = [file for file in root.glob("*") if is_image(file.name)]
    is_set |= any(file.with_suffix(".txt").is_file() for file in images)
    if is_set or not folders or (images and any(root.glob("[!.]*.json"))):
        folders = {root.resolve().name: root} if root.is_dir() else {}
    missing = [name for name in domains if name not in folders]
    if missing or not folders:
        raise FileNotFoundError(
            f"{root} lacks {first_few(missing) or 'images'}, it has the folders "
            f"{first_few(list(folders)) or 'none'}: {WHERE}"
        )
    return {name: folders[name] for name in domains or folders}
