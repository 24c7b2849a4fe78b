"""Folders of images with a text file of boxes each, as YOLO's detectors read them.

    images/train/NAME.jpg   labels/train/NAME.txt   data.yaml

A line is "class cx cy w h": the number of the class, the centre, width and height in shares of the
image; or "class x1 y1 x2 y2 x3 y3 ...", the corners of an outline, whose extent is the box. Images
may also lie in train/images, or beside their text files. Names of the classes stand in a YAML file
under `names`, or in classes.txt, a name a line; without either they are numbers. An image without
text file has no boxes.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_bn.arguments.text import short, shown
from fedjax_bn.data.boxes.folders import IMAGES, LABELS, counterpart, files_in
from fedjax_bn.data.boxes.labelled import Labelled, Slips, part_of
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import read_text
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.sets.folders import is_image, subfolders

_LARGEST_TEXT = 2**24  # bytes
_NAMES = ("classes.txt", "obj.names", "_darknet.labels")
Found = tuple[Path, Path | None]  # an image and its text file
_MOST_CLASSES = 10_000  # where nobody names them
_SLACK = 1e-3  # shares of an image by which rounded numbers may pass its border


def class_names(folders: Sequence[Path]) -> list[str]:
    """The names that the first YAML or text file of names in these folders has; else none.

    Text files of names may lie among the labels too, where some programs for labelling put them.

    Raises:
      ValueError: the file is damaged, `names` are none, or two are equal.
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
    """The entry `names` of a YAML file, a list or a mapping from number to name; None without."""
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


def find(folder: Path) -> list[Found]:
    """The images of a domain, each with its text file; None where it has none."""
    found = []
    for image in (file for file in files_in(folder) if is_image(file.name)):
        texts = [f"{one}.txt" for one in counterpart(image, folder, IMAGES, ("labels", "Labels"))]
        text = next((path for path in map(Path, texts) if path.is_file()), None)
        found.append((image, text))
    return found


def labelled(
    found: Sequence[Found],
    folder: Path,
    numbers: Mapping[int, int],
    names: Sequence[str],
    slips: Slips,
) -> list[Labelled]:
    """The images with their boxes in shares of the image.

    Args:
      found: of `find`.
      folder: the domain's.
      numbers: number in the files -> number of the class, of those that are chosen.
      names: of all classes of the files; empty where nobody names them.
      slips: for what is left out.

    Raises:
      ValueError: a line is not of the form, or its class is none.
    """
    images = []
    for image, text in found:
        if text is None:
            slips.add("images without a text file, which have no boxes")
        rows = [] if text is None else _read(text, names)
        kept = [row for row in rows if row[1] in numbers]
        for _ in range(len(rows) - len(kept)):
            slips.add("boxes of classes that data.classes does not name left out")
        images.append(
            Labelled(
                file=image,
                place=str(text or image),
                classes=[numbers[number] for _, number, _ in kept],
                corners=[corners for *_, corners in kept],
                rows=[line for line, *_ in kept],
                part=part_of(image.relative_to(folder).parts[:-1]),
            )
        )
    for text in _without_image(found, folder):
        slips.add("text files without an image left out", str(text))
    return images


def _without_image(found: Sequence[Found], folder: Path) -> list[Path]:
    """The text files below a folder of labels that are no image's."""
    used = {text for _, text in found}
    return [
        file
        for file in files_in(folder)
        if file.suffix == ".txt"
        and file not in used
        and file.name not in _NAMES
        and any(part.lower() in LABELS for part in file.relative_to(folder).parts[:-1])
    ]


def class_numbers(found: Sequence[Found]) -> list[str]:
    """Names of classes that nobody names: all numbers from 0 to the greatest that is used."""
    used = (row[1] for _, text in found if text for row in _read(text, ()))
    return [str(number) for number in range(max(used, default=-1) + 1)]


def _lines(path: Path) -> list[str]:
    with corruption_named(path):
        return read_text(path, _LARGEST_TEXT).splitlines()


def _read(path: Path, names: Sequence[str]) -> list[tuple[int, int, tuple[float, ...]]]:
    """(number of the line, class, corners) of every line that is not empty."""
    return [
        (number, *_read_line(line.split(), f"{path}, row {number}", names))
        for number, line in enumerate(_lines(path), 1)
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
        known = (
            f"0..{len(names) - 1} ({first_few(names, 5)})"
            if names
            else f"whole, 0..{_MOST_CLASSES - 1}"
        )
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
