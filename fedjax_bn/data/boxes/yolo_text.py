"""Folders of images with a text file of boxes each, as YOLO's detectors read them.

    images/train/NAME.jpg   labels/train/NAME.txt   data.yaml

A line is "class cx cy w h": the number of the class, the centre, width and height in shares of the
image; or "class x1 y1 x2 y2 x3 y3 ...", the corners of an outline, whose extent is the box. Images
may also be in train/images, or beside their text files. The classes have the names under `names` of
a YAML file, or those of classes.txt, one a line; without either they are numbers. An image without
a text file has no boxes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.arguments.text import short, shown
from fedjax_bn.data.boxes.labelled import (
    IMAGES,
    LABELS,
    Box,
    Labelled,
    Slips,
    files_in,
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
    found: _Found = []
    for image in (file for file in files_in(folder) if is_image(file.name)):
        # images/train/a.jpg has labels/train/a.txt; an image outside of images has it beside.
        parts = list(image.relative_to(folder).with_suffix(".txt").parts)
        at = max((k for k, name in enumerate(parts[:-1]) if name.lower() in IMAGES), default=None)
        names = ["labels", "Labels"] if at is not None else []
        places = [folder.joinpath(*parts[:at], name, *parts[at + 1 :]) for name in names]
        places = places or [folder.joinpath(*parts)]
        found.append((image, next((path for path in places if path.is_file()), None)))
    return found if any(text for _, text in found) else []


def read(
    root: Path, folders: Mapping[str, Path], found: Mapping[str, _Found], slips: Slips
) -> tuple[list[str], dict[str, list[Labelled]]]:
    """Returns the names of all classes, and domain -> its images, with boxes in shares; see `own`.

    Raises:
      ValueError: a line is not of the form, or its class does not exist.
    """
    named = _class_names([root, *folders.values()])
    boxes: dict[Path | None, list[Box]] = {None: []}
    domains: dict[str, list[Labelled]] = {}
    for domain, files in found.items():
        folder, domains[domain] = folders[domain], []
        for image, text in files:
            if text is None:
                slips.add("images without a text file, which have no boxes")
            elif text not in boxes:
                boxes[text] = [
                    _read_line(row, line.split(), f"{text}, row {row}", named)
                    for row, line in enumerate(_lines(text), 1)
                    if line.strip()
                ]
            part = part_of(image.relative_to(folder).parts[:-1])
            domains[domain].append(Labelled(image, str(text or image), boxes[text], part=part))
        for file in files_in(folder):
            below = file.relative_to(folder).parts[:-1]
            is_label = file.suffix == ".txt" and any(part.lower() in LABELS for part in below)
            if is_label and file not in boxes and file.name not in _NAMES:
                slips.add("text files without an image left out", str(file))
    if named:
        return named, domains
    # Where no file names the classes, the greatest number shows how many there are.
    most = max((int(box.label) for own in boxes.values() for box in own), default=-1)
    return [str(number) for number in range(most + 1)], domains


def _class_names(folders: Sequence[Path]) -> list[str]:
    """Returns the names in the first YAML or text file of names in these folders; else none.

    Text files of names may also be among the labels, where some programs for labelling put them.

    Raises:
      ValueError: the file is damaged, `names` is not a list of names, or two are equal.
    """
    for folder in folders:
        described = sorted((*folder.glob("*.yaml"), *folder.glob("*.yml")))
        places = (folder, *(one for one in subfolders(folder) if one.name.lower() in LABELS))
        listed = [place / name for place in places for name in _NAMES]
        for path in (*described, *(path for path in listed if path.is_file())):
            if path in listed:
                names = [line.strip() for line in _lines(path) if line.strip()]
            else:
                names = _names_in(path)
            if names is None:
                continue
            twice = [name for number, name in enumerate(names) if name in names[:number]]
            if twice:
                raise ValueError(
                    f"{path} names {short(twice[0])!r} more than once: rename one of them"
                )
            return names
    return []


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


def _read_line(row: int, words: list[str], place: str, names: Sequence[str]) -> Box:
    """Returns the box of a line; its label is a name, or the number where classes have none."""
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
        corners = x - w / 2, y - h / 2, x + w / 2, y + h / 2
    else:
        across, down = numbers[::2], numbers[1::2]
        corners = min(across), min(down), max(across), max(down)
    return Box(row, names[int(first)] if names else str(int(first)), corners)
