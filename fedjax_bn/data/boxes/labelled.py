"""The common form of images with boxes, and what all readers of boxes share."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION

# Kinds of slips that several readers count.
CROWDS = "crowds (groups of objects): no client learns them, no detection is wrong there"
OTHER_CLASS = "boxes of classes that data.classes does not name left out"
# The classes that BDD100K, Cityscapes and Mapillary Vistas share.
COMMON = ("person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle")
PARTS: Mapping[str, int] = MappingProxyType(
    {"train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST}
    | dict.fromkeys(("val", "valid", "validation"), VALIDATION)
)
# Names of the folders of a set of images with boxes, in small letters.
IMAGES = ("images", "jpegimages", "imgs")
LABELS = ("labels", "annotations", "xmls")


class Box(NamedTuple):
    """A box as the labels have it.

    Attributes:
      row: the row of the labels, counted from 1.
      number: its class, a position in the dataset's classes; see `label_trees.crowd`.
      corners: x1, y1, x2, y2, from the left and upper edge of the image; x2 and y2 are where the
        box ends, so that x2 - x1 is its width.
    """

    row: int
    number: int
    corners: tuple[float, ...]


class Labelled(NamedTuple):
    """An image and its boxes.

    Attributes:
      file: the image.
      place: the file of its labels, and the place in it; error messages begin with it.
      boxes: as the labels have them.
      size: width and height of the image by its labels; None if the labels do not state them.
      part: TRAIN, VALIDATION or TEST; None if the labels do not divide the images.
      name: of the sample, by default its file. Samples of one name are never separated.
    """

    file: Path
    place: str
    boxes: Sequence[Box] = ()
    size: tuple[int, int] | None = None
    part: int | None = None
    name: str = ""


class Slips:
    """Counts what readers change or leave out, and keeps the first three places of each kind."""

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
    """Returns the part that a folder's name means, such as "train2017" or "val"; the last wins."""
    for name in reversed(names):
        plain = name.lower().rstrip("0123456789_-")
        if plain in PARTS:
            return PARTS[plain]
    return None


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


def files_in(folder: Path) -> list[Path]:
    """Returns all files in and below a folder by name, without hidden ones; follows links once."""
    found, seen = [], {os.path.realpath(folder)}
    for place, inner, names in os.walk(folder, followlinks=True):
        visible = sorted(name for name in inner if not name.startswith("."))
        real = {name: os.path.realpath(os.path.join(place, name)) for name in visible}
        inner[:] = [name for name in visible if real[name] not in seen]
        seen.update(real.values())
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(found)
