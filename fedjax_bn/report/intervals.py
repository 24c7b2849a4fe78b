"""95 % intervals of scores: over seeds by Student's t, within a seed over the test samples.

A mean over clients is a mean of shares, each with the Wilson interval of its own samples. They are
combined as Zou and Donner do ("MOVER", Stat. Med. 27, 2008): the squared distances of the limits
from their shares are added, each with its weight.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit  # scipy.stats takes a second to import

_TWO_SIDED = 0.975
_Z = float(ndtri(_TWO_SIDED))
Part = tuple[float, int]  # (share in percent, samples)


class Interval(NamedTuple):
    """An estimate and its limits; NaN if nothing shows how certain it is."""

    mean: float
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """Whether there are limits."""
        return not math.isnan(self.low)

    @property
    def sign(self) -> int:
        """1 or -1 if the interval is above or below 0; 0 if it holds 0 or has no limits."""
        return (self.low > 0) - (self.high < 0)


def _around(mean: float, down: float, up: float | None = None) -> Interval:
    return Interval(float(mean), float(mean - down), float(mean + (down if up is None else up)))


def over_seeds(values: Sequence[float]) -> Interval:
    """Returns the mean of at least one value, with Student's interval if there are two or more."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Interval(mean)
    return _around(mean, stdtrit(count - 1, _TWO_SIDED) * np.std(values, ddof=1) / count**0.5)


def welch(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Returns the mean of `one` minus that of `other`, at least two each, of unequal variances."""
    parts = [np.var(values, ddof=1) / len(values) for values in (one, other)]
    variance = sum(parts)
    freedom = variance**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True)
    ) if variance else 1  # fmt: skip
    reach = stdtrit(freedom, _TWO_SIDED) * math.sqrt(variance)
    return _around(np.mean(one) - np.mean(other), reach)


def wilson(percent: float, samples: int) -> Interval:
    """Returns a share of `samples` >= 1 with Wilson's interval (J. Am. Stat. Assoc. 22, 1927)."""
    p, of_z = min(max(percent / 100, 0), 1), _Z**2 / samples
    middle = (p + of_z / 2) / (1 + of_z)
    reach = math.sqrt(p * (1 - p) * of_z + of_z**2 / 4) / (1 + of_z)
    return Interval(percent, 100 * max(0, middle - reach), 100 * min(1, middle + reach))


def mean_of_parts(parts: Sequence[Part]) -> Interval:
    """Returns the mean of shares of independent samples; without limits if a count is unknown."""
    mean = float(np.mean([percent for percent, _ in parts]))
    if not all(samples > 0 for _, samples in parts):
        return Interval(mean)
    each = [wilson(*part) for part in parts]
    down = math.hypot(*(one.mean - one.low for one in each)) / len(parts)
    up = math.hypot(*(one.high - one.mean for one in each)) / len(parts)
    return _around(mean, down, up)


def difference_of_parts(one: Sequence[Part], other: Sequence[Part]) -> Interval:
    """Returns the mean of `one` minus that of `other`, as if their samples were independent.

    Two models that answer to the same samples differ less by chance, so the interval is too wide
    rather than too narrow. `paired_difference` needs who was right on which sample.
    """
    first, second = mean_of_parts(one), mean_of_parts(other)
    down = math.hypot(first.mean - first.low, second.high - second.mean)
    up = math.hypot(first.high - first.mean, second.mean - second.low)
    return _around(first.mean - second.mean, down, up)


def paired_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Interval:
    """Returns the difference of the mean shares of right answers to the same samples, in percent.

    Args:
      one: bool[n] for each client, whether the first model is right on its samples.
      other: the same of the second model.
    """
    gaps = [100 * (a.astype(float) - b) for a, b in zip(one, other, strict=True)]
    variance = sum(gap.var() / len(gap) for gap in gaps) / len(gaps) ** 2
    return _around(np.mean([gap.mean() for gap in gaps]), _Z * math.sqrt(variance))
