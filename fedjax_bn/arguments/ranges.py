"""Ranges of arguments, stated once in a signature: `mu: AtLeast0 = 0.01` is a float of at least 0.

`bounded` enforces them, and the configuration reads them from the same signatures.
"""

import functools
import inspect
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

from fedjax_bn.arguments.text import brief, nearest

_LONGEST = 4096  # characters of a text, such as a path
_CHECKED = (int, float, str, tuple, list)  # values of arrays are not known under `jit`
_LARGEST = 3.4e38  # about the largest number of float32
_SMALLEST = 1.2e-38  # about its smallest one above 0; devices take what is smaller as 0


class Range(NamedTuple):
    """Allowed values: in words, such as "at least 1"; as a test; and by names, if only some are."""

    text: str
    holds: Callable[[Any], bool]
    names: tuple[str, ...] = ()

    @classmethod
    def one_of(cls, *names: str) -> "Range":
        """Returns the range that allows these names; "" means that the value may be empty."""
        statement = " or ".join(name or "empty" for name in names)
        return cls(statement, names.__contains__, tuple(filter(None, names)))

    def refusal(self, value: Any) -> str:
        """Returns why a value of the right type is not allowed, "must be ..."; "" if it is."""
        # Arrays are float32: a device has no larger number, and takes a smaller one as 0.
        if isinstance(value, float) and value and not _SMALLEST <= abs(value) <= _LARGEST:
            return "must be finite, and 0 or in size from 1.2e-38 to 3.4e38, as float32 holds it"
        if self.holds(value):
            return ""
        if self.names:
            return f"is unknown{nearest(value, self.names)}"
        return f"must be {self.text}"


def between(low: float, high: int) -> Range:
    """Returns the range of numbers from `low` to `high`, both allowed."""
    upper = ", below 2**31" if high == 2**31 - 1 else f" and at most {high}"
    return Range(f"at least {low}{upper}", lambda value: low <= value <= high)


def _printable(value: str) -> bool:
    return len(value) <= _LONGEST and not {"Cc", "Cs"} & set(map(unicodedata.category, value))


def _is_window(ends: Sequence[Any]) -> bool:
    with suppress(ValueError):
        low, high = map(float, ends)
        return -_LARGEST < low < high < _LARGEST
    return not ends


# The ranges by type, for arguments without a range of their own.
BY_KIND = {
    bool: Range("", lambda value: True),
    float: Range("a finite number", lambda value: abs(value) <= _LARGEST),
    int: Range("at least -2**63 and below 2**63", lambda value: -(2**63) <= value < 2**63),
    str: Range(f"printable, at most {_LONGEST} characters", _printable),
    tuple: Range(
        "a tuple of names", lambda x: all(isinstance(t, str) and _printable(t) for t in x)
    ),
}
ORDER = Range("-1, or a seed below 2**32", lambda value: -1 <= value < 2**32)
SAMPLES = between(1, 65_536)
GREYS = Range("empty, or two numbers LOW,HIGH, such as -160,240", _is_window)

# Types of arguments.
AtLeast0 = Annotated[float, Range("at least 0", lambda value: value >= 0)]
Above0 = Annotated[float, Range("above 0", lambda value: value > 0)]
Share = Annotated[float, Range("at least 0 and below 1", lambda value: 0 <= value < 1)]
UpTo1 = Annotated[float, between(0, 1)]
Inside = Annotated[float, Range("above 0 and below 1", lambda value: 0 < value < 1)]
Fraction = Annotated[float, Range("above 0 and at most 1", lambda value: 0 < value <= 1)]
# JAX's keys are made of 32 bits.
Seed = Annotated[int, Range("at least 0 and below 2**32", lambda value: 0 <= value < 2**32)]
# Counters on the device are i32; numbers that take memory have narrower bounds.
Rounds = Annotated[int, between(1, 2**31 - 1)]
RoundsOr0 = Annotated[int, between(0, 2**31 - 1)]
Steps = Annotated[int, between(1, 1_000_000)]
StepsOr0 = Annotated[int, between(0, 1_000_000)]
Samples = Annotated[int, SAMPLES]
SamplesOr0 = Annotated[int, between(0, 65_536)]
Pixels = Annotated[int, between(1, 4096)]
Units = Annotated[int, between(1, 16_384)]
Channels = Annotated[int, between(1, 4096)]
Views = Annotated[int, between(1, 1000)]
OddSide = Annotated[int, Range("odd, from 1 to 31", lambda value: value in range(1, 32, 2))]

_Made = TypeVar("_Made", bound=Callable[..., Any])


def stated_range(annotation: Any) -> Range | None:
    """Returns the range of a type: `Annotated[float, RANGE]`, a union with one, or a `Literal`."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            return Range.one_of(*get_args(part))
        for stated in getattr(part, "__metadata__", ()):
            if isinstance(stated, Range):
                return stated
    return None


def bounded(target: _Made) -> _Made:
    """Makes a function refuse arguments, or a dataclass fields, outside their ranges: ValueError.

    Only numbers, texts and sequences of them are checked: arrays pass. A function with
    `**options: Unpack[KEYS]`, where KEYS is a TypedDict, refuses other options: TypeError.
    """
    checked: Any = target
    name, signature = target.__name__, inspect.signature(checked)
    stated = {key: stated_range(p.annotation) for key, p in signature.parameters.items()}

    def check(arguments: Mapping[str, Any]) -> None:
        for key, value in arguments.items():
            allowed = stated.get(key) if isinstance(value, _CHECKED) else None
            if allowed and (problem := allowed.refusal(value)):
                raise ValueError(f"{name}: {key}={brief(value)} {problem}")

    if isinstance(target, type):
        # In a dataclass all fields, defaults included, are set before `__post_init__` is called.
        before = checked.__post_init__

        @functools.wraps(before)
        def __post_init__(self: Any) -> None:
            check({key: getattr(self, key) for key, allowed in stated.items() if allowed})
            before(self)

        checked.__post_init__ = __post_init__
        return checked

    # Only the arguments of the call are checked, not the defaults, which would cost time.
    options = _option_names(signature)

    @functools.wraps(target)
    def called(*args: Any, **kwargs: Any) -> Any:
        for key in kwargs:
            if options and key not in options:
                raise TypeError(f"{name} has no option {brief(key)}{nearest(key, options)}")
        check(dict(zip(signature.parameters, args, strict=False)) | kwargs)
        return target(*args, **kwargs)

    return cast(Any, called)


def _option_names(signature: inspect.Signature) -> set[str]:
    """Returns the keywords of a function with `**options: Unpack[KEYS]`, else an empty set."""
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and get_args(parameter.annotation):
            (keys,) = get_args(parameter.annotation)
            named = signature.parameters.keys() - {parameter.name}
            return {*named, *keys.__required_keys__, *keys.__optional_keys__}
    return set()
