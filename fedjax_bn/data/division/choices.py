"""Values of the keys that say how samples are divided; the configuration checks them at once."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated

from fedjax_bn.arguments.choices import read_choice
from fedjax_bn.arguments.ranges import Range, Samples, between
from fedjax_bn.arguments.text import brief

# Whose division of `data.name=prostate`; "" divides by patient.
PROTOCOLS = ("", "harmofl", "fl_medsegbench")
_Alpha = Annotated[float, between(0.001, 1_000_000)]


def _dirichlet(alpha: _Alpha = 0.5, smallest: Samples = 10) -> tuple[str, float, int]:
    return "dirichlet", alpha, smallest


def _drawn(samples: Samples) -> tuple[str, float, int]:
    return "drawn", 0.0, samples


# Name -> function of a partition's options, which returns the name, alpha and N.
_PARTITIONS: Mapping[str, Callable[..., tuple[str, float, int]]] = {
    "iid": lambda: ("iid", 0.0, 0),
    "pooled": lambda: ("pooled", 0.0, 0),
    "dirichlet": _dirichlet,
    "drawn": _drawn,
}


def read_partition(choice: str) -> tuple[str, float, int]:
    """Returns the name, alpha and N of `dirichlet:alpha=A:smallest=N`; may raise ValueError."""
    make, options = read_choice(f"data.partition={brief(choice)}", choice, _PARTITIONS)
    return make(**options)


def _is_partition(choice: str) -> bool:
    with suppress(ValueError):
        return bool(read_partition(choice))
    return False


PARTITION = Range("iid, dirichlet:alpha=A:smallest=N, drawn:samples=N or pooled", _is_partition)
_SIZES = re.compile(r"|[1-9]\d{0,8}(,[1-9]\d{0,8})*")
SIZES = Range("whole numbers above 0", lambda sizes: bool(_SIZES.fullmatch(sizes)))
