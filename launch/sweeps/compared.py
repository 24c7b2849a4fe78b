"""From finished runs of `all_methods.py` to its tables: means, intervals, and what helps."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from entries import BASELINE, TSMOBN, Entry
from plan import UNSEEN
from report import accuracy
from scipy import stats

Summaries = Sequence[Mapping[str, Any]]  # of the targets of one seed
LEVEL = 0.95


class Measured(NamedTuple):
    """What is known of a row.

    Attributes:
      rate: the learning rate that validation chose.
      internal, unseen, tsmobn: percent by seed, means over clients or over targets; NaN: unknown.
      seconds: median of a round.
      traffic: bytes down and up, a client and round.
    """

    rate: float
    internal: Mapping[int, float]
    unseen: Mapping[int, float]
    tsmobn: Mapping[int, float]
    seconds: float
    traffic: Mapping[str, int]


def measure(entry: Entry, rate: float, by_seed: Mapping[int, Summaries]) -> Measured:
    """What the finished runs of a row say.

    Args:
      entry: the row.
      rate: of these runs.
      by_seed: seed -> the summaries of all its targets; seeds that lack one are left out.
    """

    def unseen(adaptation: str) -> dict[int, float]:
        found = {
            seed: [accuracy(summary, UNSEEN, adaptation) for summary in summaries]
            for seed, summaries in by_seed.items()
        }
        return {seed: float(np.mean(v)) for seed, v in found.items() if None not in v}

    internal = {
        seed: float(np.mean([summary["accuracy"]["internal"]["mean"] for summary in summaries]))
        for seed, summaries in by_seed.items()
    }
    known = [summary for summaries in by_seed.values() for summary in summaries]
    return Measured(
        rate,
        internal,
        unseen(entry.adaptation),
        unseen(TSMOBN),
        median(summary["seconds_per_round"] for summary in known),
        known[0]["traffic"],
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval by Student's t; NaN for the half of a single value."""
    values = np.asarray(values, float)
    mean = float(values.mean()) if len(values) else float("nan")
    if len(values) < 2:
        return mean, float("nan")
    error = values.std(ddof=1) / np.sqrt(len(values))
    return mean, float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * error)


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float]:
    """Mean and half interval of the differences by seed, of the seeds that both have."""
    return interval([one[seed] - other[seed] for seed in one if seed in other])


def table(measured: Mapping[str, Measured], failed: Mapping[str, str]) -> str:
    """A table in Markdown, best first by what is unseen; below it what does not help."""
    heads = ("", "rate", "seeds", "internal", "unseen", "against FedAvg", "unseen, TsmoBN",
             "seconds a round", "kB down, up")  # fmt: skip
    order = sorted(measured, key=lambda label: -interval([*measured[label].unseen.values()])[0])
    lines = [heads, ("---", *("---:",) * (len(heads) - 1))]
    lines += [_row(label, measured) for label in order]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    missing = [f"{label}: {why}" for label, why in failed.items()]
    return "\n\n".join([text, *verdicts(measured), *missing])


def _row(label: str, measured: Mapping[str, Measured]) -> tuple[str, ...]:
    row = measured[label]
    against = ""
    if label != BASELINE and BASELINE in measured:
        against = _number(difference(row.unseen, measured[BASELINE].unseen), sign="+")
    return (
        label,
        f"{row.rate:g}",
        str(len(row.unseen)),
        *(_number(interval([*values.values()])) for values in (row.internal, row.unseen)),
        against,
        _number(interval([*row.tsmobn.values()])),
        f"{row.seconds:.2f}",
        f"{row.traffic['down'] / 1000:.0f}, {row.traffic['up'] / 1000:.0f}",
    )


def verdicts(measured: Mapping[str, Measured]) -> Iterable[str]:
    """Sentences on which rows are above FedAvg on what is unseen, below it, or neither."""
    if BASELINE not in measured:
        return
    kinds: dict[str, list[str]] = {"above": [], "below": [], "neither": []}
    for label, row in measured.items():
        mean, half = difference(row.unseen, measured[BASELINE].unseen)
        if label != BASELINE and np.isfinite(half):
            kind = "above" if mean > half else "below" if mean < -half else "neither"
            kinds[kind].append(label)
    what = "interval of the difference by seed"
    yield f"Above {BASELINE} ({what} above 0): {', '.join(kinds['above']) or 'none'}."
    yield f"Below it ({what} below 0): {', '.join(kinds['below']) or 'none'}."
    yield f"No help shown (0 within the {what}): {', '.join(kinds['neither']) or 'none'}."


def _number(value: tuple[float, float], sign: str = "") -> str:
    """`71.0 ± 1.4`; a dash for what is not known."""
    mean, half = value
    if not np.isfinite(mean):
        return "-"
    return f"{mean:{sign}.1f} ± {half:.1f}" if np.isfinite(half) else f"{mean:{sign}.1f}"


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run; None where it has not finished."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None
