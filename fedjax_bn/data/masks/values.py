"""Decides which class each value of the masks of a dataset is.

The values of all masks together become classes by the first rule that applies:

    1  two classes, and no values but 0, 1 and 255, of which no domain has all three, or 0 and one
       other value: 0 is the background, the others are the region
    2  the values are 0 to C - 1, or these and 255: they are the numbers of C classes, and 255 is a
       pixel without a label
    3  there are C values: the darkest is class 0, the next is class 1, and so on

C is the number of names in `data.classes`, or, without names, the one that fits.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.engine.inputs import UNLABELLED

_MOST = 32  # values that may be classes without names


def classes_of(
    present: np.ndarray,
    domains: Sequence[str],
    files: Sequence[str],
    classes: Sequence[str] = (),
    values: Mapping[int, int] | None = None,
) -> tuple[tuple[str, ...], np.ndarray, str]:
    """Returns the classes of masks, and the class of each value.

    Args:
      present: bool[N, 256], which values each mask has.
      domains: N names, the domain of each mask.
      files: N names, for error messages.
      classes: names of the classes, the background first; empty to find their number.
      values: value -> class, or `UNLABELLED`, if a published dataset states it; None to find it by
        the rules above.

    Returns:
      The names of the classes; u8[256], the class of each value, `UNLABELLED` for the others; and
      a note for the user.

    Raises:
      ValueError: a mask has a value that is not a class, all masks have the same value alone, or
        `classes` has one name or the same name twice.
    """
    if len(classes) == 1 or len(set(classes)) < len(classes):
        raise ValueError(
            f"data.classes={tuple(classes)} must name the background and every region once, such "
            "as background,vessel"
        )
    found = np.flatnonzero(present.any(0)).tolist()
    if len(found) < 2:
        raise ValueError(
            f"all {len(files)} masks have the value {found[0]} alone, such as {files[0]}: give "
            "masks that show a region"
        )
    if values is None:
        owned = [present[[one == name for one in domains]].any(0) for name in set(domains)]
        values = _find(found, owned, len(classes))
    if unknown := [value for value in found if value not in values]:
        usual = (0, 1, UNLABELLED)
        rarest = min(unknown, key=lambda value: (present[:, value].sum(), value in usual, -value))
        file = files[int(np.flatnonzero(present[:, rarest])[0])]
        wanted = f"the {len(classes)} names of data.classes" if classes else f"{_MOST} classes"
        raise ValueError(
            f"{file} has the value {rarest}, and all masks together have {_listed(found)}, which "
            f"do not suit {wanted}: save masks with 0 and 255, with 0, 1, 2 and so on, or with as "
            "many values as data.classes has names"
        )
    shown = {number: [v for v in found if values[v] == number] for number in values.values()}
    count = 1 + max(number for number in shown if number != UNLABELLED)
    names = tuple(classes) or _names(count, shown)
    about = [f"{_listed(shown[k])} {names[k]}" for k in range(count) if shown.get(k)]
    if shown.get(UNLABELLED):
        about.append(f"{_listed(shown[UNLABELLED])} without a label")
    table = np.full(256, UNLABELLED, np.uint8)
    table[list(values)] = list(values.values())
    return names, table, f"values of masks and what they are: {', '.join(about)}"


def _find(found: Sequence[int], owned: Iterable[np.ndarray], count: int) -> dict[int, int]:
    """Returns the class of each value by the rules above; {} if no rule applies.

    Args:
      found: the values of all masks, rising.
      owned: bool[256] for each domain, the values that it has.
      count: of `data.classes`; 0 if it is empty.
    """
    others = {value for value in found if value}
    mixed = any(own[[0, 1, UNLABELLED]].all() for own in owned)
    black_and_white = others <= {1, UNLABELLED} and not mixed
    if count in (0, 2) and 0 in found and (len(others) == 1 or black_and_white):
        return {0: 0} | dict.fromkeys(others, 1)
    numbers = [value for value in found if value != UNLABELLED]
    classes = count or len(numbers)
    # The background alone would leave all regions, stored as 255, without a label.
    if 0 < numbers[-1] < classes and (count or numbers == list(range(classes))):
        return {number: number for number in range(classes)} | {UNLABELLED: UNLABELLED}
    if len(found) == (count or min(len(found), _MOST)):
        return {value: number for number, value in enumerate(found)}
    return {}


def _names(count: int, shown: Mapping[int, Sequence[int]]) -> tuple[str, ...]:
    """Returns names of classes without names, of which each `shown` has the values."""
    if count == 2:
        return ("background", "foreground")
    return ("background", *(_listed(shown.get(k) or [k]) for k in range(1, count)))


def _listed(values: Sequence[int]) -> str:
    *others, last = map(str, values)
    return f"{first_few(others)} and {last}" if others else last
