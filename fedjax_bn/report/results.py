"""Computes tables of scores with intervals from runs, and their differences to a baseline.

A score is a mean over seeds. Its interval is over seeds if there are several, else over the tested
samples of the one seed. The same holds for the difference to the baseline, which is paired by seed
where both have the seed, because runs of one seed share data and initial weights. A difference is
over the clients that both rows have in all seeds.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import nearest
from fedjax_bn.data.domain import part_of_all
from fedjax_bn.report import intervals
from fedjax_bn.report.finished_runs import Run, Variant, relevant
from fedjax_bn.report.intervals import Interval, Part
from fedjax_bn.training.records import QUANTILES, Record

MEAN = "mean"
_MANY = 8  # a table with more rows is sorted by score


class _Share(NamedTuple):
    """The score of a client or a domain, of which a mean is taken."""

    percent: float
    samples: int = 0  # 0 if unknown
    right: np.ndarray | None = None  # bool[n], right answers; None if unknown


class _Score(NamedTuple):
    """A score of one seed."""

    value: float  # percent
    # (group, client or domain) -> share; the value is the mean over groups of their plain means
    shares: Mapping[tuple[str, str], _Share]
    data: str = ""  # hash of the data; answers are paired only if it is equal

    @property
    def parts(self) -> tuple[Part, ...]:
        """The shares and their numbers of samples; empty if any is unknown."""
        parts = tuple((share.percent, share.samples) for share in self.shares.values())
        return parts if all(samples for _, samples in parts) else ()

    @property
    def right(self) -> tuple[np.ndarray, ...]:
        """The right answers of each share; empty if any are unknown."""
        answers = [share.right for share in self.shares.values()]
        return () if any(right is None for right in answers) else tuple(answers)

    def over(self, names: Collection[tuple[str, str]]) -> "_Score":
        """Returns the score over these shares alone."""
        if len(names) == len(self.shares):
            return self
        shares = {name: share for name, share in self.shares.items() if name in names}
        groups: dict[str, list[float]] = {}
        for (group, _), share in shares.items():
            groups.setdefault(group, []).append(share.percent)
        value = float(np.mean([np.mean(percents) for percents in groups.values()]))
        return self._replace(value=value, shares=shares)


_Seeds = dict[int, _Score]
_Scores = dict[str, _Seeds]  # column -> seed -> score


class Cell(NamedTuple):
    """A row's score in a column."""

    value: Interval  # the mean over seeds
    seeds: int
    samples: int  # tested samples of a seed; 0 if unknown
    # the difference to the baseline, over the clients that both have; None for the baseline itself,
    # and if the baseline has no score of one of these clients
    versus: Interval | None
    clients: frozenset[tuple[str, str]] = frozenset()  # or domains, whose mean the score is
    common: int = 0  # in how many of them the baseline has a score too


class Row(NamedTuple):
    """A row of a table: a variant with an adaptation."""

    method: str
    variant: str  # its label, see `finished_runs.Variant`
    adaptation: str  # on unseen domains; "" for internal clients
    cells: dict[str, Cell]  # column -> cell
    config: Mapping[str, Any] = {}  # target and relevant keys of the variant's first run
    data: tuple[Record, ...] = ()  # the content of data.json of each run
    part: str = "test"  # of which samples the scores are, see `data.domain.scored_part`
    sizes: tuple[str, ...] = ()  # of the masks of which Dice was taken

    @property
    def label(self) -> str:
        """The name of the row in a table."""
        return f"{self.variant} [{self.adaptation}]" if self.adaptation else self.variant


class Table(NamedTuple):
    """Scores of some variants."""

    name: str  # internal or unseen
    dataset: str
    score: str  # accuracy, mAP50 or Dice
    columns: tuple[str, ...]  # the first is the mean, if there is one
    rows: tuple[Row, ...]  # in the order of the runs; if there are many, by their scores
    baseline: str  # the label of the row with which others are compared
    tied: tuple[str, ...] = ()  # labels of rows that may differ from the best by chance

    @property
    def part(self) -> str:
        """Which of their samples all scores are of, see `data.domain.scored_part`."""
        return part_of_all(row.part for row in self.rows)

    def compares(self, column: str) -> bool:
        """Returns whether all rows with a score in a column are of the same clients and part."""
        rows = [row for row in self.rows if column in row.cells]
        return len({(row.cells[column].clients, row.part) for row in rows}) == 1

    def ranked(self, column: str) -> list[Row]:
        """Returns the rows that have a cell in a column, the greatest mean first and NaN last."""
        rows = [row for row in self.rows if column in row.cells]
        means = [row.cells[column].value.mean for row in rows]
        return [rows[i] for i in np.argsort(-np.array(means), kind="stable")]


def tables_of(variants: Sequence[Variant], baseline: str = "") -> list[Table]:
    """Returns the table of internal clients, and the table of unseen domains if there are any.

    Args:
      variants: those of one data set.
      baseline: the label or the method of a variant, else a ConfigError; "" takes fedavg, or else
        the last variant.
    """
    methods = {variant.label: variant.method for variant in variants}
    name = baseline or "fedavg"
    fitting = [label for label in methods if name in (label, methods[label])]
    if baseline and not fitting:
        dataset = variants[0].runs[0].summary["dataset"]
        message = f"the baseline {baseline!r} is the method of no run on {dataset}"
        raise ConfigError(message + nearest(baseline, methods))
    chosen = name if name in fitting else (fitting or list(methods)[-1:])[0]
    inside = {(variant.label, ""): _inside(variant.runs) for variant in variants}
    outside = {
        (variant.label, adaptation): scores
        for variant in variants
        for adaptation, scores in _outside(variant.runs).items()
    }
    tables = [_table("internal", variants, inside, (chosen, ""))]
    if outside:
        adaptations = [adaptation for label, adaptation in outside if label == chosen]
        adaptation = "running" if "running" in adaptations or not adaptations else adaptations[0]
        tables.append(_table("unseen", variants, outside, (chosen, adaptation)))
    return tables


def _inside(runs: Sequence[Run]) -> _Scores:
    """Returns the scores of the internal clients by column: their mean, and each client.

    Runs that leave out different domains have different clients. Then the columns are the clients'
    mean without each target, and the mean of these over the targets.
    """
    scores: _Scores = {}
    several = len({run.target for run in runs}) > 1
    for run in runs:
        clients = dict(run.summary["accuracy"]["internal"])
        mean = _score(run, clients.pop(MEAN), clients)
        if several:
            scores.setdefault(f"mean without {run.target or 'none'}", {})[run.seed] = mean
            continue
        scores.setdefault(MEAN, {})[run.seed] = mean
        for client, value in clients.items():
            scores.setdefault(client, {})[run.seed] = _score(run, value, {client: value})
    return _with_mean(scores) if several else scores


def _outside(runs: Sequence[Run]) -> dict[str, _Scores]:
    """Returns adaptation -> unseen domain -> seed -> score, the mean of several domains first."""
    by_adaptation: dict[str, _Scores] = {}
    for run in runs:
        for domain, row in run.summary["accuracy"]["unseen"].items():
            for adaptation, value in row.items():
                seeds = by_adaptation.setdefault(adaptation, {}).setdefault(domain, {})
                seeds[run.seed] = _score(run, value, {domain: value}, adaptation)
    return {
        name: _with_mean(scores) if len(scores) > 1 else scores
        for name, scores in by_adaptation.items()
    }


def _with_mean(scores: _Scores) -> _Scores:
    """Returns scores with their mean first, over the seeds that have all columns."""
    mean: _Seeds = {}
    # a seed that lacks a hard domain would raise the mean
    for seed in sorted(set.intersection(*map(set, scores.values()))):
        columns = {column: seeds[seed] for column, seeds in scores.items()}
        shares = {
            (f"{column} {population}", name): share
            for column, score in columns.items()
            for (population, name), share in score.shares.items()
        }
        value = float(np.mean([score.value for score in columns.values()]))
        mean[seed] = _Score(value, shares, " ".join(score.data for score in columns.values()))
    return ({MEAN: mean} if mean else {}) | scores


def _score(run: Run, value: float, parts: Mapping[str, float], adaptation: str = "") -> _Score:
    """Returns a score, with the shares of the clients or domains whose mean it is."""
    shares = {}
    # Quantiles of many clients compare only with those of the same clients.
    population = ""
    if not adaptation and QUANTILES.keys() <= run.summary["accuracy"]["internal"].keys():
        population = f"{run.about.get('form', {}).get('clients')} {run.config['clients']}"
    for name, percent in parts.items():
        answers = run.answers.get((name, adaptation))
        right = answers.right if answers else None
        shares[population, name] = _Share(_number(percent), run.tested(name, adaptation), right)
    return _Score(_number(value), shares, run.about["data"])


def _number(percent: float | None) -> float:
    return float("nan") if percent is None else percent


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
    table_rows = []
    for (label, adaptation), scores in rows.items():
        compared = rows.get(baseline, {}) if (label, adaptation) != baseline else {}
        cells = {
            column: _cell(seeds, compared.get(column, {}), proportions)
            for column, seeds in scores.items()
        }
        run = runs[label][0]
        config = relevant(run) | {"target": run.target}
        data = tuple(run.data for run in runs[label])
        part = part_of_all(run.part(name) for run in runs[label])
        sizes = tuple(dict.fromkeys(run.size for run in runs[label] if run.size))
        table_rows.append(Row(run.method, label, adaptation, cells, config, data, part, sizes))
    named = Row("", *baseline, {}).label  # the baseline may have no row in this table
    table = Table(name, dataset, score, columns, tuple(table_rows), named)
    order = table.ranked(columns[0])
    best, *followers = (rows[row.variant, row.adaptation][columns[0]] for row in order)
    gaps = [_difference(best, seeds, proportions)[0] for seeds in followers]
    pairs = zip(order[1:], gaps, strict=True)
    tied = [row.label for row, gap in pairs if gap and gap.known and not gap.sign]
    if len(table_rows) > _MANY:  # fewer rows keep the order in which the folders were given
        table_rows = [*order, *(row for row in table_rows if columns[0] not in row.cells)]
    return table._replace(rows=tuple(table_rows), tied=tuple(tied))


def _cell(seeds: _Seeds, baseline: _Seeds, proportions: bool) -> Cell:
    score = next(iter(seeds.values()))
    value = intervals.over_seeds([score.value for score in seeds.values()])
    # clips Student's interval to [0, 100]; `max(nan, 0.0)` is NaN only in this order
    value = value._replace(low=max(value.low, 0.0), high=min(value.high, 100.0))
    if len(seeds) == 1 and proportions and score.parts:
        value = intervals.mean_of_parts(score.parts)._replace(mean=value.mean)
    versus, common = _difference(seeds, baseline, proportions)
    samples = sum(count for _, count in score.parts)
    clients = frozenset(name for score in seeds.values() for name in score.shares)
    return Cell(value, len(seeds), samples, versus, clients, common)


def _difference(seeds: _Seeds, baseline: _Seeds, proportions: bool) -> tuple[Interval | None, int]:
    """Returns a row's score minus another's over their common clients, and the number of these.

    It is over common seeds, or over all if none is common; None without a common client.
    """
    names = [set(score.shares) for row in (seeds, baseline) for score in row.values()]
    clients = set.intersection(*names) if seeds and baseline else set()
    if not clients:
        return None, 0
    scores, others = (
        {seed: score.over(clients) for seed, score in row.items()} for row in (seeds, baseline)
    )
    return _difference_of_same(scores, others, proportions), len(clients)


def _difference_of_same(seeds: _Seeds, baseline: _Seeds, proportions: bool) -> Interval:
    """Returns `_difference` of scores that are over the same clients."""
    common = sorted(set(seeds) & set(baseline))
    if not common:
        row, other = ([score.value for score in scores.values()] for scores in (seeds, baseline))
        return intervals.welch(row, other)
    if len(common) > 1:
        return intervals.over_seeds([seeds[seed].value - baseline[seed].value for seed in common])
    score, compared = seeds[common[0]], baseline[common[0]]
    shapes = [[part.shape for part in row.right] for row in (score, compared)]
    # both models find the same samples hard, so a paired difference varies less
    if score.right and score.data == compared.data and shapes[0] == shapes[1]:
        return intervals.paired_difference(score.right, compared.right)
    if proportions and score.parts and compared.parts:
        return intervals.difference_of_parts(score.parts, compared.parts)
    return Interval(score.value - compared.value)
