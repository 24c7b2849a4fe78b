"""Defines labelled images, which readers of boxes make, and counts of what readers leave out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION

PARTS: Mapping[str, int] = MappingProxyType(
    {"train": TRAIN, "training": TRAIN, "test": TEST, "testing": TEST}
    | dict.fromkeys(("val", "valid", "validation"), VALIDATION)
)


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
      place: the file of its labels, and the place in it; messages begin with it.
      boxes: of all classes, as written in the labels.
      size: width and height of the image by its labels; None if the labels do not state them.
      part: TRAIN, VALIDATION or TEST; None if the labels do not divide the images.
    """

    file: Path
    place: str
    boxes: Sequence[Box] = ()
    size: tuple[int, int] | None = None
    part: int | None = None


class Slips:
    """Counts what readers change or leave out, with the first three places of each kind."""

    def __init__(self):
        self._counts: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def add(self, kind: str, place: str = "", count: int = 1) -> None:
        """Adds `count` slips of a kind, such as "boxes without area left out"."""
        if not count:
            return
        self._counts[kind] += count
        places = self._places.setdefault(kind, [])
        if place and place not in places and len(places) < 3:
            places.append(place)

    def notes(self) -> list[str]:
        """Returns a note for the user on each kind, with its count."""
        return [
            f"{count} {kind}" + (f", such as {first_few(places)}" if places else "")
            for kind, count in self._counts.items()
            for places in [self._places[kind]]
        ]


def part_of(names: Sequence[str]) -> int | None:
    """Returns the part that the names give, such as "train2017" or "val"; the last one wins."""
    plain = [name.lower().rstrip("0123456789_-") for name in names]
    return next((PARTS[name] for name in reversed(plain) if name in PARTS), None)
