"""The report's curves: over rounds, and over settings of adaptations or runs.

Curves over rounds show what the records of runs have: scores, measures, losses, weights, norms of
updates and masks. Each line has a colour; if there are many lines, the best are coloured and the
others are grey.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedjax_bn.adaptation.choice import varied
from fedjax_bn.report.answers import MEASURES, measures_of_classes
from fedjax_bn.report.blocks import Block, Folded, Group, Heading, Paragraphs, SortableTable
from fedjax_bn.report.charts import COLOURS, Curves, Line, Look, chart
from fedjax_bn.report.finished_runs import Run, Variant, spell
from fedjax_bn.report.intervals import Interval, over_seeds
from fedjax_bn.report.results import MEAN, Table, unseen_scores
from fedjax_bn.training.records import Record, some_of

_MOST_CHARTS = 24  # of a section; of more columns an evenly spaced selection is shown
_MOST_LINES = 12  # up to so many lines are all coloured
_LEAST_VALUES = 3  # a curve needs at least so many values of a setting
_WIDE = 16  # the axis is logarithmic if greatest / least value is at least this
_Columns = dict[str, list[Line]]  # column -> a line for each variant (and adaptation)
_Settings = dict[tuple[str, str], dict[str, dict[float, Interval]]]  # (title, axis) -> lines


def convergence_section(variants: Sequence[Variant], tables: Sequence[Table]) -> list[Block]:
    """Returns charts of scores, measures, losses, weights, norms and masks over rounds.

    Args:
      variants: those of one data set.
      tables: their tables, whose best rows are coloured if there are many lines.
    """
    forms = measures_of_classes(variants[0].runs[0].data.get("classes", [])) | MEASURES
    heads = {name: head for name, (head, _, _) in forms.items()}
    blocks: list[Block] = []
    for whom, table, key, measures in (
        ("internal clients", tables[0], "accuracy", "measures"),
        ("unseen domains", tables[-1], "unseen", "unseen_measures"),
    ):
        panels = {f"{variants[0].runs[0].score} %": _lines(variants, key)}
        panels |= {head: _lines(variants, measures, name) for name, head in heads.items()}
        part = table.part.capitalize()
        blocks += _curves(f"{part} scores of {whom}", table, panels, False)
    for title, key, fold in (
        ("Training loss", "loss", True),
        ("Training loss after aggregation", "train_loss", True),
        ("Aggregation weights, where they vary", "weights", True),
        ("Norm of the clients' updates", "norm", True),
        ("L1 norm of the masks", "mask_l1", False),
    ):
        blocks += _curves(title, tables[0], {"": _lines(variants, key)}, fold)
    return [*blocks, Paragraphs(_far_norms(variants), "missing")]


def _far_norms(variants: Sequence[Variant]) -> list[str]:
    """Returns a note for each client of a run whose updates had norms far from the others'."""
    notes = []
    for variant in variants:
        for run in variant.runs:
            far = Counter(name for record in run.records for name in record.get("far_norms", ()))
            notes += [
                f"{variant.label}, seed {run.seed}: the norm of {name}'s update was more than ten "
                f"times the median norm in {count} of {len(run.records)} rounds."
                for name, count in far.items()
            ]
    return notes


def _curves(title: str, table: Table, panels: Mapping[str, _Columns], fold: bool) -> list[Block]:
    """Returns panels of charts with their key; [] without lines.

    Args:
      title: the heading.
      table: the table whose best rows are coloured if there are many lines.
      panels: heading -> lines; panels without lines are left out.
      fold: whether the first panel folds the charts of single clients, as all other panels do.
    """
    panels = {head: columns for head, columns in panels.items() if columns}
    lines = [line for columns in panels.values() for drawn in columns.values() for line in drawn]
    if not lines:
        return []
    if all(len(line.x) < 2 for line in lines):
        note = "One round was evaluated: there is no curve."
        return [Heading(title), Paragraphs([note], "soft")]
    looks = _looks_of(lines, table)
    return [
        Curves(
            title,
            looks,
            {
                head: _panel(columns, looks, mean_first=fold or number > 0)
                for number, (head, columns) in enumerate(panels.items())
            },
        )
    ]


def _looks_of(lines: Sequence[Line], table: Table) -> dict[str, Look]:
    """Returns name -> look; of many lines, the baseline and the table's best rows stand out."""
    looks = {line.name: line.look for line in lines}
    if len(looks) <= _MOST_LINES:
        return looks
    best = [row.label for row in table.ranked(table.columns[0]) if row.label in looks]
    chosen = [label for label in best if label != table.baseline][: COLOURS - 1]
    chosen += [table.baseline] if table.baseline in looks else []
    grey = [label for label in looks if label not in chosen]
    order = [*sorted(chosen, key=best.index), *grey]
    return {label: Look(i, 0, label in chosen) for i, label in enumerate(order)}


def _panel(columns: _Columns, looks: Mapping[str, Look], mean_first: bool) -> list[Block]:
    """Returns a chart for each column; with `mean_first` the charts of clients are folded."""
    charts = {
        column: chart(column, [line._replace(look=looks[line.name]) for line in lines], "round")
        for column, lines in columns.items()
    }
    above = [MEAN] if mean_first and MEAN in charts else []
    below = sorted((c for c in charts if c not in above), key=lambda column: column != MEAN)
    chosen = [below[i] for i in some_of(len(below), _MOST_CHARTS)] if below else []
    grid = _charts_of(charts, chosen)
    if len(chosen) < len(below):
        grid = [Paragraphs([f"{len(chosen)} of {len(below)} are shown."]), *grid]
    if above and grid:
        grid = [Folded("By client", grid)]
    return _charts_of(charts, above) + grid


def _charts_of(charts: Mapping[str, list[Block]], columns: Sequence[str]) -> list[Block]:
    drawn = [block for column in columns for block in charts[column]]
    return [Group(drawn, "charts")] if drawn else []


def _lines(variants: Sequence[Variant], key: str, measure: str = "") -> _Columns:
    """Returns column -> lines: the mean over a variant's seeds, with their least and greatest.

    Each variant has a colour, each adaptation a dash. Rounds that not all seeds reached are left
    out.
    """
    looks: dict[str, Look] = {}
    dashes: dict[str, int] = {}
    scores: dict[str, dict[str, dict[int, list[float]]]] = {}  # column -> line -> round -> seeds
    for colour, variant in enumerate(variants):
        for run in variant.runs:
            for adaptation, number, values in _recorded(run, key, measure):
                label = f"{variant.label} [{adaptation}]" if adaptation else variant.label
                dash = dashes.setdefault(adaptation, len(dashes))
                looks.setdefault(label, Look(colour, dash))
                for column, value in values.items():
                    if value is not None and np.isfinite(value):
                        rounds = scores.setdefault(column, {}).setdefault(label, {})
                        rounds.setdefault(number, []).append(value)
    columns: _Columns = {}
    for column, lines in scores.items():
        columns[column] = []
        for label, by_round in lines.items():
            seeds = max(map(len, by_round.values()))
            # some seeds stop early; a mean over the remaining ones would jump
            rounds = sorted(number for number, values in by_round.items() if len(values) == seeds)
            values = np.array([by_round[number] for number in rounds])
            ends = (values.min(1), values.max(1)) if seeds > 1 else ((), ())
            columns[column].append(Line(label, looks[label], rounds, values.mean(1), *ends))
    return columns


def _recorded(run: Run, key: str, measure: str) -> Iterator[tuple[str, int, Record]]:
    """Yields (adaptation, round, column -> value) from a run's records, of `measure` if given.

    The plain mean over clients is the first column. Weights that do not vary are left out.
    """
    records = [(record["round"], record[key]) for record in run.records if key in record]
    if key == "weights":
        # JSON null is a weight that is not finite; the clients that train may change by round
        rows = [np.nan_to_num(np.array([*values.values()], float)) for _, values in records]
        same = all(values.keys() == records[0][1].keys() for _, values in records)
        if same and all(np.allclose(row, rows[0], rtol=0, atol=1e-6) for row in rows):
            return
    for number, values in records:
        if key.startswith("unseen"):
            by_adaptation: dict[str, Record] = {}
            for domain, row in values.items():
                for adaptation, value in row.items():
                    score = value.get(measure) if measure else value
                    by_adaptation.setdefault(adaptation, {})[domain] = score
            for adaptation, row in by_adaptation.items():
                yield adaptation, number, row
        elif row := values.get(measure) if measure else values:
            finite = [v for v in row.values() if v is not None and np.isfinite(v)]
            mean = {MEAN: row.get(MEAN, float(np.mean(finite)) if finite else None)}
            # weights sum to 1, so their mean shows nothing
            yield "", number, (mean if key != "weights" else {}) | row


def sensitivity_section(variants: Sequence[Variant], tables: Sequence[Table]) -> list[Block]:
    """Returns charts of scores over each setting that adaptations or a method's variants vary.

    Numeric settings of adaptations give a chart of the scores of unseen domains; other settings,
    such as with and without affine, give rows of a table.
    """
    adapted: _Settings = {}
    rows = []
    for variant in variants:
        scores = unseen_scores(variant.runs)
        for (name, key), choices in varied(scores).items():
            numbers = {float(v): adaptation for v, adaptation in choices.items() if _is_number(v)}
            domains = scores[next(iter(choices.values()))]
            for domain in domains if len(numbers) >= _LEAST_VALUES else ():
                points = {
                    number: over_seeds(
                        [score.value for score in scores[adaptation][domain].values()]
                    )
                    for number, adaptation in sorted(numbers.items())
                    if domain in scores[adaptation]
                }
                lines = adapted.setdefault((f"{domain}: {key} of {name}", key), {})
                lines[variant.label] = points
            for value, adaptation in choices.items():
                for domain, seeds in scores[adaptation].items() if not _is_number(value) else ():
                    mean = np.mean([score.value for score in seeds.values()])
                    rows.append((variant.label, name, key, value, domain, f"{mean:.1f}"))
    heads = ("run", "adaptation", "setting", "value", "domain", "%")
    title = "Settings of adaptations that are not numbers."
    return [
        *_charts_of_settings("Settings of adaptations", adapted),
        *_charts_of_settings("Keys that the runs vary", _swept(variants, tables)),
        *([SortableTable(title, heads, rows)] if rows else []),
    ]


def _charts_of_settings(title: str, curves: _Settings) -> list[Block]:
    """Returns a chart for each setting, a line for each name; a name keeps its colour."""
    if not curves:
        return []
    names = dict.fromkeys(name for lines in curves.values() for name in lines)
    looks = {name: Look(number) for number, name in enumerate(names)}
    charts: list[Block] = []
    for (head, setting), by_name in curves.items():
        lines = []
        for name, points in by_name.items():
            mean, low, high = zip(*points.values(), strict=True)
            ends = (low, high) if all(value.known for value in points.values()) else ((), ())
            lines.append(Line(name, looks[name], list(points), mean, *ends))
        places = [x for line in lines for x in line.x]
        # such as batch sizes and learning rates
        is_wide = min(places) > 0 and max(places) >= _WIDE * min(places)
        charts += chart(head, lines, setting, is_wide)
    return [Curves(title, looks, {"": [Group(charts, "charts")]})]


def _swept(variants: Sequence[Variant], tables: Sequence[Table]) -> _Settings:
    """Returns scores over the numeric keys that a method's variants vary."""
    curves: _Settings = {}
    for table in tables:
        column = table.columns[0]
        for key in dict.fromkeys(key for variant in variants for key in variant.keys):
            lines: dict[str, dict[float, Interval]] = {}
            for variant in variants:
                config = variant.runs[0].values
                if key not in variant.keys or not _is_number(config[key]):
                    continue
                fixed = [f"{k}={spell(config[k])}" for k in variant.keys if k != key]
                for row in table.rows:
                    if row.variant == variant.label and column in row.cells:
                        name = " ".join(filter(None, (variant.method, *fixed, row.adaptation)))
                        points = lines.setdefault(name, {})
                        points[float(config[key])] = row.cells[column].value
            lines = {
                name: dict(sorted(points.items()))
                for name, points in lines.items()
                if len(points) >= _LEAST_VALUES
            }
            if lines:
                curves[f"{table.name} {column} over {key}", key] = lines
    return curves


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
