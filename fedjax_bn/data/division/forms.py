"""Reads `data.partition` and `data.sizes`, such as `dirichlet:smallest=5` and `743,7943`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_bn.arguments.choices import read_choice
from fedjax_bn.arguments.ranges import Alpha, Range, Samples
from fedjax_bn.arguments.text import brief

# Whose division of `data.name=prostate`; "" divides by patient.
PROSTATE = ("", "harmofl", "fl_medsegbench")
SMALLEST = 10  # minimum samples of a client of "dirichlet", if there are enough


def _dirichlet(alpha: Alpha = 0.5, smallest: Samples = SMALLEST) -> tuple[str, int]:
    del alpha  # see `read_alpha`
    return "dirichlet", smallest


def _drawn(samples: Samples) -> tuple[str, int]:
    return "drawn", samples


_PARTITIONS: Mapping[str, Callable[..., tuple[str, int]]] = {
    "iid": lambda: ("iid", 0),
    "pooled": lambda: ("pooled", 0),
    "dirichlet": _dirichlet,
    "drawn": _drawn,
}


def read_partition(choice: str) -> tuple[str, int]:
    """Returns the name of a partition, and the N of `dirichlet:smallest=N` or `drawn:samples=N`.

    Raises:
      ValueError: there is no such partition, or N is not a whole number from 1 to 65536.
    """
    if choice.partition(":")[0] not in _PARTITIONS:
        raise ValueError(f"data.partition is {brief(choice)}; it must be {PARTITION.text}")
    make, options = read_choice(f"data.partition={brief(choice)}", choice, _PARTITIONS)
    return make(**options)


def read_alpha(partition: str) -> float:
    """Returns alpha of `dirichlet:alpha=0.5`, its default for other partitions."""
    alphas = re.findall(r":alpha=([^:]*)", partition)
    return float(alphas[-1]) if alphas else 0.5


def read_sizes(listed: str) -> list[int]:
    """Returns the numbers of `data.sizes`; ValueError if it has others than whole ones above 0."""
    numbers = listed.split(",")
    if not all(number.strip().isdecimal() and 0 < int(number) < 2**31 for number in numbers):
        raise ValueError(f"data.sizes is {brief(listed)}; it must be {SIZES.text}")
    return list(map(int, numbers))


def _reads(read: Callable[[str], Any]) -> Callable[[str], bool]:
    def holds(value: str) -> bool:
        try:
            return bool(read(value))
        except ValueError:
            return False

    return holds


PARTITION = Range(
    "iid, dirichlet:alpha=A:smallest=N, drawn:samples=N or pooled", _reads(read_partition)
)
SIZES = Range("whole numbers above 0", lambda sizes: not sizes or _reads(read_sizes)(sizes))
