"""Computes 95 % intervals of scores, over seeds (Student's t) or over the test samples of one seed.

A mean over clients is a mean of shares, each with the Wilson interval of its own samples (J. Am.
Stat. Assoc. 22, 1927). The method of Zou and Donner ("MOVER", Stat. Med. 27, 2008) combines them:
it adds the squared distances of the limits from their shares, each distance times its weight 1/K.
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
    """An estimate and its limits, which are NaN if they are unknown."""

    mean: float
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """Whether there are limits."""
        return not math.isnan(self.low)

    @property
    def sign(self) -> int:
        """1 or -1 if the interval is above or below 0; 0 if it contains 0 or has no limits."""
        return (self.low > 0) - (self.high < 0)


def _around(mean: float, down: float, up: float) -> Interval:
    return Interval(float(mean), float(mean - down), float(mean + up))


def over_seeds(values: Sequence[float]) -> Interval:
    """Returns the mean of at least one value, with Student's interval if there are two or more."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean)
    # `t.interval` gives NaN for equal values, whose standard error is 0
    reach = scipy.stats.t.ppf(_TWO_SIDED, len(values) - 1) * scipy.stats.sem(values)
    return _around(mean, reach, reach)


def welch(scores: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Returns mean(scores) - mean(baseline), with Welch's interval if both have two values."""
    gap = float(np.mean(scores) - np.mean(baseline))
    if min(len(scores), len(baseline)) < 2:
        return Interval(gap)
    if np.ptp(scores) == np.ptp(baseline) == 0:  # `ttest_ind` would divide by 0
        return Interval(gap, gap, gap)
    test = scipy.stats.ttest_ind(scores, baseline, equal_var=False)
    return Interval(gap, *test.confidence_interval())


def mean_of_parts(parts: Sequence[Part]) -> Interval:
    """Returns the mean of shares with its interval; each share has at least one own sample."""
    percent, samples = np.array(parts, float).T
    # `binomtest(...).proportion_ci` takes whole counts only, and a millisecond for each client
    share, of_z = np.clip(percent / 100, 0, 1), _Z**2 / samples
    middle = (share + of_z / 2) / (1 + of_z)
    reach = np.sqrt(share * (1 - share) * of_z + of_z**2 / 4) / (1 + of_z)
    down = percent - 100 * np.maximum(middle - reach, 0)
    up = 100 * np.minimum(middle + reach, 1) - percent
    return _around(percent.mean(), math.hypot(*down) / len(parts), math.hypot(*up) / len(parts))


def difference_of_parts(parts: Sequence[Part], baseline: Sequence[Part]) -> Interval:
    """Returns mean(parts) - mean(baseline) with its interval, as if samples were independent.

    Chance separates two models less on the same samples, so this interval is rather too wide than
    too narrow. `paired_difference` is narrower, but needs the right answers by sample.
    """
    mean, mean_of_baseline = mean_of_parts(parts), mean_of_parts(baseline)
    down = math.hypot(mean.mean - mean.low, mean_of_baseline.high - mean_of_baseline.mean)
    up = math.hypot(mean.high - mean.mean, mean_of_baseline.mean - mean_of_baseline.low)
    return _around(mean.mean - mean_of_baseline.mean, down, up)


def paired_difference(right: Sequence[np.ndarray], baseline: Sequence[np.ndarray]) -> Interval:
    """Returns the difference of two models' mean accuracies on the same samples, in percent.

    Both have bool[n] for each client: whether the model is right on each of its samples.
    """
    gaps = [100 * (a.astype(float) - b) for a, b in zip(right, baseline, strict=True)]
    reach = _Z * math.sqrt(sum(gap.var() / len(gap) for gap in gaps)) / len(gaps)
    return _around(np.mean([gap.mean() for gap in gaps]), reach, reach)
