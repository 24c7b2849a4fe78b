"""Ranges of arguments, stated once in a signature: `mu: AtLeast0 = 0.01` is a float from 0.

`bounded` makes a function or dataclass refuse values outside the ranges of its signature. The
configuration reads its ranges from the same signatures.
"""

import functools
import inspect
import unicodedata
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

from fedjax_bn.arguments.text import brief, nearest

_LONGEST = 4096  # characters of a text, as of a path
_LARGEST = 3.4e38  # what float32 holds


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
    """Returns the range of some names; "" means that the value may be empty."""
    text = " or ".join(name or "empty" for name in names)
    return Range(text, names.__contains__, tuple(filter(None, names)))


def between(low: int, high: int) -> Range:
    """Returns the range of whole numbers from `low` to `high`, both included."""
    text = f"at least {low} and at most {high}"
    if high == 2**31 - 1:
        text = f"at least {low}, below 2**31"
    return Range(text, lambda value: low <= value <= high)


def printable(text: str) -> bool:
    """Whether a text has at most 4096 characters, no control character and no lone surrogate."""
    odd = any(unicodedata.category(character) in ("Cc", "Cs") for character in text)
    return len(text) <= _LONGEST and not odd


ANY = Range("", lambda value: True)
FINITE = Range("a finite number", lambda value: abs(value) <= _LARGEST)
AT_LEAST_0 = Range("at least 0", lambda value: value >= 0)
ABOVE_0 = Range("above 0", lambda value: value > 0)
SHARE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
UP_TO_1 = Range("at least 0 and at most 1", lambda value: 0 <= value <= 1)
INSIDE = Range("above 0 and below 1", lambda value: 0 < value < 1)
FRACTION = Range("above 0 and at most 1", lambda value: 0 < value <= 1)
WHOLE = Range("at least -2**63 and below 2**63", lambda value: -(2**63) <= value < 2**63)
SEED = Range("at least 0 and below 2**32, as JAX's keys need it", lambda value: 0 <= value < 2**32)
ORDER = Range("-1, or a seed below 2**32", lambda value: -1 <= value < 2**32)
# Counters on the device are i32; numbers that take memory have narrower bounds.
COUNT, COUNT_OR_0 = between(1, 2**31 - 1), between(0, 2**31 - 1)
STEPS, STEPS_OR_0 = between(1, 1_000_000), between(0, 1_000_000)
SAMPLES, SAMPLES_OR_0 = between(1, 65_536), between(0, 65_536)
CLIENTS, CLIENTS_OR_0 = STEPS, STEPS_OR_0
PIXELS = between(1, 4096)
ALPHA = Range("at least 0.001 and at most 1000000", lambda value: 0.001 <= value <= 1e6)
ODD_SIDE = Range(
    "odd, at least 1 and at most 31", lambda value: value % 2 == 1 and 1 <= value <= 31
)
OF_TEXT = f"printable, at most {_LONGEST} characters"
TEXT = Range(OF_TEXT, printable)
TEXTS = Range(
    f"each {OF_TEXT}", lambda texts: len(texts) <= _LONGEST and all(map(printable, texts))
)
BY_KIND = {float: FINITE, int: WHOLE, str: TEXT, tuple: TEXTS}


def bounds_in(text: str) -> tuple[float, float]:
    """Returns LOW and HIGH of "LOW,HIGH".

    Raises:
      ValueError: they are not finite numbers, or LOW is not below HIGH.
    """
    if not _BOUNDS.holds(text):
        raise ValueError(f"bounds={brief(text)} must be {_BOUNDS.text}")
    low, high = map(float, text.split(","))
    return low, high


def _are_bounds(text: str) -> bool:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        return False
    return FINITE.holds(low) and FINITE.holds(high) and low < high


_BOUNDS = Range(
    "LOW,HIGH with LOW below HIGH, such as 0,1; empty for none",
    lambda text: not text or _are_bounds(text),
)

# Types of arguments.
Bounds = Annotated[str, _BOUNDS]
AtLeast0 = Annotated[float, AT_LEAST_0]
Above0 = Annotated[float, ABOVE_0]
Share = Annotated[float, SHARE]
UpTo1 = Annotated[float, UP_TO_1]
Seed = Annotated[int, SEED]
Units = Annotated[int, between(1, 16_384)]
Views = Annotated[int, between(1, 1000)]
Rounds = Annotated[int, COUNT]
OddSide = Annotated[int, ODD_SIDE]
Magnitude = Annotated[int, between(0, 30)]
RoundsOr0 = Annotated[int, COUNT_OR_0]
Channels = Annotated[int, between(1, 4096)]
SamplesOr0 = Annotated[int, SAMPLES_OR_0]
Margin = Annotated[int, between(0, 2047)]
Cafl = Literal["sum", "mean"]
Puzzles = Annotated[int, between(1, 71)]

_Made = TypeVar("_Made", bound=Callable[..., Any])


def stated_range(annotation: Any) -> Range | None:
    """Returns the range of a type: `Annotated[float, RANGE]`, a union with one, or a `Literal`."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            return one_of(*get_args(part))
        for stated in getattr(part, "__metadata__", ()):
            if isinstance(stated, Range):
                return stated
    return None


def refusal(value: Any, allowed: Range) -> str:
    """Returns why a value of the right type is not allowed, "must be ..."; "" where it is."""
    if isinstance(value, float) and not abs(value) <= _LARGEST:
        return "must be a finite number, of at most 3.4e38 as float32 holds it"
    if allowed.holds(value):
        return ""
    if allowed.names:
        return f"is unknown{nearest(value, allowed.names)}"
    return f"must be {allowed.text}"


def bounded(target: _Made) -> _Made:
    """Makes a function refuse arguments, or a dataclass fields, outside their ranges.

    Only numbers and texts are checked: arrays pass. A function with `**options: Unpack[KEYS]`,
    where KEYS is a TypedDict, refuses options that KEYS does not have.

    Raises:
      ValueError: at the call; it names the function, the argument, its value and what is allowed.
      TypeError: at the call, an option is unknown; the message names the nearest right one.
    """
    made: Any = target
    signature = inspect.signature(made)
    stated = {key: stated_range(p.annotation) for key, p in signature.parameters.items()}

    def check(given: Mapping[str, Any]) -> None:
        for key, value in given.items():
            allowed = stated.get(key) if isinstance(value, int | float | str) else None
            if allowed and (why := refusal(value, allowed)):
                raise ValueError(f"{target.__name__}: {key}={brief(value)} {why}")

    if isinstance(target, type):
        before = made.__post_init__

        @functools.wraps(before)
        def __post_init__(self: Any) -> None:
            check({key: getattr(self, key) for key, allowed in stated.items() if allowed})
            before(self)

        made.__post_init__ = __post_init__
        return made

    known = _options(signature)

    @functools.wraps(target)
    def called(*args: Any, **kwargs: Any) -> Any:
        for key in kwargs:
            if known and key not in known:
                raise TypeError(
                    f"{target.__name__} has no option {brief(key)}{nearest(key, known)}"
                )
        check(dict(zip(signature.parameters, args, strict=False)) | kwargs)
        return target(*args, **kwargs)

    return cast(Any, called)


def _options(signature: inspect.Signature) -> set[str]:
    """The keywords of a function with `**options: Unpack[KEYS]`; none of another function."""
    named = dict(signature.parameters)
    options = [p for p in named.values() if p.kind is p.VAR_KEYWORD and get_args(p.annotation)]
    if not options:
        return set()
    (keys,) = get_args(named.pop(options[0].name).annotation)
    return {*named, *keys.__required_keys__, *keys.__optional_keys__}
