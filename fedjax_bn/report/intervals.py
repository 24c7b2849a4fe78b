"""95 % intervals of scores: over seeds by Student's t, within a seed over the test samples.

A mean over clients is a mean of shares, each with the Wilson interval of its own samples. These are
joined as Zou and Donner do ("MOVER", Stat. Med. 27, 2008): the distances of the limits from their
shares are added in squares, each with its weight.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

LEVEL = 0.95
_TWO_SIDED = (1 + LEVEL) / 2
Part = tuple[float, int]  # (share in percent, samples)


class Interval(NamedTuple):
    """An estimate and its limits; NaN where nothing says how sure it is."""

    mean: float
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """Whether there are limits."""
        return not math.isnan(self.low)

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies above or below 0, and 0 where it holds 0 or is none."""
        return (self.low > 0) - (self.high < 0)


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean of at least one value, with Student's interval where there are two or more."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Interval(mean)
    reach = stdtrit(count - 1, _TWO_SIDED) * np.std(values, ddof=1) / math.sqrt(count)
    return Interval(mean, mean - float(reach), mean + float(reach))


def welch(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Mean of `one` minus mean of `other`, at least two each, with unequal variances."""
    parts = [np.var(values, ddof=1) / len(values) for values in (one, other)]
    difference, variance = float(np.mean(one) - np.mean(other)), sum(parts)
    if variance == 0:
        return Interval(difference, difference, difference)
    freedom = variance**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True)
    )
    reach = float(stdtrit(freedom, _TWO_SIDED) * math.sqrt(variance))
    return Interval(difference, difference - reach, difference + reach)


def wilson(percent: float, samples: int) -> Interval:
    """A share of samples in percent with the interval of Wilson (J. Am. Stat. Assoc. 22, 1927).

    Args:
      percent: 0 to 100.
      samples: at least 1.
    """
    z, p = float(ndtri(_TWO_SIDED)), min(max(percent / 100, 0), 1)
    middle = (p + z * z / (2 * samples)) / (1 + z * z / samples)
    reach = math.sqrt(p * (1 - p) / samples + (z / (2 * samples)) ** 2) * z / (1 + z * z / samples)
    return Interval(percent, 100 * max(0, middle - reach), 100 * min(1, middle + reach))


def mean_of_parts(parts: Sequence[Part]) -> Interval:
    """The plain mean of shares of independent samples; without limits where a count is unknown."""
    mean = float(np.mean([percent for percent, _ in parts]))
    if not all(samples > 0 for _, samples in parts):
        return Interval(mean)
    each = [wilson(*part) for part in parts]
    down = math.hypot(*(one.mean - one.low for one in each)) / len(parts)
    up = math.hypot(*(one.high - one.mean for one in each)) / len(parts)
    return Interval(mean, mean - down, mean + up)


def difference_of_parts(one: Sequence[Part], other: Sequence[Part]) -> Interval:
    """Mean of `one` minus mean of `other`, as if they were answers to independent samples.

    Two models that answer to the same samples differ less by chance, so that the interval is on the
    safe side; `paired_difference` needs to know who was right on which.
    """
    first, second = mean_of_parts(one), mean_of_parts(other)
    difference = first.mean - second.mean
    down = math.hypot(first.mean - first.low, second.high - second.mean)
    up = math.hypot(first.high - first.mean, second.mean - second.low)
    return Interval(difference, difference - down, difference + up)


def paired_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Interval:
    """Difference of the mean shares of right answers to the same samples, in percent.

    Args:
      one: bool[n] a client, whether the first model is right on its samples.
      other: the same of the second model.
    """
    differences = [
        100 * (np.asarray(a, float) - np.asarray(b, float)) for a, b in zip(one, other, strict=True)
    ]
    mean = float(np.mean([values.mean() for values in differences]))
    variance = sum(values.var() / len(values) for values in differences) / len(differences) ** 2
    reach = float(ndtri(_TWO_SIDED)) * math.sqrt(variance)
    return Interval(mean, mean - reach, mean + reach)
