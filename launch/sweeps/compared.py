"""Makes the tables of `all_methods.py` from finished runs: means, intervals, and what helps."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from entries import BASELINE, TSMOBN, Entry
from plan import UNSEEN
from report import accuracy

from fedjax_bn.report.results import Interval, over_seeds

Summaries = Sequence[Mapping[str, Any]]  # of the targets of one seed


class Measured(NamedTuple):
    """The measured numbers of a row."""

    rate: float  # the learning rate that validation chose
    # internal, unseen, tsmobn: seed -> percent, a mean over clients or over targets
    internal: Mapping[int, float]
    unseen: Mapping[int, float]
    tsmobn: Mapping[int, float]
    seconds: float  # the median time of a round
    traffic: Mapping[str, int]  # bytes down and up for a client in a round


def measure(entry: Entry, rate: float, by_seed: Mapping[int, Summaries]) -> Measured:
    """Returns the numbers of a row's finished runs.

    Args:
      rate: the learning rate of these runs.
      by_seed: seed -> the summaries of all targets; seeds that lack a target are left out.
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
    seconds = median(summary["seconds_per_round"] for summary in known)
    outside = (unseen(entry.adaptation), unseen(TSMOBN))
    return Measured(rate, internal, *outside, seconds, known[0]["traffic"])


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """Returns the mean of the differences by seed, over the seeds that both have."""
    return _over({seed: one[seed] - other[seed] for seed in one if seed in other})


def _over(values: Mapping[int, float]) -> Interval:
    return over_seeds([*values.values()]) if values else Interval(float("nan"))


def table(measured: Mapping[str, Measured], notes: Mapping[str, str]) -> str:
    """Returns a table in Markdown, best unseen accuracy first, and below it what does not help."""
    heads = ("", "rate", "seeds", "internal", "unseen", "against FedAvg", "unseen, TsmoBN",
             "seconds a round", "kB down, up")  # fmt: skip
    means = {label: _over(row.unseen).mean for label, row in measured.items()}
    lines = [heads, ("---", *("---:",) * (len(heads) - 1))]
    for label in sorted(measured, key=lambda label: -means[label]):
        row, against = measured[label], ""
        if label != BASELINE and BASELINE in measured:
            against = _number(difference(row.unseen, measured[BASELINE].unseen), "+")
        percents = [_number(_over(one)) for one in (row.internal, row.unseen, row.tsmobn)]
        sent = f"{row.traffic['down'] / 1000:.0f}, {row.traffic['up'] / 1000:.0f}"
        start = (label, f"{row.rate:g}", str(len(row.unseen)), *percents[:2], against)
        lines.append((*start, percents[2], f"{row.seconds:.2f}", sent))
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    ends = [f"{label}: {note}" for label, note in notes.items()]
    return "\n\n".join([text, *verdicts(measured), *ends])


def verdicts(measured: Mapping[str, Measured]) -> Iterable[str]:
    """Yields which rows are above FedAvg on unseen domains, below it, or neither."""
    if BASELINE not in measured:
        return
    kinds: dict[int, list[str]] = {1: [], -1: [], 0: []}
    for label, row in measured.items():
        gap = difference(row.unseen, measured[BASELINE].unseen)
        if label != BASELINE and gap.known:
            kinds[gap.sign].append(label)
    above, below, neither = (", ".join(labels) or "none" for labels in kinds.values())
    what = "interval of the difference by seed"
    yield f"Above {BASELINE} ({what} above 0): {above}."
    yield f"Below it ({what} below 0): {below}."
    yield f"No help shown (0 within the {what}): {neither}."


def _number(value: Interval, sign: str = "") -> str:
    """Returns a number as text, such as `71.0 ± 1.4`; a dash if it is unknown."""
    if not np.isfinite(value.mean):
        return "-"
    half = f" ± {value.high - value.mean:.1f}" if value.known else ""
    return f"{value.mean:{sign}.1f}{half}"


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Returns the summary of a run; None if it has not finished."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None
