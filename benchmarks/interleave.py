"""Times programs in turn, in many short pieces, and gives their ratios with intervals.

A shared machine is fast in one minute and slow in the next. So every repetition runs each program
once, in a new random order, and a ratio's interval comes from whole repetitions drawn again. Every
ratio is shown, and beside the times stands how noisy the machine was.
"""

import random
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95
DRAWS = 10_000  # of the repetitions, for an interval
QUIET = 0.05  # the largest quartile range over the median on a quiet machine
SLACK = 0.15  # by which a rival may be slower than the fastest one and still go on

Run = Callable[[], object]


class Spent(NamedTuple):
    """Seconds of one piece, as in `Samples`."""

    wall: float
    user: float
    system: float


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

    of_medians: float
    low: float | None  # lower end of its interval at 95 %; None where there is one repetition
    high: float | None  # its upper end
    of_least: float  # of the shortest pieces
    repeats: int  # number of repetitions

    def __str__(self) -> str:
        """Returns the ratio, its interval, and the ratio of the least pieces beside it."""
        interval = f"[{self.low:.3f}, {self.high:.3f}]" if self.low else "(one piece: no interval)"
        return f"{self.of_medians:.3f} {interval}, of least pieces {self.of_least:.3f}"


def spend(run: Run) -> Spent:
    """Runs once; returns its seconds, or those that the run itself returns.

    Child processes are not in user and system: the system counts them only once they have ended.
    """
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    result = run()
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return result if isinstance(result, Spent) else Spent(wall, *cpu)


def interleave(
    runs: Mapping[str, Run],
    repeats: int,
    *,
    seconds: float = 0.0,
    rivals: Collection[Collection[str]] = (),
    before: Callable[[str], object] = lambda name: None,
    rest: float = 0.0,
    seed: int = 0,
) -> dict[str, Samples]:
    """Times all programs, each once a repetition, after one run of each that does not count.

    Args:
      runs: name -> a function that returns when its work is done; one that runs in another
        process returns what it `Spent` there.
      repeats: least number of repetitions, at least 1.
      seconds: time in which more repetitions are made.
      rivals: groups of programs of which only the fastest counts. After the first repetition one
        stops when its least piece is 15 % longer than the group's.
      before: called with the name before each run, outside the time.
      rest: seconds of sleep before each run, in which the last one's threads stop spinning.
      seed: of the orders.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    order, shuffle = list(runs), random.Random(seed).shuffle
    pieces: dict[str, list[Spent]] = {name: [] for name in runs}
    repetition, start, taken = 0, time.perf_counter(), 0.0
    while repetition <= repeats or time.perf_counter() - start + taken < seconds:
        say(f"  {len(order)} programs in turn, repetition {repetition} (0 is the warm-up)")
        begin = time.perf_counter()
        shuffle(order)  # each program finds the caches as the last one left them
        for name in order:
            before(name)
            time.sleep(rest)
            pieces[name].append(spend(runs[name]))
        least = {name: min(pieces[name]).wall for name in order}
        for group in rivals if repetition else ():  # the warm-up has costs of a first time
            limit = (1 + SLACK) * min(least[name] for name in order if name in group)
            order = [name for name in order if name not in group or least[name] <= limit]
        repetition, taken = repetition + 1, time.perf_counter() - begin
    return {name: Samples(*np.array(values[1:]).T) for name, values in pieces.items()}


def say(text: str) -> None:
    """Writes a benchmark's progress to standard error at once."""
    print(text, file=sys.stderr, flush=True)


def paired_ratio(samples: Samples, to: Samples) -> Ratio:
    """Returns the ratio of median wall times over the repetitions that both programs made.

    The interval is between percentiles of the same ratio in repetitions drawn with replacement,
    jointly for both programs, because a slow minute of the machine slows both down. It holds for
    this process, and another process may differ.
    """
    count = min(len(samples.wall), len(to.wall))
    wall, base = samples.wall[:count], to.wall[:count]
    low = high = None
    if count > 1:
        rows = np.random.default_rng(0).integers(count, size=(DRAWS, count))
        ratios = np.median(wall[rows], 1) / np.median(base[rows], 1)
        tails = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
        low, high = map(float, np.quantile(ratios, tails))
    ratio, of_least = np.median(wall) / np.median(base), wall.min() / base.min()
    return Ratio(float(ratio), low, high, float(of_least), count)


def fastest(samples: Mapping[str, Samples], names: Iterable[str]) -> str:
    """Returns the one with the least median wall time, of those with most repetitions."""
    names = list(names)
    repeats = max(len(samples[name].wall) for name in names)
    finalists = [name for name in names if len(samples[name].wall) == repeats]
    return min(finalists, key=lambda name: np.median(samples[name].wall))


def noise(samples: Mapping[str, Samples]) -> dict[str, Any]:
    """Returns how much the pieces of a program vary (medians over programs), and a sentence."""
    walls = [pieces.wall for pieces in samples.values() if len(pieces.wall) > 2]
    if not walls:
        return {"sentence": "noise: too few pieces to say"}
    quartiles = [np.subtract(*np.quantile(wall, (0.75, 0.25))) / np.median(wall) for wall in walls]
    spread = float(np.median(quartiles))
    excess = float(np.median([np.median(wall) / wall.min() for wall in walls]))
    state = "quiet" if spread <= QUIET else "in use by others"
    sentence = (
        f"noise: the middle half of a program's pieces spans {spread:.1%} of their median, which "
        f"is {excess:.2f} times the least piece; the machine was {state}"
    )
    return {"quartile_range": spread, "median_over_least": excess, "sentence": sentence}


def show(samples: Mapping[str, Samples], base: str) -> None:
    """Prints times of all programs, ratios of wall time to that of `base`, and the noise."""
    head = ("pieces", "least", "median", "user", "system")
    width = max(map(len, samples)) + 2
    print(f"{'milliseconds':<{width}}" + "".join(f"{name:>11}" for name in head) + f"   / {base}")
    for name, pieces in samples.items():
        columns = (pieces.wall.min(), *map(np.median, pieces))
        times = "".join(f"{1e3 * value:11.2f}" for value in columns)
        ratio = "1" if name == base else paired_ratio(pieces, samples[base])
        print(f"{name:<{width}}{len(pieces.wall):>11}{times}   {ratio}")
    print(noise(samples)["sentence"])


def conclude(claim: str, ratio: Ratio) -> None:
    """Prints a ratio."""
    print(f"=> {claim}: {ratio}")


def figures(samples: Mapping[str, Samples], base: str) -> dict[str, Any]:
    """Returns what `show` prints, for JSON: by name, seconds and the ratio to `base`."""
    return {
        name: {
            "least": float(pieces.wall.min()),
            "median": {kind: float(np.median(values)) for kind, values in pieces._asdict().items()},
            f"ratio to {base}": paired_ratio(pieces, samples[base])._asdict(),
        }
        for name, pieces in samples.items()
    }
