"""The official lists of DomainNet: which images there are, for training and for testing.

A list is DOMAIN_train.txt or DOMAIN_test.txt with lines DOMAIN/CLASS/FILE LABEL, labels from 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.sets.lists import read_list
from fedjax_bn.data.source import TEST, TRAIN

SIZES = {  # lines of the official training and test lists, for all 345 classes
    "clipart": (33_525, 14_604),
    "infograph": (36_023, 15_582),
    "painting": (50_416, 21_850),
    "quickdraw": (120_750, 51_750),
    "real": (120_906, 52_041),
    "sketch": (48_212, 20_916),
}
_PARTS = {"train": TRAIN, "test": TEST}


class Lines(NamedTuple):
    """One list: its file, the images' names DOMAIN/CLASS/FILE, their classes and their labels."""

    path: Path
    part: int
    names: list[str]
    classes: list[str]
    labels: np.ndarray


def read_lists(folders: Sequence[Path], domain: str, where: str) -> list[Lines]:
    """The training and the test list of a domain, from the first folder that has it.

    Raises:
      FileNotFoundError: one is missing.
      ValueError: a line is not DOMAIN/CLASS/FILE LABEL.
    """
    both = []
    for part, number in _PARTS.items():
        name = f"{domain}_{part}.txt"
        places = [folder / name for folder in folders]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise FileNotFoundError(f"the list {places[0]} is missing: {where}")
        names, labels = read_list(found)
        wrong = [one for one in names if one.count("/") != 2 or not one.startswith(f"{domain}/")]
        if wrong:
            raise ValueError(
                f"{found}: lines must be {domain}/CLASS/FILE LABEL, but these are not: "
                f"{first_few(wrong)}"
            )
        both.append(Lines(found, number, names, [one.split("/")[1] for one in names], labels))
    return both


def check_labels(lists: Sequence[Lines]) -> list[str]:
    """The classes of all lists in the order of their labels.

    Raises:
      ValueError: a class has two labels, two classes have one, or labels count from 1.
    """
    first: dict[str, int] = {}
    for lines in lists:
        own = dict(zip(lines.classes, lines.labels.tolist(), strict=True))
        wrong = [
            f"{name} {label} (not {first.get(one, own[one])})"
            for name, one, label in zip(lines.names, lines.classes, lines.labels, strict=True)
            if label != first.get(one, own[one])
        ]
        if wrong:
            raise ValueError(
                f"{lines.path}: {len(wrong)} labels are not those that the same classes have "
                f"elsewhere in the lists: {first_few(wrong)}; fetch the list again"
            )
        first = own | first
    if sorted(first.values()) == list(range(1, len(first) + 1)):
        raise ValueError(
            f"{lists[0].path.parent}: the lists' labels count from 1, but those of DomainNet count "
            "from 0; subtract 1 from each"
        )
    if len(set(first.values())) < len(first):
        raise ValueError(
            f"{lists[0].path.parent}: in the lists two classes have one label; fetch them again"
        )
    return sorted(first, key=first.get)


def size_notes(domain: str, lists: Sequence[Lines]) -> list[str]:
    """A sentence for each list that has another number of lines than the official one."""
    return [
        f"domainnet: {lines.path.name} has {len(lines.names)} lines, the official one {expected}"
        for lines, expected in zip(lists, SIZES[domain], strict=True)
        if len(lines.names) != expected
    ]
