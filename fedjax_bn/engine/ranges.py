"""What values an argument or a key may have: stated once, where it is declared.

`mu: AtLeast0 = 0.01` in a signature is a float with its range. `bounded` lets a function or class
refuse what its signature does not allow; the configuration reads the same ranges, of keys from
`fedjax_bn.run.config.defaults` and of spelled arguments from signatures
(`fedjax_bn.engine.spelling`).
"""

import difflib
import functools
import inspect
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

_LONGEST = 4096  # characters of a text, as of a path
_MESH = re.compile(r"([1-9]\d{0,5})|clients:([1-9]\d{0,5})(?:,batch:([1-9]\d{0,5}))?", re.ASCII)

_BUCKET = re.compile(r"[a-z][a-z0-9]*://.", re.ASCII)


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
    """One of some names; "" means that it may be empty."""
    text = " or ".join(name or "empty" for name in names)
    return Range(text, names.__contains__, tuple(filter(None, names)))


def between(low: int, high: int) -> Range:
    """A whole number from `low` to `high`, both included."""
    text = f"at least {low} and at most {high}" if high < 2**31 - 1 else f"at least {low}"
    text += ", below 2**31" if high == 2**31 - 1 else ""
    return Range(text, lambda value: low <= value <= high)


def _printable(text: str) -> bool:
    # Control characters, NUL among them, and what UTF-8 cannot write.
    odd = any(unicodedata.category(character) in ("Cc", "Cs") for character in text)
    return len(text) <= _LONGEST and not odd


def _is_path(text: str) -> bool:
    home = text.startswith("~") and os.path.expanduser(text) == text
    return _printable(text) and not home


def _is_folder(text: str) -> bool:
    """Whether a text says where a folder lies: a slip of the pen, such as None, makes no folder."""
    begins = text.startswith(("./", "../", "~")) or os.path.isabs(text)
    return not text or (begins and _is_path(text))


def _is_folder_or_bucket(text: str) -> bool:
    return _is_folder(text) or (bool(_BUCKET.match(text)) and _printable(text))


def _epochs(texts: tuple[str, ...]) -> bool:
    digits = (text.isascii() and text.isdecimal() and len(text) < 6 for text in texts)
    return len(texts) <= _LONGEST and all(digits) and all(int(text) > 0 for text in texts)


def with_smallest(text: str) -> tuple[str, int]:
    """What stands before `:smallest=N`, and N, by default 10.

    Raises:
      ValueError: N is no whole number from 1 to 65536.
    """
    before, given, number = text.partition(":smallest=")
    if not given:
        return text, SMALLEST
    if not (_epochs((number,)) and SAMPLES.holds(int(number))):
        raise ValueError(f"{brief(text)}: smallest must be {SAMPLES.text}")
    return before, int(number)


def drawn_samples(text: str) -> int:
    """N of the partition `drawn:N`; 0 of another.

    Raises:
      ValueError: N is no whole number from 1 to 65536.
    """
    name, _, number = text.partition(":")
    if name != "drawn":
        return 0
    if not (_epochs((number,)) and SAMPLES.holds(int(number))):
        raise ValueError(f"{brief(text)}: N of drawn:N must be {SAMPLES.text}")
    return int(number)


def _partition(text: str) -> bool:
    try:
        name, _ = with_smallest(text)
        return name == "dirichlet" or text in ("iid", "pooled") or bool(drawn_samples(text))
    except ValueError:
        return False


def _sizes(text: str) -> bool:
    try:
        kind, _, number = with_smallest(text)[0].partition(":")
        if kind in ("lognormal", "dirichlet"):
            return 0.001 <= float(number) <= (100 if kind == "lognormal" else 1e6)
        return not text or all(1 <= int(entry) < 2**31 for entry in text.split(","))
    except ValueError:  # no number, or one of thousands of digits
        return False


def mask_bounds(text: str) -> tuple[float, float]:
    """LOW and HIGH of "LOW,HIGH".

    Raises:
      ValueError: they are no finite numbers, or LOW is not below HIGH.
    """
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = 0.0
    if not -_MOST <= low < high <= _MOST:
        raise ValueError(f"bounds={brief(text)} must be {BOUNDS.text}")
    return low, high


def mesh_sizes(text: str) -> tuple[int, int | None]:
    """N and M of "clients:N,batch:M", N and 1 of "clients:N", N and None of a number alone.

    Raises:
      ValueError: it is none of these.
    """
    found = _MESH.fullmatch(text)
    if found is None:
        raise ValueError(f"{brief(text)} must be {MESH.text}")
    devices, clients, batch = found.groups()
    return (int(devices), None) if devices else (int(clients), int(batch or 1))


def _mesh(text: str) -> bool:
    try:
        return text == "auto" or bool(mesh_sizes(text))
    except ValueError:
        return False


def _bounds(text: str) -> bool:
    try:
        return not text or bool(mask_bounds(text))
    except ValueError:
        return False


SMALLEST = 10  # samples of the smallest client that is drawn, where there are enough
_MOST = 3.4e38  # what float32 holds
_OF_TEXT = f"printable, at most {_LONGEST} characters"
ANY = Range("", lambda value: True)
FINITE = Range("a finite number", lambda value: abs(value) <= _MOST)
AT_LEAST_0 = Range("at least 0", lambda value: value >= 0)
ABOVE_0 = Range("above 0", lambda value: value > 0)
SHARE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
UP_TO_1 = Range("at least 0 and at most 1", lambda value: 0 <= value <= 1)
INSIDE = Range("above 0 and below 1", lambda value: 0 < value < 1)
FRACTION = Range("above 0 and at most 1", lambda value: 0 < value <= 1)
WHOLE = Range("at least -2**63 and below 2**63", lambda value: -(2**63) <= value < 2**63)
SEED = Range("at least 0 and below 2**32, as JAX's keys need it", lambda value: 0 <= value < 2**32)
ORDER = Range("-1, or a seed below 2**32", lambda value: -1 <= value < 2**32)
# What is counted on the device, in i32; what takes memory is bounded more narrowly.
COUNT, COUNT_OR_0 = between(1, 2**31 - 1), between(0, 2**31 - 1)
STEPS, STEPS_OR_0 = between(1, 1_000_000), between(0, 1_000_000)
SAMPLES, SAMPLES_OR_0 = between(1, 65_536), between(0, 65_536)
CLIENTS, CLIENTS_OR_0 = between(1, 1_000_000), between(0, 1_000_000)
PIXELS = between(1, 4096)
UNITS = between(1, 16_384)
ODD_SIDE = Range(
    "odd, at least 1 and at most 31", lambda value: value % 2 == 1 and 1 <= value <= 31
)
EPOCHS = Range("whole numbers above 0 and below 100000", _epochs)
ALPHA = Range("at least 0.001 and at most 1000000", lambda value: 0.001 <= value <= 1e6)
SIZES = Range(
    "whole numbers above 0, lognormal:SIGMA (0.001 to 100) or dirichlet:ALPHA (0.001 to 1e6)",
    _sizes,
)
BOUNDS = Range("LOW,HIGH with LOW below HIGH, such as 0,1; empty for none", _bounds)
MESH = Range("auto, a number of devices, clients:N or clients:N,batch:M", _mesh)
PARTITION = Range("iid, dirichlet, dirichlet:smallest=N, drawn:N or pooled", _partition)
TEXT = Range(_OF_TEXT, _printable)
TEXTS = Range(
    f"each {_OF_TEXT}", lambda texts: len(texts) <= _LONGEST and all(map(_printable, texts))
)
PATH = Range(f"a path ({_OF_TEXT}) whose ~NAME, if any, is a user here", _is_path)
FOLDER = Range(
    "empty for none, or a folder that begins with /, ./, ../ or ~ (of ~NAME a user here)",
    _is_folder,
)
FOLDER_OR_BUCKET = Range(f"{FOLDER.text}, or a bucket such as gs://NAME", _is_folder_or_bucket)
BY_KIND = {float: FINITE, int: WHOLE, str: TEXT, tuple: TEXTS}

# Types of arguments.
AtLeast0 = Annotated[float, AT_LEAST_0]
Above0 = Annotated[float, ABOVE_0]
Share = Annotated[float, SHARE]
UpTo1 = Annotated[float, UP_TO_1]
Seed = Annotated[int, SEED]
Units = Annotated[int, UNITS]
Bounds = Annotated[str, BOUNDS]
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


def bounded(target: _Made) -> _Made:
    """A function that refuses arguments, or a dataclass that refuses fields, out of their ranges.

    Only numbers and texts are looked at: arrays pass. A function with `**options: Unpack[KEYS]`,
    where KEYS is a TypedDict, refuses options that KEYS does not have.

    Raises:
      ValueError: at the call, naming the function, the argument, its value and what is allowed.
      TypeError: at the call, an option is unknown; the message names the nearest right one.
    """
    made: Any = target
    signature = inspect.signature(made)
    stated = {key: stated_range(p.annotation) for key, p in signature.parameters.items()}
    ranges = {key: allowed for key, allowed in stated.items() if allowed is not None}
    if isinstance(target, type):
        before = made.__post_init__

        @functools.wraps(before)
        def __post_init__(self: Any) -> None:
            _require(target.__name__, ranges, {key: getattr(self, key) for key in ranges})
            before(self)

        made.__post_init__ = __post_init__
        return made

    known = _known(signature)

    @functools.wraps(target)
    def called(*args: Any, **kwargs: Any) -> Any:
        for key in kwargs:
            if known and key not in known:
                raise TypeError(
                    f"{target.__name__} has no option {brief(key)}{nearest(key, known)}"
                )
        _require(target.__name__, ranges, dict(zip(signature.parameters, args, strict=False)))
        _require(target.__name__, ranges, kwargs)
        return target(*args, **kwargs)

    return cast(Any, called)


def _known(signature: inspect.Signature) -> set[str]:
    """The keywords of a function with `**options: Unpack[KEYS]`; none of another."""
    named = dict(signature.parameters)
    options = [p for p in named.values() if p.kind is p.VAR_KEYWORD and get_args(p.annotation)]
    if not options:
        return set()
    (keys,) = get_args(named.pop(options[0].name).annotation)
    return {*named, *keys.__required_keys__, *keys.__optional_keys__}


def _require(name: str, ranges: Mapping[str, Range], given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        plain = key in ranges and isinstance(value, int | float | str)
        if plain and (why := refusal(value, ranges[key])):
            raise ValueError(f"{name}: {key}={brief(value)} {why}")


def stated_range(annotation: Any) -> Range | None:
    """The range of a type: `Annotated[float, RANGE]`, a union with one, or a `Literal`."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            return one_of(*get_args(part))
        for stated in getattr(part, "__metadata__", ()):
            if isinstance(stated, Range):
                return stated
    return None


def refusal(value: Any, allowed: Range) -> str:
    """Why a value of the right type is not allowed, the end of a sentence; "" where it is."""
    if isinstance(value, float) and not abs(value) <= _MOST:
        return "must be a finite number, of at most 3.4e38 as float32 holds it"
    if allowed.holds(value):
        return ""
    if allowed.names:
        return f"is unknown{nearest(value, allowed.names)}"
    return f"must be {allowed.text}"


def brief(value: Any) -> str:
    """A value as messages show it: in one line, and not all of a long one."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list of lists
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 200 else f"{text[:100]}...{text[-20:]}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: the likely meant name, and all valid ones."""
    valid = sorted(valid)
    lower = {option.lower(): option for option in valid}
    close = difflib.get_close_matches(name.lower()[:100], lower, 1, 0.5)
    hint = f"; did you mean {lower[close[0]]!r}?" if close else ";"
    return f"{hint} valid are {', '.join(valid)}"
