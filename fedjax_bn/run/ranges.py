"""What values a key of the configuration may have, in words and as a test."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """Allowed values.

    Attributes:
      text: what the value must be, such as "at least 1".
      holds: whether a value is one of them.
      names: the allowed names, where only some are.
    """

    text: str
    holds: Callable[[Any], bool]
    names: tuple[str, ...] = ()


def one_of(*names: str) -> Range:
    """One of some names; "" means that the key may be empty."""
    text = " or ".join(name or "empty" for name in names)
    return Range(text, names.__contains__, tuple(filter(None, names)))


def _whole_above_zero(texts: tuple[str, ...]) -> bool:
    return all(text.isdecimal() and int(text) > 0 for text in texts)


ANY = Range("", lambda value: True)
AT_LEAST_0 = Range("at least 0", lambda value: value >= 0)
AT_LEAST_1 = Range("at least 1", lambda value: value >= 1)
ABOVE_0 = Range("above 0", lambda value: value > 0)
SHARE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
UP_TO_1 = Range("at least 0 and at most 1", lambda value: 0 <= value <= 1)
FRACTION = Range("above 0 and at most 1", lambda value: 0 < value <= 1)
SEED = Range("at least 0 and below 2**32, as JAX's keys need it", lambda value: 0 <= value < 2**32)
WHOLE_NUMBERS = Range("whole numbers above 0", _whole_above_zero)
