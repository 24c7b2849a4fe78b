"""Defines labelled images, which all readers of boxes make, and the readers' counts and checks.

Labels may come from any source, so each fault raises an error that names the file and the row.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedjax_bn.arguments.text import short
from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import read_text
from fedjax_bn.data.sets.files import corruption_named
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION

# The classes that BDD100K, Cityscapes and Mapillary Vistas share.
COMMON = ("person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle")
PARTS: Mapping[str, int] = MappingProxyType(
    {"train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST}
    | dict.fromkeys(("val", "valid", "validation"), VALIDATION)
)
# Names of the folders of a set of images with boxes, in small letters.
IMAGES = ("images", "jpegimages", "imgs")
LABELS = ("labels", "annotations", "xmls")
_LARGEST_JSON = 2**32  # bytes; Objects365, the largest that we know, takes half of that
_WORDS = {dict: "an object", list: "a list", str: "a text"}
_WORDS |= {int: "a whole number", float: "a number"}


class Box(NamedTuple):
    """A box as written in the labels.

    Attributes:
      row: the row of the labels, counted from 1.
      label: the name of its class.
      corners: x1, y1, x2, y2, from the left and upper edge of the image; x2 and y2 are where the
        box ends, so that x2 - x1 is its width.
      crowd: whether the box holds a group of objects, see `label_trees`.
    """

    row: int
    label: str
    corners: tuple[float, ...]
    crowd: bool = False


class Labelled(NamedTuple):
    """An image and its boxes.

    Attributes:
      file: the image.
      place: the file of its labels, and the place in it; error messages begin with it.
      boxes: of all classes, as written in the labels.
      size: width and height of the image by its labels; None if the labels do not state them.
      part: TRAIN, VALIDATION or TEST; None if the labels do not divide the images.
      name: of the sample, by default its file. Samples with one name are never separated.
    """

    file: Path
    place: str
    boxes: Sequence[Box] = ()
    size: tuple[int, int] | None = None
    part: int | None = None
    name: str = ""


class Form(NamedTuple):
    """A format of labels that any folder of images may have.

    Attributes:
      name: of the format, for messages.
      shares: whether corners are shares of the image, not pixels.
      find: `find(root, folder, slips)` returns the labels of this format in a domain's folder.
      read: `read(root, folders, found, slips)` returns the names of all classes, and domain -> its
        images; `folders` and `found` have each domain's folder and what `find` returned.
    """

    name: str
    shares: bool
    find: Callable[[Path, Path, "Slips"], Any]
    read: Callable[
        [Path, Mapping[str, Path], Mapping[str, Any], "Slips"],
        tuple[list[str], dict[str, list[Labelled]]],
    ]


class Slips:
    """Counts what readers change or leave out, with the first three places of each kind."""

    def __init__(self):
        self._counts: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def add(self, what: str, place: str = "", count: int = 1) -> None:
        """Adds `count` slips of a kind, such as "boxes without area left out"."""
        if not count:
            return
        self._counts[what] += count
        places = self._places.setdefault(what, [])
        if place and place not in places and len(places) < 3:
            places.append(place)

    def notes(self) -> list[str]:
        """Returns a note for the user on each kind, with its count."""
        return [
            f"{count} {what}" + (f", such as {first_few(places)}" if places else "")
            for what, count in self._counts.items()
            for places in [self._places[what]]
        ]


def part_of(names: Sequence[str]) -> int | None:
    """Returns the part that the names give, such as "train2017" or "val"; the last one wins."""
    plain = [name.lower().rstrip("0123456789_-") for name in names]
    return next((PARTS[name] for name in reversed(plain) if name in PARTS), None)


def numbers_of(classes: Sequence[str], chosen: Sequence[str], place: str) -> dict[str, int]:
    """Returns the number of each class that `data.classes` chooses; empty chooses all.

    Raises:
      ValueError: a chosen class does not exist, or is chosen twice.
    """
    unknown = [name for name in chosen if name not in classes]
    if unknown:
        raise ValueError(
            f"data.classes names {first_few(unknown)}, but {place} has {first_few(classes, 100)}"
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"data.classes={tuple(chosen)} names a class more than once; name it once")
    return {name: number for number, name in enumerate(chosen or classes)}


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: the file is damaged, nested absurdly deep, or not a regular file of up to 4 GiB.
    """
    with corruption_named(path):
        return json.loads(read_text(path, _LARGEST_JSON))


def entry(value: Any, key: str, kind: type, place: str) -> Any:
    """Returns `value[key]`, which must be of a kind, see `of_kind`.

    Raises:
      ValueError: `value` is not an object, lacks the key, or has another kind of value there.
    """
    if key not in of_kind(value, dict, place):
        raise ValueError(f"{place} has no {key!r}")
    return of_kind(value[key], kind, f"{place}: {key!r}")


def of_kind(value: Any, kind: type, place: str) -> Any:
    """Returns a value of JSON that must be a dict, list, str, int, or for `float` any number.

    Raises:
      ValueError: the value is of another kind, or a number too large for a float.
    """
    wanted = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, wanted):  # bool is a kind of int
        raise ValueError(f"{place} must be {_WORDS[kind]}")
    try:
        return float(value) if kind is float else value
    except OverflowError:
        raise ValueError(f"{place} is too large a number") from None


def bytes_of_name(name: str, place: str) -> int:
    """Returns the number of bytes of a file's name.

    Raises:
      ValueError: JSON wrote half of a character (a lone surrogate), which no file's name has.
    """
    try:
        return len(os.fsencode(name))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} {short(name, 60)!r} has half of a character (a lone surrogate), which no "
            "file's name has: correct it"
        ) from error
