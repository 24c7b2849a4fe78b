"""Shares in whole numbers: what makes a split the same on any machine.

Counts are worked out in integers, so that nothing depends on how a machine rounds.
"""

import numpy as np

# Last entries of the path (0, position, USE) of a generator, see `seeds.generator`
DIVIDING, ORDERING, TRUNCATING, SIZING = 1, 2, 3, 4


def share_size(count: int, share: float) -> int:
    """floor(share * count), where the product of decimal numbers is meant: 0.29 * 100 is 29."""
    return int(share * count + 1e-9)  # 0.29 * 100 is 28.999... in floating point


def fraction_size(count: int, fraction: float) -> int:
    """floor(fraction * count), at least 1: FedBN's 10 % of 7438 samples are 743.

    Raises:
      ValueError: fraction is outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"data.fraction is {fraction}; it must be above 0 and at most 1")
    return max(1, share_size(count, fraction))


def apportion(counts: np.ndarray, total: int) -> np.ndarray:
    """Shares of `total` proportional to `counts`, by largest remainder (Hamilton's method).

    Args:
      counts: i64[C], what each class has, or any weights; counts * total below 2**63.
      total: whole number to be shared out, at least 0.

    Returns:
      i64[C], summing to total, within one of total * count / sum; if total <= sum(counts), each at
      most its count.
    """
    counts = np.asarray(counts, np.int64)
    whole = max(int(counts.sum()), 1)
    shares = counts * total // whole
    left = int(total - shares.sum())
    largest = np.argsort(-(counts * total % whole), kind="stable")[:left]
    shares[largest] += 1
    return shares


def at_least_one(counts: np.ndarray, total: int) -> np.ndarray:
    """As `apportion`, but one sample of every class that has any, where the total allows it."""
    present = (counts > 0).astype(np.int64)
    if total < present.sum():
        return apportion(counts, total)
    return present + apportion(counts - present, total - int(present.sum()))


def quantize(shares: np.ndarray) -> np.ndarray:
    """Real shares f64[n] in [0, 1] as whole numbers of 2**-32, for `apportion`.

    The last bits of a draw from a gamma or normal distribution may differ between machines, since
    it goes through log and exp of the machine's own library. Rounded to whole samples, they change
    a count only where a share lies within about 1e-16 of a border: of a million samples, in one of
    10**10 draws.
    """
    return np.rint(np.asarray(shares, np.float64) * 2**32).astype(np.int64)
