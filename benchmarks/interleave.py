"""Times programs in turn, in many short pieces, and prints their ratio, or why it is not measured.

A shared machine is fast in one minute and slow in the next. So every repetition runs each program
once, in a new random order, and only times of one repetition are compared. If the repetitions leave
a ratio uncertain, it is not printed.
"""

import math
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
FEWEST = math.ceil(1 - math.log2(1 - CONFIDENCE))  # the range of fewer values covers less often
WIDEST = 0.1

Run = Callable[[], object]


class Samples(NamedTuple):
    """Seconds of one program's R pieces, f64[R] each."""

    wall: np.ndarray  # elapsed time
    user: np.ndarray  # CPU time of all cores in this process's own code
    system: np.ndarray  # CPU time of all cores in the system on behalf of this process

    def per(self, count: float) -> "Samples":
        """Returns the times of one of `count` equal parts of a piece."""
        return Samples(*(seconds / count for seconds in self))


class Ratio(NamedTuple):
    """How many times as long one program takes as another."""

    of_minima: float  # of the shortest pieces
    median: float  # of the ratios by repetition
    low: float  # lower end of that median's interval at 95 %
    high: float  # its upper end
    repeats: int  # number of ratios

    @property
    def width(self) -> float:
        """Returns the interval's width over the median; NaN where there is no interval."""
        return (self.high - self.low) / self.median

    @property
    def measured(self) -> bool:
        """Returns whether the interval is narrow enough to show the ratio."""
        return self.width <= WIDEST

    @property
    def refusal(self) -> str:
        """Returns why the ratio is not shown, and what to do; "" if it is shown."""
        if self.measured:
            return ""
        if self.repeats < FEWEST:
            return f"{self.repeats} repetitions give no interval: --repeats {FEWEST} or more"
        enough = math.ceil(self.repeats * (self.width / WIDEST) ** 2)
        return (
            f"the interval is {self.width:.0%} wide, more than {WIDEST:.0%}: "
            f"a quieter machine, or about --repeats {enough}"
        )

    def __str__(self) -> str:
        """Returns the ratio, or that it is not measured."""
        if not self.measured:
            return "not measured"
        interval = f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"
        return f"{interval}, of minima {self.of_minima:.3f}"

    def figures(self) -> dict[str, Any]:
        """Returns the numbers for JSON, or why they are missing."""
        return self._asdict() if self.measured else {"not_measured": self.refusal}


def spend(run: Run) -> tuple[float, float, float]:
    """Runs once; returns wall, user and system seconds.

    Child processes are not in user and system: the system counts them only once they have ended.
    """
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    run()
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


def interleave(
    runs: Mapping[str, Run],
    repeats: int,
    *,
    before: Callable[[str], object] = lambda name: None,
    rest: float = 0.0,
    seed: int = 0,
) -> dict[str, Samples]:
    """Times all programs, each once a repetition, after one run of each that does not count.

    Args:
      runs: name -> a function that returns when its work is done.
      repeats: R, at least 1.
      before: called with the name before each run, outside the time.
      rest: seconds of sleep before each run, in which the last one's threads stop spinning.
      seed: of the orders.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    order, shuffle = list(runs), random.Random(seed).shuffle
    spent: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for number in range(repeats + 1):
        say(f"  {len(order)} programs in turn, repetition {number} of {repeats}")
        shuffle(order)  # each program finds the caches as the last one left them
        for name in order:
            before(name)
            time.sleep(rest)
            spent[name].append(spend(runs[name]))
    return {name: Samples(*np.array(values[1:]).T) for name, values in spent.items()}


def say(text: str) -> None:
    """Writes a benchmark's progress to standard error at once."""
    print(text, file=sys.stderr, flush=True)


def paired_ratio(samples: Samples, to: Samples) -> Ratio:
    """Returns the ratio of wall times, paired by repetition.

    The median's interval is between two of the sorted ratios (order statistics), so it assumes
    no distribution; it holds for this process, and another process may differ.
    """
    # paired by repetition, because a slow minute of the machine slows both programs down
    ratios = samples.wall / to.wall
    interval = stats.quantile_test(ratios).confidence_interval(CONFIDENCE)
    numbers = (samples.wall.min() / to.wall.min(), np.median(ratios), interval.low, interval.high)
    return Ratio(*map(float, numbers), repeats=len(ratios))


def fastest(samples: Mapping[str, Samples], names: Iterable[str]) -> str:
    """Returns the one of `names` with the least median wall time."""
    return min(names, key=lambda name: np.median(samples[name].wall))


def show(samples: Mapping[str, Samples], base: str) -> None:
    """Prints times of all programs, and ratios of wall time to that of `base`."""
    head = ("least", "median", "user", "system")
    width = max(map(len, samples)) + 2
    print(f"{'milliseconds':<{width}}" + "".join(f"{name:>11}" for name in head) + f"   / {base}")
    for name, own in samples.items():
        columns = (own.wall.min(), *map(np.median, own))
        times = "".join(f"{1e3 * value:11.2f}" for value in columns)
        ratio = "1" if name == base else paired_ratio(own, samples[base])
        print(f"{name:<{width}}{times}   {ratio}")


def conclude(claim: str, ratio: Ratio) -> None:
    """Prints a ratio, or why it is missing and what to do."""
    print(f"=> {claim}: {ratio}" + (f" ({ratio.refusal})" if ratio.refusal else ""))


def figures(samples: Mapping[str, Samples], base: str) -> dict[str, Any]:
    """Returns what `show` prints, for JSON: by name, seconds and the ratio to `base`."""
    return {
        name: {
            "least": float(own.wall.min()),
            "median": {kind: float(np.median(values)) for kind, values in own._asdict().items()},
            f"ratio to {base}": paired_ratio(own, samples[base]).figures(),
        }
        for name, own in samples.items()
    }
