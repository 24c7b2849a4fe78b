"""Folders of images with a text file of boxes each, as YOLO's detectors read them.

    images/train/NAME.jpg   labels/train/NAME.txt   data.yaml

A line is "class cx cy w h": the number of the class, the centre, width and height in shares of the
image; or "class x1 y1 x2 y2 x3 y3 ...", the corners of an outline, whose extent is the box. Images
may also be in train/images, or beside their text files. Names of the classes stand in a YAML file
under `names`, or in classes.txt, a name a line; without either they are numbers. An image without
text file has no boxes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.arguments.text import short, shown
from fedjax_bn.data.boxes.labelled import (
    IMAGES,
    LABELS,
    OTHER_CLASS,
    Box,
    Labelled,
    Slips,
    files_in,
    numbers_of,
    part_of,
)
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import read_text
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import is_image, subfolders

NAME, SHARES = "YOLO's text files", True  # see `own`
_LARGEST_TEXT = 2**24  # bytes
_NAMES = ("classes.txt", "obj.names", "_darknet.labels")
_MOST_CLASSES = 10_000  # where no file names them
_SLACK = 1e-3  # shares of an image by which rounded numbers may pass its border
_Found = list[tuple[Path, Path | None]]  # images, each with its text file


def find(root: Path, folder: Path, slips: Slips) -> _Found:
    """Returns the images of a domain, each with its text file; none where no image has one."""
    del root, slips
    images = [file for file in files_in(folder) if is_image(file.name)]
    found = [(image, _text_file(image, folder)) for image in images]
    return found if any(text for _, text in found) else []


def _text_file(image: Path, folder: Path) -> Path | None:
    """Returns images/train/a.jpg -> labels/train/a.txt; a file outside of images has it beside."""
    parts = list(image.relative_to(folder).with_suffix(".txt").parts)
    at = max((k for k, name in enumerate(parts[:-1]) if name.lower() in IMAGES), default=None)
    if at is None:
        places = [folder.joinpath(*parts)]
    else:
        names = ("labels", "Labels")
        places = [folder.joinpath(*parts[:at], name, *parts[at + 1 :]) for name in names]
    return next((path for path in places if path.is_file()), None)


def read(
    root: Path,
    folders: Mapping[str, Path],
    found: Mapping[str, _Found],
    classes: Sequence[str],
    slips: Slips,
) -> tuple[list[str], dict[str, list[Labelled]]]:
    """Returns the names of all classes, and domain -> its images, with boxes in shares; see `own`.

    Raises:
      ValueError: a line is not of the form, or its class does not exist.
    """
    named = class_names([root, *folders.values()])
    # Read once: where no file names the classes, the greatest number says how many there are.
    lines = {
        text: _read_boxes(text, named) for files in found.values() for _, text in files if text
    }
    used = (box.number for boxes in lines.values() for box in boxes)
    names = named or [str(number) for number in range(max(used, default=-1) + 1)]
    chosen = numbers_of(names, classes, str(root))
    numbers = {k: chosen[name] for k, name in enumerate(names) if name in chosen}
    domains: dict[str, list[Labelled]] = {}
    for domain, files in found.items():
        folder, domains[domain] = folders[domain], []
        for image, text in files:
            if text is None:
                slips.add("images without a text file, which have no boxes")
            boxes = lines.get(text, [])
            kept = [
                box._replace(number=numbers[box.number]) for box in boxes if box.number in numbers
            ]
            slips.add(OTHER_CLASS, count=len(boxes) - len(kept))
            part = part_of(image.relative_to(folder).parts[:-1])
            domains[domain].append(Labelled(image, str(text or image), kept, part=part))
        for file in files_in(folder):
            below = file.relative_to(folder).parts[:-1]
            is_label = file.suffix == ".txt" and any(part.lower() in LABELS for part in below)
            if is_label and file not in lines and file.name not in _NAMES:
                slips.add("text files without an image left out", str(file))
    return names, domains


def class_names(folders: Sequence[Path]) -> list[str]:
    """Returns the names in the first YAML or text file of names in these folders; else none.

    Text files of names may also be among the labels, where some programs for labelling put them.

    Raises:
      ValueError: the file is damaged, `names` is not a list of names, or two are equal.
    """
    for folder in folders:
        for path in sorted((*folder.glob("*.yaml"), *folder.glob("*.yml"))):
            if (names := _names_in(path)) is not None:
                return _distinct(names, path)
        places = (folder, *(one for one in subfolders(folder) if one.name.lower() in LABELS))
        for path in (place / name for place in places for name in _NAMES):
            if path.is_file():
                return _distinct([line.strip() for line in _lines(path) if line.strip()], path)
    return []


def _distinct(names: list[str], path: Path) -> list[str]:
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise ValueError(f"{path} names {short(twice[0])!r} more than once: rename one of them")
    return names


def _names_in(path: Path) -> list[str] | None:
    """Returns `names` of a YAML file, a list or a mapping from numbers; None if it has none."""
    import yaml  # which flax reads its own files with

    with corruption_named(path):
        content = yaml.safe_load(read_text(path, _LARGEST_TEXT))
    if not isinstance(content, dict) or "names" not in content:
        return None
    names: Any = content["names"]
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise ValueError(f"{path}: `names` must be numbered from 0 without gaps")
        names = [names[k] for k in range(len(names))]
    if not isinstance(names, list) or not all(isinstance(n, str | int | float) for n in names):
        raise ValueError(f"{path}: `names` must be a list of names")
    with corruption_named(path):  # a number of thousands of digits has no text
        return [str(name) for name in names]


def _lines(path: Path) -> list[str]:
    with corruption_named(path):
        return read_text(path, _LARGEST_TEXT).splitlines()


def _read_boxes(path: Path, names: Sequence[str]) -> list[Box]:
    """Returns the box of every line that is not empty; its number is the one in the file."""
    return [
        Box(row, *_read_line(line.split(), f"{path}, row {row}", names))
        for row, line in enumerate(_lines(path), 1)
        if line.strip()
    ]


def _read_line(words: list[str], place: str, names: Sequence[str]) -> tuple[int, tuple[float, ...]]:
    try:
        first, *numbers = map(float, words)
    except ValueError:
        raise ValueError(f"{place} holds {shown(' '.join(words)[:60])!r}, not numbers") from None
    if len(numbers) != 4 and (len(numbers) < 6 or len(numbers) % 2):
        raise ValueError(
            f"{place} has {len(words)} numbers; a line is 'class cx cy w h', or a class and an "
            "outline x1 y1 x2 y2 x3 y3 ..."
        )
    if not first.is_integer() or not 0 <= first < (len(names) or _MOST_CLASSES):
        known = f"whole, 0..{_MOST_CLASSES - 1}"
        if names:
            known = f"0..{len(names) - 1} ({first_few(names, 5)})"
        raise ValueError(f"{place} has class {short(words[0], 60)}; classes are {known}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{place} has a number that is not finite: correct or remove the line")
    if min(numbers) < -_SLACK or max(numbers) > 1 + _SLACK:
        raise ValueError(
            f"{place} has numbers outside [0, 1]; they must be shares of the image's width and "
            "height, not pixels"
        )
    if len(numbers) == 4:
        x, y, w, h = numbers
        return int(first), (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    across, down = numbers[::2], numbers[1::2]
    return int(first), (min(across), min(down), max(across), max(down))
