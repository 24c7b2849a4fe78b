"""The texts of `data.partition` and `data.sizes`, read here alone."""

from fedjax_bn.arguments.ranges import SAMPLES, Range
from fedjax_bn.arguments.text import brief

SMALLEST = 10  # samples of the smallest client that is drawn, where there are enough


def with_smallest(text: str) -> tuple[str, int]:
    """Returns what comes before `:smallest=N`, and N, by default 10.

    Raises:
      ValueError: N is not a whole number from 1 to 65536.
    """
    before, given, number = text.partition(":smallest=")
    return (before, _samples(text, "smallest", number)) if given else (text, SMALLEST)


def drawn_samples(text: str) -> int:
    """Returns N of the partition `drawn:N`; 0 of another partition.

    Raises:
      ValueError: N is not a whole number from 1 to 65536.
    """
    name, _, number = text.partition(":")
    return _samples(text, "N of drawn:N", number) if name == "drawn" else 0


def _samples(text: str, what: str, number: str) -> int:
    """A number of samples within a text."""
    # Five digits at most: Python refuses to read numbers of thousands of digits.
    plain = number.isascii() and number.isdecimal() and len(number) < 6
    if not (plain and SAMPLES.holds(int(number))):
        raise ValueError(f"{brief(text)}: {what} must be {SAMPLES.text}")
    return int(number)


def _is_partition(text: str) -> bool:
    try:
        name, _ = with_smallest(text)
        return name == "dirichlet" or text in ("iid", "pooled") or bool(drawn_samples(text))
    except ValueError:
        return False


def _are_sizes(text: str) -> bool:
    try:
        kind, _, number = with_smallest(text)[0].partition(":")
        if kind in ("lognormal", "dirichlet"):
            return 0.001 <= float(number) <= (100 if kind == "lognormal" else 1e6)
        return not text or all(1 <= int(entry) < 2**31 for entry in text.split(","))
    except ValueError:  # no number, or one of thousands of digits
        return False


PARTITION = Range("iid, dirichlet, dirichlet:smallest=N, drawn:N or pooled", _is_partition)
SIZES = Range(
    "whole numbers above 0, lognormal:SIGMA (0.001 to 100) or dirichlet:ALPHA (0.001 to 1e6)",
    _are_sizes,
)
