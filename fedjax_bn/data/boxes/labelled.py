"""What a reader of boxes finds: files of images, each with the boxes that its labels give it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION

CROWDS = "crowds, groups that are no single object: nobody learns them, no detection is wrong there"
# What BDD100K, Cityscapes and Mapillary Vistas share.
COMMON = ("person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle")
PARTS: Mapping[str, int] = MappingProxyType(
    {
        "train": TRAIN,
        "training": TRAIN,
        "val": VALIDATION,
        "valid": VALIDATION,
        "validation": VALIDATION,
        "test": TEST,
        "testing": TEST,
    }
)


class Labelled(NamedTuple):
    """An image and its boxes, as the labels have them.

    Attributes:
      file: the image.
      place: the file of its labels, and where in it, to begin a sentence with.
      classes: of each box, positions in the dataset's classes; see `label_trees.crowd`.
      corners: of each box, x1, y1, x2, y2, from the left and upper edge of the image; x2 and y2 are
        where the box ends, so that x2 - x1 is its width.
      rows: of each box, which row of the labels it is.
      size: width and height that the labels say the image has; None where they do not.
      part: TRAIN, VALIDATION or TEST; None where there is none.
      name: of the sample; by default its file. Samples of one name are never separated.
    """

    file: Path
    place: str
    classes: Sequence[int]
    corners: Sequence[Sequence[float]] | np.ndarray
    rows: Sequence[int]
    size: tuple[int, int] | None = None
    part: int | None = None
    name: str = ""


class Slips:
    """What was changed or left out while labels were read, counted, with the first places.

    `slips.add(what, place)` counts one; `slips.notes()` are sentences for the user.
    """

    def __init__(self):
        self._counts: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def add(self, what: str, place: str = "") -> None:
        """One more of what a sentence says, such as "boxes without area left out"."""
        self._counts[what] += 1
        places = self._places.setdefault(what, [])
        if place and place not in places and len(places) < 3:
            places.append(place)

    def notes(self) -> list[str]:
        """A sentence for each kind, with its count."""
        return [
            f"{count} {what}" + (f", such as {first_few(places)}" if places else "")
            for what, count in self._counts.items()
            for places in [self._places[what]]
        ]


def part_of(names: Sequence[str]) -> int | None:
    """The part that one of a path's folders names, such as "train2017" or "val"; the last wins."""
    for name in reversed(names):
        plain = name.lower().rstrip("0123456789_-")
        if plain in PARTS:
            return PARTS[plain]
    return None


def numbers_of(classes: Sequence[str], chosen: Sequence[str], place: str) -> dict[str, int]:
    """Class -> its number, of those that `data.classes` chooses; empty for all.

    Raises:
      ValueError: one is none of the classes, or chosen twice.
    """
    unknown = [name for name in chosen if name not in classes]
    if unknown:
        raise ValueError(
            f"data.classes names {first_few(unknown)}, but {place} has {first_few(classes, 100)}"
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"data.classes={tuple(chosen)} names a class more than once; name it once")
    return {name: number for number, name in enumerate(chosen or classes)}
