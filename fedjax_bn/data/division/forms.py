"""Reads `data.partition` and `data.sizes`, such as `iid` or `dirichlet:smallest=5`."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any

from fedjax_bn.arguments.choices import read_choice
from fedjax_bn.arguments.ranges import Alpha, Range, Samples
from fedjax_bn.arguments.text import brief

# Whose division of `data.name=prostate`; "" divides by patient.
PROSTATE = ("", "harmofl", "fl_medsegbench")
SMALLEST = 10  # minimum samples of a client whose number is drawn, if there are enough
_Sigma = Annotated[float, Range("at least 0.001 and at most 100", lambda s: 0.001 <= s <= 100)]


def _dirichlet(alpha: Alpha = 0.5, smallest: Samples = SMALLEST) -> tuple[str, int]:
    del alpha  # see `read_alpha`
    return "dirichlet", smallest


def _drawn(samples: Samples) -> tuple[str, int]:
    return "drawn", samples


def _lognormal_sizes(sigma: _Sigma, smallest: Samples = SMALLEST) -> tuple[str, float, int]:
    return "lognormal", sigma, smallest


def _dirichlet_sizes(alpha: Alpha, smallest: Samples = SMALLEST) -> tuple[str, float, int]:
    return "dirichlet", alpha, smallest


_PARTITIONS: Mapping[str, Callable[..., tuple]] = {
    "iid": lambda: ("iid", 0),
    "pooled": lambda: ("pooled", 0),
    "dirichlet": _dirichlet,
    "drawn": _drawn,
}
_SIZES: Mapping[str, Callable[..., tuple]] = {
    "lognormal": _lognormal_sizes,
    "dirichlet": _dirichlet_sizes,
}


def read_partition(text: str) -> tuple[str, int]:
    """Returns the name of a partition, and the N of `dirichlet:smallest=N` or `drawn:samples=N`.

    Raises:
      ValueError: there is no such partition, or N is not a whole number from 1 to 65536.
    """
    return _read("data.partition", text, _PARTITIONS, PARTITION)


def read_alpha(partition: str) -> float:
    """Returns alpha of `dirichlet:alpha=0.5`, its default for other partitions."""
    alphas = re.findall(r":alpha=([^:]*)", partition)
    return float(alphas[-1]) if alphas else 0.5


def read_sizes(text: str) -> tuple[str, float, int] | list[int]:
    """Returns ("lognormal", sigma, smallest), ("dirichlet", alpha, smallest), or numbers.

    Raises:
      ValueError: the text has another form, or a number is out of its range.
    """
    with suppress(ValueError):  # not numbers, or more digits than `int` reads
        numbers = [int(entry) for entry in text.split(",")]
        if all(1 <= number < 2**31 for number in numbers):
            return numbers
    return _read("data.sizes", text, _SIZES, SIZES)


def _read(key: str, text: str, table: Mapping[str, Callable[..., Any]], allowed: Range) -> Any:
    if text.partition(":")[0] not in table:
        raise ValueError(f"{key} is {brief(text)}; it must be {allowed.text}")
    make, options = read_choice(f"{key}={brief(text)}", text, table)
    return make(**options)


def _reads(read: Callable[[str], Any]) -> Callable[[str], bool]:
    def holds(text: str) -> bool:
        try:
            return bool(read(text))
        except ValueError:
            return False

    return holds


PARTITION = Range(
    "iid, dirichlet:alpha=A:smallest=N, drawn:samples=N or pooled", _reads(read_partition)
)
SIZES = Range(
    "whole numbers above 0, lognormal:sigma=S (0.001 to 100) or dirichlet:alpha=A (0.001 to 1e6)",
    lambda text: not text or _reads(read_sizes)(text),
)
