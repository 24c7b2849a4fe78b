"""95 % intervals of scores: Student's over seeds, and over the test samples within one seed.

A mean over clients is a mean of shares, each with the Wilson interval of its own samples (J. Am.
Stat. Assoc. 22, 1927). Zou and Donner combine them ("MOVER", Stat. Med. 27, 2008): the squared
distances of the limits from their shares are added, each with its weight.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy  # imports scipy.stats at its first use, which takes a second
from scipy.special import ndtri

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


def _around(mean: float, down: float, up: float) -> Interval:
    return Interval(float(mean), float(mean - down), float(mean + up))


def over_seeds(values: Sequence[float]) -> Interval:
    """Returns the mean of at least one value, with Student's interval if there are two or more."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean)
    # t.interval has no limits for equal values
    reach = scipy.stats.t.ppf(_TWO_SIDED, len(values) - 1) * scipy.stats.sem(values)
    return _around(mean, reach, reach)


def welch(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Returns the mean of `one` minus that of `other`, at least two each, of unequal variances."""
    gap = float(np.mean(one) - np.mean(other))
    if np.ptp(one) == np.ptp(other) == 0:  # for which ttest_ind divides by 0
        return Interval(gap, gap, gap)
    return Interval(gap, *scipy.stats.ttest_ind(one, other, equal_var=False).confidence_interval())


def mean_of_parts(parts: Sequence[Part]) -> Interval:
    """Returns the mean of shares of independent samples, at least one sample each."""
    percent, samples = np.array(parts, float).T
    # binomtest(...).proportion_ci takes whole counts alone, and a millisecond for each client
    share, of_z = np.clip(percent / 100, 0, 1), _Z**2 / samples
    middle = (share + of_z / 2) / (1 + of_z)
    reach = np.sqrt(share * (1 - share) * of_z + of_z**2 / 4) / (1 + of_z)
    down = percent - 100 * np.maximum(middle - reach, 0)
    up = 100 * np.minimum(middle + reach, 1) - percent
    return _around(percent.mean(), *(math.hypot(*each) / len(parts) for each in (down, up)))


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
    reach = _Z * math.sqrt(sum(gap.var() / len(gap) for gap in gaps)) / len(gaps)
    return _around(np.mean([gap.mean() for gap in gaps]), reach, reach)
