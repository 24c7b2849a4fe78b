"""Who won, by how much, and whether it is real: tables of scores with intervals, from runs.

A score is a mean over seeds. Its interval is over seeds where there are several, else over the test
samples of the one seed; the same goes for its difference to the baseline, which is taken seed by
seed where both have the seed, because they share data and start.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.text import nearest
from fedjax_bn.report.intervals import (
    Interval,
    difference_of_parts,
    mean_of_parts,
    over_seeds,
    paired_difference,
    welch,
)
from fedjax_bn.report.scores import (
    MEAN,
    RUNNING,
    Score,
    Scores,
    Seeds,
    internal_scores,
    unseen_scores,
)
from fedjax_bn.report.variants import Variant, relevant
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.training.records import Record

_MANY = 8  # rows, of which more are sorted


class Cell(NamedTuple):
    """What a table says of a row and a column.

    Attributes:
      value: mean over seeds, with its interval.
      seeds: how many.
      samples: test samples of a seed; 0 where they are not known.
      versus: value minus the baseline's; None of the baseline itself and where it has none.
    """

    value: Interval
    seeds: int
    samples: int
    versus: Interval | None


class Row(NamedTuple):
    """A row of a table.

    Attributes:
      method: of the variant.
      variant: its label.
      adaptation: of unseen domains; else empty.
      cells: column -> cell.
      config: the target, and the keys on which numbers depend, of the variant's first run.
      data: data.json of each of the variant's runs, see `data_facts`.
    """

    method: str
    variant: str
    adaptation: str
    cells: dict[str, Cell]
    config: Mapping[str, Any] = {}
    data: tuple[Record, ...] = ()

    @property
    def label(self) -> str:
        """What stands in front of it."""
        return f"{self.variant} [{self.adaptation}]" if self.adaptation else self.variant


class Table(NamedTuple):
    """Scores of some variants.

    Attributes:
      name: internal or unseen.
      dataset: of the runs.
      score: what the percentages are.
      columns: the first one is the mean, or the only one.
      rows: in the order of the runs; of many the best of the first column in front.
      baseline: label of the row that others are compared with.
      tied: labels of the rows that the runs do not tell from the best of the first column.
    """

    name: str
    dataset: str
    score: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    baseline: str
    tied: tuple[str, ...] = ()


def tables_of(variants: Sequence[Variant], baseline: str = "") -> list[Table]:
    """The tables of internal clients and of unseen domains, those that there are.

    Args:
      variants: of one data set.
      baseline: label of a variant, or its method; empty: fedavg where it is there, else the last.

    Raises:
      ConfigError: no variant has that label.
    """
    chosen = _choose_baseline(variants, baseline)
    inside = {(variant.label, ""): internal_scores(variant.runs) for variant in variants}
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


def _choose_baseline(variants: Sequence[Variant], name: str = "") -> str:
    """The label of the variant that others are compared with, see `tables_of`."""
    methods = {variant.label: variant.method for variant in variants}
    wanted = name or "fedavg"
    if wanted in methods:
        return wanted
    for label, method in methods.items():
        if method == wanted:
            return label
    if name:
        dataset = variants[0].runs[0].summary["dataset"]
        wrong = f"the baseline {name!r} is the method of no run on {dataset}"
        raise ConfigError(wrong + nearest(name, methods))
    return list(methods)[-1]


def _table(
    name: str,
    variants: Sequence[Variant],
    rows: Mapping[tuple[str, str], Scores],
    baseline: tuple[str, str],
) -> Table:
    """A table of rows (variant, adaptation) -> scores."""
    runs = {variant.label: variant.runs for variant in variants}
    first = {label: of[0] for label, of in runs.items()}
    score, dataset = variants[0].runs[0].score, variants[0].runs[0].summary["dataset"]
    proportions = score == "accuracy"
    columns = dict.fromkeys(column for scores in rows.values() for column in scores)
    columns = tuple(sorted(columns, key=lambda column: column != MEAN))
    made = []
    for (label, adaptation), scores in rows.items():
        other = rows.get(baseline, {}) if (label, adaptation) != baseline else {}
        cells = {
            column: _cell(seeds, other.get(column), proportions)
            for column, seeds in scores.items()
            if seeds
        }
        config = relevant(first[label]) | {"target": first[label].target}
        data = tuple(run.data for run in runs[label])
        made.append(Row(first[label].summary["method"], label, adaptation, cells, config, data))
    table = Table(name, dataset, score, columns, tuple(made), _label(*baseline))
    seeds = {_label(*key): scores.get(columns[0], {}) for key, scores in rows.items()}
    return _sorted(table)._replace(tied=_tied(table, seeds, proportions))


def _label(variant: str, adaptation: str) -> str:
    return Row("", variant, adaptation, {}).label


def _sorted(table: Table) -> Table:
    """The table, with the best of the first column in front where there are many rows."""
    if len(table.rows) <= _MANY:
        return table
    column = table.columns[0]
    rest = (row for row in table.rows if column not in row.cells)
    return table._replace(rows=(*ranked(table, column), *rest))


def _tied(table: Table, seeds: Mapping[str, Seeds], proportions: bool) -> tuple[str, ...]:
    """Labels of rows whose difference to the best has an interval that holds 0.

    Args:
      table: with its rows.
      seeds: label -> scores of the first column.
      proportions: see `_difference`.
    """
    labels = [row.label for row in ranked(table, table.columns[0])]
    gaps = {one: _difference(seeds[labels[0]], seeds[one], proportions) for one in labels[1:]}
    return tuple(label for label, gap in gaps.items() if gap.known and not gap.sign)


def _cell(seeds: Seeds, other: Seeds | None, proportions: bool) -> Cell:
    values = [score.value for score in seeds.values()]
    first = next(iter(seeds.values()))
    samples = sum(count for _, count in first.parts)
    value = over_seeds(values)
    value = value._replace(low=max(value.low, 0.0), high=min(value.high, 100.0))
    if len(seeds) == 1 and proportions and first.parts:
        value = mean_of_parts(first.parts)._replace(mean=value.mean)
    versus = _difference(seeds, other, proportions) if other else None
    return Cell(value, len(seeds), samples, versus)


def _difference(seeds: Seeds, other: Seeds, proportions: bool = True) -> Interval:
    """What a row has more than another, in points: over the seeds that both have, else over all.

    Args:
      seeds, other: their scores.
      proportions: whether scores are shares of samples, which say something within one seed.
    """
    both = sorted(set(seeds) & set(other))
    if len(both) > 1:
        return over_seeds([seeds[seed].value - other[seed].value for seed in both])
    if len(both) == 1:
        one, two = seeds[both[0]], other[both[0]]
        if _same_samples(one, two):
            return paired_difference(one.right, two.right)
        if proportions and one.parts and two.parts:
            return difference_of_parts(one.parts, two.parts)
        return Interval(one.value - two.value)
    one, two = ([score.value for score in each.values()] for each in (seeds, other))
    if min(len(one), len(two)) > 1:
        return welch(one, two)
    return Interval(float(np.mean(one) - np.mean(two)))


def _same_samples(one: Score, other: Score) -> bool:
    """Whether two models answered to the same samples, and it is known who was right."""
    if not one.right or one.data != other.data or len(one.right) != len(other.right):
        return False
    return all(a.shape == b.shape for a, b in zip(one.right, other.right, strict=True))


def ranked(table: Table, column: str) -> Iterator[Row]:
    """The rows that have a column, the greatest mean first, and last what is not a number."""
    rows = [row for row in table.rows if column in row.cells]
    means = {id(row): row.cells[column].value.mean for row in rows}
    yield from sorted(rows, key=lambda row: (np.isnan(means[id(row)]), -means[id(row)]))


def best_in(table: Table, column: str) -> Row | None:
    """The row with the best score of a column; None where there is no other to beat."""
    rows = list(ranked(table, column))
    return rows[0] if len(rows) > 1 else None
