"""Computes tables of scores with intervals from runs, and their differences to a baseline.

A score is a mean over seeds. Its interval is over seeds if there are several, else over the test
samples of the one seed. The same holds for the difference to the baseline, which is paired by seed
where both have the seed, because runs of one seed share data and initial weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import nearest
from fedjax_bn.report import intervals
from fedjax_bn.report.finished_runs import Run, Variant, relevant
from fedjax_bn.report.intervals import Interval, Part
from fedjax_bn.training.records import Record

MEAN = "mean"
RUNNING = "running"
_MANY = 8  # a table with more rows is sorted by score


class _Score(NamedTuple):
    """A score of one seed."""

    value: float  # percent
    parts: tuple[Part, ...] = ()  # the shares whose plain mean it is; empty if any is unknown
    right: tuple[np.ndarray, ...] = ()  # bool[n] for each part: right answers; empty if unknown
    data: str = ""  # hash of the data; answers are paired only if it is equal


_Seeds = dict[int, _Score]
_Scores = dict[str, _Seeds]  # column -> seed -> score


class Cell(NamedTuple):
    """A row's score in a column.

    Attributes:
      value: the mean over seeds, with its interval.
      seeds: the number of seeds.
      samples: the number of test samples of a seed; 0 if unknown.
      versus: the difference to the baseline; None for the baseline itself, and if the baseline has
        no score in the column.
    """

    value: Interval
    seeds: int
    samples: int
    versus: Interval | None


class Row(NamedTuple):
    """A row of a table.

    Attributes:
      method: the variant's method.
      variant: the variant's label.
      adaptation: the adaptation on unseen domains; "" for internal clients.
      cells: column -> cell.
      config: the target of the variant's first run, and its keys on which numbers depend.
      data: the content of data.json of each of the variant's runs, see `page.data_facts`.
    """

    method: str
    variant: str
    adaptation: str
    cells: dict[str, Cell]
    config: Mapping[str, Any] = {}
    data: tuple[Record, ...] = ()

    @property
    def label(self) -> str:
        """The name of the row in a table."""
        return f"{self.variant} [{self.adaptation}]" if self.adaptation else self.variant


class Table(NamedTuple):
    """Scores of some variants.

    Attributes:
      name: internal or unseen.
      dataset: the runs' data set.
      score: accuracy or mAP50.
      columns: the headings; the first is the mean, if there is one.
      rows: the rows in the order of the runs; if there are many, by the score in the first column.
      baseline: the label of the row with which others are compared.
      tied: the labels of rows whose difference to the best row of the first column may be chance.
    """

    name: str
    dataset: str
    score: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    baseline: str
    tied: tuple[str, ...] = ()

    def ranked(self, column: str) -> list[Row]:
        """Returns the rows that have a cell in a column, the greatest mean first and NaN last."""
        rows = [row for row in self.rows if column in row.cells]
        means = [row.cells[column].value.mean for row in rows]
        return [rows[i] for i in np.argsort(-np.array(means), kind="stable")]


def tables_of(variants: Sequence[Variant], baseline: str = "") -> list[Table]:
    """Returns the table of internal clients, and the table of unseen domains if there are any.

    Args:
      variants: those of one data set.
      baseline: the label or the method of a variant; "" takes fedavg, or else the last variant.

    Raises:
      ConfigError: no variant has that label or method.
    """
    methods = {variant.label: variant.method for variant in variants}
    wanted = baseline or "fedavg"
    fitting = [label for label in methods if wanted in (label, methods[label])]
    if baseline and not fitting:
        wrong = f"the baseline {baseline!r} is the method of no run on "
        dataset = variants[0].runs[0].summary["dataset"]
        raise ConfigError(wrong + dataset + nearest(baseline, methods))
    chosen = wanted if wanted in fitting else (fitting or list(methods)[-1:])[0]
    inside = {(variant.label, ""): _inside(variant.runs) for variant in variants}
    outside = {
        (variant.label, adaptation): scores
        for variant in variants
        for adaptation, scores in unseen_scores(variant.runs).items()
    }
    found = [_table("internal", variants, inside, (chosen, ""))]
    if outside:
        own = [adaptation for label, adaptation in outside if label == chosen]
        adaptation = RUNNING if RUNNING in own or not own else own[0]
        found.append(_table("unseen", variants, outside, (chosen, adaptation)))
    return found


def _inside(runs: Sequence[Run]) -> _Scores:
    """Returns the scores of the internal clients by column: their mean, and each client.

    Runs that leave out different domains have different clients. Then the columns are the clients'
    mean without each target, and the mean of these over the targets.
    """
    found: _Scores = {}
    several = len({run.target for run in runs}) > 1
    for run in runs:
        clients = dict(run.summary["accuracy"]["internal"])
        mean = _score(run, clients.pop(MEAN), clients)
        if several:
            found.setdefault(f"mean without {run.target or 'none'}", {})[run.seed] = mean
            continue
        found.setdefault(MEAN, {})[run.seed] = mean
        for client, value in clients.items():
            found.setdefault(client, {})[run.seed] = _score(run, value, {client: value})
    return _with_mean(found) if several else found


def unseen_scores(runs: Sequence[Run]) -> dict[str, _Scores]:
    """Returns adaptation -> unseen domain -> seed -> score, the mean of several domains first."""
    found: dict[str, _Scores] = {}
    for run in runs:
        for domain, row in run.summary["accuracy"]["unseen"].items():
            for adaptation, value in row.items():
                seeds = found.setdefault(adaptation, {}).setdefault(domain, {})
                seeds[run.seed] = _score(run, value, {domain: value}, adaptation)
    return {
        name: _with_mean(scores) if len(scores) > 1 else scores for name, scores in found.items()
    }


def _with_mean(scores: _Scores) -> _Scores:
    """Returns scores with their mean first, over the seeds that have all columns."""
    mean: _Seeds = {}
    # a seed that lacks a hard domain would raise the mean
    for seed in sorted(set.intersection(*map(set, scores.values()))):
        values, parts, right, data = zip(*(seeds[seed] for seeds in scores.values()), strict=True)
        mean[seed] = _Score(
            float(np.mean(values)),
            sum(parts, ()) if all(parts) else (),
            sum(right, ()) if all(right) else (),
            " ".join(data),
        )
    return ({MEAN: mean} if mean else {}) | scores


def _score(run: Run, value: float, parts: Mapping[str, float], adaptation: str = "") -> _Score:
    """Returns a score, with the shares of the clients or domains whose mean it is."""
    counts = {name: run.tested(name, adaptation) for name in parts}
    if not all(counts.values()):
        return _Score(value)
    known = [run.answers.get((name, adaptation)) for name in parts]
    right = tuple(one.right for one in known) if all(known) else ()
    shares = tuple((share, counts[name]) for name, share in parts.items())
    return _Score(value, shares, right, run.about["data"])


def _table(
    name: str,
    variants: Sequence[Variant],
    rows: Mapping[tuple[str, str], _Scores],
    baseline: tuple[str, str],
) -> Table:
    """Returns a table, from (variant, adaptation) -> scores."""
    runs = {variant.label: variant.runs for variant in variants}
    score, dataset = variants[0].runs[0].score, variants[0].runs[0].summary["dataset"]
    proportions = score == "accuracy"  # a share of samples with a binomial error; mAP50 is not
    columns = dict.fromkeys(column for scores in rows.values() for column in scores)
    columns = tuple(sorted(columns, key=lambda column: column != MEAN))
    made = []
    for (label, adaptation), scores in rows.items():
        other = rows.get(baseline, {}) if (label, adaptation) != baseline else {}
        cells = {}
        for column, seeds in scores.items():
            one = next(iter(seeds.values()))
            value = intervals.over_seeds([score.value for score in seeds.values()])
            # clips Student's interval to [0, 100]; `max(nan, 0.0)` is NaN only in this order
            value = value._replace(low=max(value.low, 0.0), high=min(value.high, 100.0))
            if len(seeds) == 1 and proportions and one.parts:
                value = intervals.mean_of_parts(one.parts)._replace(mean=value.mean)
            theirs = other.get(column)
            versus = _difference(seeds, theirs, proportions) if theirs else None
            samples = sum(count for _, count in one.parts)
            cells[column] = Cell(value, len(seeds), samples, versus)
        first = runs[label][0]
        config = relevant(first) | {"target": first.target}
        data = tuple(run.data for run in runs[label])
        made.append(Row(first.method, label, adaptation, cells, config, data))
    named = Row("", *baseline, {}).label  # the baseline may have no row in this table
    table = Table(name, dataset, score, columns, tuple(made), named)
    order = table.ranked(columns[0])
    best, *others = (rows[row.variant, row.adaptation][columns[0]] for row in order)
    gaps = [_difference(best, one, proportions) for one in others]
    pairs = zip(order[1:], gaps, strict=True)
    tied = [row.label for row, gap in pairs if gap.known and not gap.sign]
    if len(made) > _MANY:  # fewer rows keep the order in which the folders were given
        made = [*order, *(row for row in made if columns[0] not in row.cells)]
    return table._replace(rows=tuple(made), tied=tuple(tied))


def _difference(seeds: _Seeds, other: _Seeds, proportions: bool) -> Interval:
    """Returns a row's score minus another's, over common seeds, or over all if none is common."""
    both = sorted(set(seeds) & set(other))
    if len(both) > 1:
        return intervals.over_seeds([seeds[seed].value - other[seed].value for seed in both])
    if both:
        one, two = seeds[both[0]], other[both[0]]
        shapes = [[part.shape for part in score.right] for score in (one, two)]
        # both models find the same samples hard, so a paired difference varies less
        if one.right and one.data == two.data and shapes[0] == shapes[1]:
            return intervals.paired_difference(one.right, two.right)
        if proportions and one.parts and two.parts:
            return intervals.difference_of_parts(one.parts, two.parts)
        return Interval(one.value - two.value)
    one, two = ([score.value for score in each.values()] for each in (seeds, other))
    if min(len(one), len(two)) > 1:
        return intervals.welch(one, two)
    return Interval(float(np.mean(one) - np.mean(two)))
