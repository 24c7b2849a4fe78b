"""Counts what readers change or leave out, and reads parts from names of folders."""

from collections import Counter
from collections.abc import Sequence

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.source import TEST, TRAIN, VALIDATION

_PARTS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation"), VALIDATION),
    **dict.fromkeys(("test", "testing"), TEST),
}


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
    return next((_PARTS[name] for name in reversed(plain) if name in _PARTS), None)
