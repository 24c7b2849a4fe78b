"""Computes tables of scores with intervals from runs, and their differences to a baseline.

A score is a mean over seeds, with the standard deviation of several. Its 95 % interval is over
seeds (Student's t) if there are several, else over the tested samples of the one seed. So is that
of the difference to the baseline, which is paired by seed, because runs of one seed share data and
initial weights, and is over the clients that both rows have in all seeds.

A mean over clients is a mean of shares, each with the Wilson interval of its own samples (J. Am.
Stat. Assoc. 22, 1927). The method of Zou and Donner ("MOVER", Stat. Med. 27, 2008) combines them:
it adds the squared distances of the limits from their shares, each distance times its weight 1/K.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # imports scipy.stats at its first use, which takes a second
from scipy.special import ndtri

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import nearest
from fedjax_bn.data.domain import part_of_all
from fedjax_bn.report.runs import Run, Variant, relevant
from fedjax_bn.training.records import QUANTILES, Record
from fedjax_bn.training.score_tables import heading

MEAN = "mean"
_MANY = 8  # a table with more rows is sorted by score
_TWO_SIDED = 0.975
_Z = float(ndtri(_TWO_SIDED))
_Part = tuple[float, int]  # (share in percent, samples)


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


def _mean_of_parts(parts: Sequence[_Part]) -> Interval:
    """Returns the mean of shares with its interval; each share has at least one own sample."""
    percent, samples = np.array(parts, float).T
    # `binomtest(...).proportion_ci` takes whole counts only, and a millisecond for each client
    share, of_z = np.clip(percent / 100, 0, 1), _Z**2 / samples
    middle = (share + of_z / 2) / (1 + of_z)
    reach = np.sqrt(share * (1 - share) * of_z + of_z**2 / 4) / (1 + of_z)
    down = percent - 100 * np.maximum(middle - reach, 0)
    up = 100 * np.minimum(middle + reach, 1) - percent
    return _around(percent.mean(), math.hypot(*down) / len(parts), math.hypot(*up) / len(parts))


def difference_of_parts(parts: Sequence[_Part], baseline: Sequence[_Part]) -> Interval:
    """Returns mean(parts) - mean(baseline) with its interval, as if samples were independent.

    Chance separates two models less on the same samples, so this interval is rather too wide than
    too narrow. `_paired_difference` is narrower, but needs the right answers by sample.
    """
    mean, mean_of_baseline = _mean_of_parts(parts), _mean_of_parts(baseline)
    down = math.hypot(mean.mean - mean.low, mean_of_baseline.high - mean_of_baseline.mean)
    up = math.hypot(mean.high - mean.mean, mean_of_baseline.mean - mean_of_baseline.low)
    return _around(mean.mean - mean_of_baseline.mean, down, up)


def _paired_difference(right: Sequence[np.ndarray], baseline: Sequence[np.ndarray]) -> Interval:
    """Returns the difference in percent of two models that are right on bool[n] of each client."""
    gaps = [100 * (a.astype(float) - b) for a, b in zip(right, baseline, strict=True)]
    reach = _Z * math.sqrt(sum(gap.var() / len(gap) for gap in gaps)) / len(gaps)
    return _around(np.mean([gap.mean() for gap in gaps]), reach, reach)


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
    def parts(self) -> tuple[_Part, ...]:
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
    versus: Interval | None  # the difference to the baseline, over the clients that both have
    clients: frozenset[tuple[str, str]] = frozenset()  # or domains, whose mean the score is
    common: int = 0  # in how many of them the baseline has a score too
    deviation: float = math.nan  # the standard deviation over seeds (N - 1); NaN for one seed


class Row(NamedTuple):
    """A row of a table: a variant with an adaptation."""

    method: str
    variant: str  # its label, see `runs.Variant`
    adaptation: str  # on unseen domains; "" for internal clients
    cells: dict[str, Cell]  # column -> cell
    config: Mapping[str, Any] = {}  # target and relevant keys of the variant's first run
    data: tuple[Record, ...] = ()  # the content of data.json of each run
    part: str = "test"  # of which samples the scores are, see `data.domain.scored_part`
    sizes: tuple[str, ...] = ()  # of the masks of which Dice was taken

    @property
    def label(self) -> str:
        """The name of the row in a table."""
        return heading((self.variant, self.adaptation))


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

    `variants` are of one data set. `baseline` is the label or the method of one of them, else there
    is a ConfigError; "" takes fedavg, or else the last variant.
    """
    methods = {variant.label: variant.method for variant in variants}
    name = baseline or "fedavg"
    fitting = [label for label in methods if name in (label, methods[label])]
    if baseline and not fitting:
        dataset = variants[0].runs[0].summary["dataset"]
        hint = nearest(baseline, methods)
        raise ConfigError(f"--baseline={baseline!r} is no run on {dataset}{hint}")
    chosen = name if name in fitting else (fitting or list(methods)[-1:])[0]
    inside = {(variant.label, ""): _inside(variant.runs) for variant in variants}
    outside = {}
    for variant in variants:
        scores = _outside(variant.runs)
        outside |= {(variant.label, adaptation): scores[adaptation] for adaptation in scores}
    tables = [_table("internal", variants, inside, (chosen, ""))]
    if outside:
        # A baseline that serves no unseen client leaves its place to the first row.
        rows = [row for row in outside if row[0] == chosen] or [*outside]
        running = [row for row in rows if row[1] == "running"]
        tables.append(_table("unseen", variants, outside, (running or rows)[0]))
    return tables


def _inside(runs: Sequence[Run]) -> _Scores:
    """Returns the scores of the internal clients by column: their mean, and each client."""
    # Runs that leave out different domains have different clients. Then the columns are the
    # clients' mean without each target, and the mean of these over the targets.
    scores: _Scores = {}
    several = len({run.target for run in runs}) > 1
    for run in runs:
        clients = dict(run.summary["accuracy"]["internal"])
        column = f"mean without {run.target or 'none'}" if several else MEAN
        scores.setdefault(column, {})[run.seed] = _score(run, clients.pop(MEAN), clients)
        for client, value in () if several else clients.items():
            scores.setdefault(client, {})[run.seed] = _score(run, value, {client: value})
    return _with_mean(scores) if several else scores


def of_batches(runs: Sequence[Run]) -> dict[str, tuple[Interval, Interval, Interval]]:
    """Returns internal scores by column: as tested, by batch statistics, and their difference."""
    # Without answers, which are known of the first score alone.
    runs = [run._replace(answers={}) for run in runs if "batch_statistics" in run.summary]
    accuracy = [{"accuracy": {"internal": run.summary["batch_statistics"]}} for run in runs]
    batches = _inside([run._replace(summary=a) for run, a in zip(runs, accuracy, strict=True)])
    scores = {}
    for column, tested in _inside(runs).items():
        pair = tested, batches[column]
        means = (over_seeds([score.value for score in seeds.values()]) for seeds in pair)
        gap, _ = _difference(*reversed(pair), runs[0].score == "accuracy")
        scores[column] = *means, gap
    return scores


def _outside(runs: Sequence[Run]) -> dict[str, _Scores]:
    """Returns adaptation -> unseen domain -> seed -> score, the mean of several domains first."""
    by_adaptation: dict[str, _Scores] = {}
    for run in runs:
        for domain, row in run.summary["accuracy"]["unseen"].items():
            for adaptation, value in row.items():
                seeds = by_adaptation.setdefault(adaptation, {}).setdefault(domain, {})
                seeds[run.seed] = _score(run, value, {domain: value}, adaptation)
    return {name: _with_mean(x) if len(x) > 1 else x for name, x in by_adaptation.items()}


def _with_mean(scores: _Scores) -> _Scores:
    """Returns scores with their mean first, over the seeds that have all columns."""
    mean: _Seeds = {}
    # a seed that lacks a hard domain would raise the mean
    for seed in sorted(set.intersection(*map(set, scores.values()))):
        columns = {column: seeds[seed] for column, seeds in scores.items()}
        shares = {}
        for column, score in columns.items():
            for (population, name), share in score.shares.items():
                shares[f"{column} {population}", name] = share
        value = float(np.mean([score.value for score in columns.values()]))
        mean[seed] = _Score(value, shares, " ".join(score.data for score in columns.values()))
    return ({MEAN: mean} if mean else {}) | scores


def _score(run: Run, value: float, parts: Mapping[str, float], adaptation: str = "") -> _Score:
    """Returns a score, with the shares of the clients or domains whose mean it is."""
    shares, population = {}, ""
    # Quantiles of many clients compare only with those of the same clients.
    if not adaptation and QUANTILES.keys() <= run.summary["accuracy"]["internal"].keys():
        population = f"{run.about.get('form', {}).get('clients')} {run.config['clients']}"
    for name, percent in parts.items():
        answers = run.answers.get((name, adaptation))
        right = answers.right if answers else None
        percent = math.nan if percent is None else percent
        shares[population, name] = _Share(percent, run.tested(name, adaptation), right)
    return _Score(math.nan if value is None else value, shares, run.about["data"])


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
        cells = {c: _cell(seeds, compared.get(c, {}), proportions) for c, seeds in scores.items()}
        run = runs[label][0]
        config = relevant(run) | {"target": run.target}
        data = tuple(run.data for run in runs[label])
        part = part_of_all(run.part(name) for run in runs[label])
        sizes = tuple(dict.fromkeys(run.size for run in runs[label] if run.size))
        table_rows.append(Row(run.method, label, adaptation, cells, config, data, part, sizes))
    # The baseline may have no row in this table.
    table = Table(name, dataset, score, columns, tuple(table_rows), heading(baseline))
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
    values = [score.value for score in seeds.values()]
    value, deviation = over_seeds(values), np.std(values, ddof=1) if len(values) > 1 else math.nan
    # clips Student's interval to [0, 100]; `max(nan, 0.0)` is NaN only in this order
    value = value._replace(low=max(value.low, 0.0), high=min(value.high, 100.0))
    if len(seeds) == 1 and proportions and score.parts:
        value = _mean_of_parts(score.parts)._replace(mean=value.mean)
    versus, common = _difference(seeds, baseline, proportions)
    samples = sum(count for _, count in score.parts)
    clients = frozenset(name for score in seeds.values() for name in score.shares)
    return Cell(value, len(seeds), samples, versus, clients, common, deviation)


def _difference(seeds: _Seeds, baseline: _Seeds, proportions: bool) -> tuple[Interval | None, int]:
    """Returns a row's score minus another's over their common clients, and the number of these."""
    # It is over common seeds, or over all if none is common; None without a common client.
    names = [set(score.shares) for row in (seeds, baseline) for score in row.values()]
    clients = set.intersection(*names) if seeds and baseline else set()
    if not clients:
        return None, 0
    seeds = {seed: score.over(clients) for seed, score in seeds.items()}
    baseline = {seed: score.over(clients) for seed, score in baseline.items()}
    common = sorted(set(seeds) & set(baseline))
    if not common:
        rows = ([score.value for score in row.values()] for row in (seeds, baseline))
        return welch(*rows), len(clients)
    gap = over_seeds([seeds[seed].value - baseline[seed].value for seed in common])
    if len(common) == 1:
        score, compared = seeds[common[0]], baseline[common[0]]
        shapes = [[part.shape for part in row.right] for row in (score, compared)]
        # both models find the same samples hard, so a paired difference varies less
        if score.right and score.data == compared.data and shapes[0] == shapes[1]:
            gap = _paired_difference(score.right, compared.right)
        elif proportions and score.parts and compared.parts:
            gap = difference_of_parts(score.parts, compared.parts)
    return gap, len(clients)
