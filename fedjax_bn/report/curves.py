"""What the records of runs hold over rounds: scores, measures, losses, weights; as lines."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedjax_bn.report.charts import Line, Look
from fedjax_bn.report.finished_runs import Run
from fedjax_bn.report.scores import MEAN
from fedjax_bn.run.training.records import Record

Values = dict[str, float | None]  # column -> value, of one round
Rounds = list[tuple[int, Values]]  # (round, its values), of the rounds that have some
Read = Callable[[Run], Rounds]


def lines_of(label: str, look: Look, runs: Sequence[Rounds]) -> Iterator[tuple[str, Line]]:
    """(column, its line): the mean over the runs that have a round, and their limits.

    Args:
      label: of whom it is.
      look: of the line.
      runs: the seeds' values; rounds that fewer seeds have than others are left out.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        for number, values in run:
            for column, value in values.items():
                if value is not None and np.isfinite(value):
                    found.setdefault(column, {}).setdefault(number, []).append(value)
    for column, by_round in found.items():
        most = max(map(len, by_round.values()))
        rounds = sorted(number for number, values in by_round.items() if len(values) == most)
        values = np.array([by_round[number] for number in rounds])
        ends = (values.min(1), values.max(1)) if most > 1 else ((), ())
        yield column, Line(label, look, rounds, values.mean(1), *ends)


def internal(key: str) -> Read:
    """Reads the values of a key by client, their plain mean in front where none is recorded."""

    def read(run: Run) -> Rounds:
        return [(r["round"], _with_mean(r[key])) for r in run.records if key in r]

    return read


def measure(name: str) -> Read:
    """Reads a measure of `run.answers` by client, the mean over clients in front."""

    def read(run: Run) -> Rounds:
        rows = ((r["round"], r.get("measures", {}).get(name)) for r in run.records)
        return [(number, _with_mean(values)) for number, values in rows if values]

    return read


def unseen(run: Run, name: str = "") -> dict[str, Rounds]:
    """Adaptation -> the values of unseen domains: their scores, or a measure of `run.answers`."""
    found: dict[str, Rounds] = {}
    for record in run.records:
        by_text: dict[str, Values] = {}
        for domain, row in record.get("unseen_measures" if name else "unseen", {}).items():
            for text, value in row.items():
                by_text.setdefault(text, {})[domain] = value.get(name) if name else value
        for text, values in by_text.items():
            found.setdefault(text, []).append((record["round"], values))
    return found


def varying_weights(run: Run) -> Rounds:
    """The weights by round; none where every client's stays as it is."""
    rows = [(record["round"], record["weights"]) for record in run.records]
    first = rows[0][1]
    return [] if all(_alike(values, first) for _, values in rows) else rows


def _with_mean(values: Record) -> Values:
    known = [v for k, v in values.items() if k != MEAN and v is not None and np.isfinite(v)]
    mean = values.get(MEAN, float(np.mean(known)) if known else None)
    return {MEAN: mean} | {k: v for k, v in values.items() if k != MEAN}


def _alike(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(
        one[k] == other[k] or abs((one[k] or 0) - (other[k] or 0)) < 1e-6 for k in one
    )
