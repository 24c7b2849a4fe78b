"""The report's numbers over rounds as curves, inline SVG, and its tables of measures.

The templates write SVG, because matplotlib takes a third of a second for each of a hundred charts,
and a PNG shows no values below the pointer. page.css has the colours (c0 to c7) and dashes (d0 to
d3) of lines; of many lines the best are coloured and the others are grey.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from fedjax_bn.report.blocks import TableCell, block
from fedjax_bn.report.results import MEAN, Table
from fedjax_bn.report.runs import Run, Variant, samples_of, samples_scored
from fedjax_bn.training.records import Record, some_of
from fedjax_bn.training.score_tables import OF_MEASURES, heading, in_form

_COLOURS, _DASHES = 8, 4
_BOX = (46, 350, 8, 186)  # left, right, top, bottom of the area of curves in 360 x 220 units
_MOST_CHARTS = 24  # of a section; of more columns an evenly spaced selection is shown
_MOST_LINES = 12  # up to so many lines are all coloured
_MOST_BANDS = 4  # limits are drawn in charts of up to so many lines
_MOST_POINTS = 100  # of a line, which keeps the pages of long runs small
_MOST_DOTS = 30
_GREATEST = 1e100  # larger absolute values are not drawn
# name in a summary -> (column head, number format, whether more is better)
_MEASURES = {
    "balanced_accuracy": ("balanced accuracy %", ".1f", True),
    "sensitivity": ("sensitivity %", ".1f", True),
    "auc": ("AUC", ".3f", True),
    "loss": ("cross entropy", ".3f", False),
    "ece": ("calibration error %", ".1f", False),
    "iou": ("IoU %", ".1f", True),
    "hd95_mm": ("HD95 mm", ".2f", False),
    "hd95_pixels": ("HD95 pixels", ".2f", False),
    "assd_mm": ("ASSD mm", ".2f", False),
    "assd_pixels": ("ASSD pixels", ".2f", False),
    "undefined": ("distances undefined", ".1f", False),
}
_BESIDE = ("counts", "auc_interval")  # lists of numbers beside measures
# Measures that need two classes -> what stands in the small lines of their cells.
_WITH_NOTES = {"balanced_accuracy": _BESIDE[:1], "sensitivity": _BESIDE[:1], "auc": _BESIDE}
# label -> measure -> column -> values of the seeds
_Rows = dict[str, dict[str, dict[str, list[float]]]]


class _Look(NamedTuple):
    """How a line is drawn; a colour beyond the last repeats the first with another dash."""

    colour: int
    dash: int = 0
    on: bool = True  # whether it is coloured at first; a click in the key changes it

    @property
    def style(self) -> str:
        """The CSS classes of the line."""
        return f"c{self.colour % _COLOURS} d{(self.dash + self.colour // _COLOURS) % _DASHES}"


class _Line(NamedTuple):
    """A curve: x ascends, and y f[rounds, seeds] is drawn as mean between least and greatest."""

    name: str
    look: _Look
    x: Sequence[int]
    y: np.ndarray


_Columns = dict[str, list[_Line]]  # column -> a line for each variant (and adaptation)


def convergence_section(variants: Sequence[Variant], tables: Sequence[Table]) -> list[Markup]:
    """Returns charts over rounds; of many lines those of the tables' best rows are coloured."""
    forms = _forms_of_measures(variants[0].runs[0].data.get("classes", []))
    blocks = []
    for whom, table, key, measures in (
        ("internal clients", tables[0], "accuracy", "measures"),
        ("unseen domains", tables[-1], "unseen", "unseen_measures"),
    ):
        panels = {f"{variants[0].runs[0].score} %": _lines(variants, key)}
        panels |= {head: _lines(variants, measures, name) for name, (head, *_) in forms.items()}
        blocks += _curves(f"{table.part.capitalize()} scores of {whom}", table, panels, False)
    for title, key, fold in (
        ("Training loss", "loss", True),
        ("Training loss after aggregation", "train_loss", True),
        ("Aggregation weights, where they vary", "weights", True),
        ("Norm of the clients' updates", "norm", True),
        ("L1 norm of the masks", "mask_l1", False),
    ):
        blocks += _curves(title, tables[0], {"": _lines(variants, key)}, fold)
    return blocks


def _curves(title: str, table: Table, panels: Mapping[str, _Columns], fold: bool) -> list[Markup]:
    """Returns panels of charts with their key; all but the first fold single clients anyway."""
    panels = {head: columns for head, columns in panels.items() if columns}
    lines = [line for columns in panels.values() for drawn in columns.values() for line in drawn]
    if not lines:
        return []
    if all(len(line.x) < 2 for line in lines):
        note = "One round was evaluated: there is no curve."
        return [block("heading", title), block("paragraphs", [note], "soft")]
    looks = {line.name: line.look for line in lines}
    if len(looks) > _MOST_LINES:  # the baseline and the table's best rows stand out
        best = [row.label for row in table.ranked(table.columns[0]) if row.label != table.baseline]
        coloured = {table.baseline, *best[: _COLOURS - 1]}
        looks = {name: look._replace(on=name in coloured) for name, look in looks.items()}
    drawn = {}
    for head, columns in panels.items():
        drawn[head] = _panel(columns, looks, fold or bool(drawn))
    return [block("curves", title, looks, drawn)]


def _panel(columns: _Columns, looks: Mapping[str, _Look], fold: bool) -> list[Markup]:
    """Returns a chart for each column, the mean first; `fold` folds those of single clients."""
    chosen = sorted(columns, key=lambda column: column != MEAN)
    notes = []
    if len(chosen) > _MOST_CHARTS:
        notes = [block("paragraphs", [f"{_MOST_CHARTS} of {len(chosen)} are shown."])]
        chosen = [chosen[i] for i in some_of(len(chosen), _MOST_CHARTS)]
    charts = {
        column: _chart(column, [line._replace(look=looks[line.name]) for line in columns[column]])
        for column in chosen
    }
    # the mean stands above, because charts of all clients would fill the page
    if not fold or len(charts) == 1 or MEAN not in charts:
        return [*notes, block("group", [*charts.values()], "charts")]
    mean = block("group", [charts.pop(MEAN)], "charts")
    by_client = [*notes, block("group", [*charts.values()], "charts")]
    return [mean, block("folded", "By client", by_client)]


def _chart(title: str, lines: Sequence[_Line]) -> Markup:
    """Returns a chart; each line has a point or more."""
    ys = np.concatenate([line.y.ravel() for line in lines])
    rounds = [number for line in lines for number in line.x]
    heights = _ticks(ys.min(), ys.max())
    places = _ticks(min(rounds), max(rounds), True) if len(set(rounds)) > 1 else rounds[:1]
    left, right, top, bottom = _BOX

    across = partial(_coordinates, places, left, right)
    up = partial(_coordinates, heights, bottom, top)
    drawn = []
    for line in sorted(lines, key=lambda line: line.look.on):  # SVG draws later lines on top
        chosen = some_of(len(line.x), _MOST_POINTS)
        x, y = [line.x[i] for i in chosen], line.y[chosen]
        band = []
        if y.shape[1] > 1 and len(lines) <= _MOST_BANDS:
            # the outline goes right along the upper limits and back along the lower ones
            outline = [*up(y.max(1)), *up(y.min(1)[::-1])]
            band = list(zip(across([*x, *x[::-1]]), outline, strict=True))
        means = y.mean(1).tolist()
        points = list(zip(across(x), up(means), strict=True))
        has_dots = len(points) <= _MOST_DOTS
        drawn.append(block("line", line.name, line.look, x, means, points, band, has_dots))
    rows = [*zip(up(heights), heights, strict=True)], [*zip(across(places), places, strict=True)]
    return block("chart", title, *rows, drawn, _BOX)


def _coordinates(
    ticks: Sequence[float], start: float, end: float, values: Sequence[float]
) -> list[float]:
    """Returns the coordinates of values on an axis between its end ticks."""
    share = (np.asarray(values, float) - ticks[0]) / ((ticks[-1] - ticks[0]) or 1)
    return (start + share * (end - start)).round(1).tolist()


def _ticks(low: float, high: float, integer: bool = False) -> list[float]:
    """Returns round numbers, in about five steps, that span the range from low to high."""
    if high <= low:
        margin = abs(low) * 0.05 or 1.0  # draws a constant in the middle
        low, high = low - margin, high + margin
    locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer, min_n_ticks=1)
    return locator.tick_values(low, high).tolist()


def _lines(variants: Sequence[Variant], key: str, measure: str = "") -> _Columns:
    """Returns column -> lines of a value over rounds, which all seeds of a variant reached."""
    looks: dict[str, _Look] = {}
    dashes: dict[str, int] = {}
    scores: dict[str, dict[str, dict[int, list[float]]]] = {}  # column -> line -> round -> seeds
    for colour, variant in enumerate(variants):
        for run in variant.runs:
            for adaptation, number, values in _recorded(run, key, measure):
                label = heading((variant.label, adaptation))
                dash = dashes.setdefault(adaptation, len(dashes))
                looks.setdefault(label, _Look(colour, dash))
                for column, value in values.items():
                    if value is not None and abs(value) < _GREATEST:  # false for NaN
                        rounds = scores.setdefault(column, {}).setdefault(label, {})
                        rounds.setdefault(number, []).append(value)
    columns: _Columns = {}
    for column, lines in scores.items():
        for label, by_round in lines.items():
            seeds = max(map(len, by_round.values()))
            # some seeds stop early; a mean over the remaining ones would jump
            rounds = sorted(number for number, values in by_round.items() if len(values) == seeds)
            values = np.array([by_round[number] for number in rounds])
            columns.setdefault(column, []).append(_Line(label, looks[label], rounds, values))
    return columns


def _recorded(run: Run, key: str, measure: str) -> Iterator[tuple[str, int, Record]]:
    """Yields (adaptation, round, column -> value) from a run's records, of `measure` if given."""
    # The plain mean over clients is the first column. Weights that do not vary are left out.
    records = [(record["round"], record[key]) for record in run.records if key in record]
    if key == "weights":
        # JSON null is a weight that is not finite; the clients that train may change by round
        rows = [np.nan_to_num(np.array([*values.values()], float)) for _, values in records]
        same = all(values.keys() == records[0][1].keys() for _, values in records)
        if same and all(np.allclose(row, rows[0], rtol=0, atol=1e-6) for row in rows):
            return
    for number, values in records:
        for adaptation, row in _by_adaptation(values, key, measure).items():
            yield adaptation, number, row


def _by_adaptation(entry: Record, key: str, measure: str) -> dict[str, Record]:
    """Returns adaptation -> column -> value of an entry of a record, of `measure` if given."""
    if key.startswith("unseen"):
        rows: dict[str, Record] = {}
        for domain, values in entry.items():
            for adaptation, value in values.items():
                if not measure or measure in value:
                    score = value[measure] if measure else value
                    rows.setdefault(adaptation, {})[domain] = score
        return rows
    row = entry.get(measure, {}) if measure else entry
    if not row or key == "weights" or measure in _BESIDE:  # whose mean shows nothing
        return {"": row}
    finite = [value for value in row.values() if value is not None and np.isfinite(value)]
    return {"": {MEAN: row.get(MEAN, float(np.mean(finite)) if finite else None)} | row}


def _forms_of_measures(classes: Sequence[str]) -> dict[str, tuple[str, str, bool]]:
    """Returns `_MEASURES` with the Dice of each class but the background, which is the first."""
    named = enumerate(classes[1:], start=1)
    dice = {f"dice_{number}": (f"Dice of {name} %", ".1f", True) for number, name in named}
    return dice | _MEASURES


def measures_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns a table of all measures, and for each measure one by client and by unseen domain."""
    run = variants[0].runs[0]
    forms = _forms_of_measures(run.data.get("classes", []))
    names = (*forms, *_BESIDE)
    inside, outside = (_measures_of(variants, whom, names) for whom in ("internal", "unseen"))
    if run.score not in ("accuracy", "Dice") or not (inside or outside):
        return []
    clients, domains = samples_of(variants, "internal"), samples_of(variants, "unseen")
    overview = [block("explanation", run.score, samples_scored(variants))]
    for whom, rows in ((f"{clients}, their mean", inside), (domains, outside)):
        means = {  # the recorded mean over clients; unseen domains have none: the mean over all
            label: {n: c.get(MEAN) or [*chain(*c.values())] for n, c in measures.items()}
            for label, measures in rows.items()
        }
        recorded = {name for measures in rows.values() for name in measures}
        notes = {label: _means_over(measures) for label, measures in rows.items()}
        columns = {n: form for n, form in forms.items() if n in recorded}
        overview += _table(whom, means, columns, notes)
    details = []
    for name, (head, form, is_gain) in forms.items():
        for whom, rows in ((clients, inside), (domains, outside)):
            scores = {label: values[name] for label, values in rows.items() if name in values}
            notes = {label: _notes(values, name) for label, values in rows.items()}
            cells = chain(*notes.values(), *scores.values())
            columns = {column: (column, form, is_gain) for column in cells if scores}
            details += _table(f"{head}, {whom}", scores, columns, notes)
    return [*overview, block("folded", "By client and domain", details)]


def _measures_of(variants: Sequence[Variant], whom: str, names: Iterable[str]) -> _Rows:
    """Returns the measures of the "internal" clients, the mean first, or of "unseen" domains."""
    rows: _Rows = {}
    for label, run in ((variant.label, run) for variant in variants for run in variant.runs):
        measures = run.summary.get("measures", {}).get(whom, {})
        for name in names:
            for adaptation, values in _by_adaptation(measures, whom, name).items():
                for column, value in values.items():
                    measured = rows.setdefault(heading((label, adaptation)), {})
                    scores = measured.setdefault(name, {})
                    if value is not None and np.all(np.isfinite(value)):
                        scores.setdefault(column, []).append(value)
    return rows


def _notes(measures: Mapping[str, Mapping[str, list]], name: str) -> dict[str, list[str]]:
    """Returns column -> the counts and the interval of a measure, means over seeds; {} for none."""
    if name not in _WITH_NOTES:
        return {}
    notes = {MEAN: _means_over(measures)[name]} if MEAN in measures.get(name, ()) else {}
    for beside in _WITH_NOTES[name]:
        for column, values in measures.get(beside, {}).items():
            text = in_form(np.mean(values, axis=0).tolist(), OF_MEASURES[beside])
            notes.setdefault(column, []).append(text)
    return notes


def _means_over(measures: Mapping[str, Mapping[str, list]]) -> dict[str, list[str]]:
    """Returns measure -> over how many clients or domains its mean is, of those that need two."""
    total = len(measures.get("counts", ()))
    over = {name: len({*measures.get(name, ())} - {MEAN}) for name in _WITH_NOTES}
    return {name: [f"{count} of {total}"] * (total > 0) for name, count in over.items()}


def _table(
    caption: str,
    rows: Mapping[str, Mapping[str, list[float]]],
    columns: Mapping[str, tuple[str, str, bool]],
    notes: Mapping[str, Mapping[str, list[str]]],
) -> list[Markup]:
    """Returns means over seeds of label -> column -> values, the best of each column bold."""
    if not rows:
        return []
    cells: list[list[object]] = [[label] for label in rows]
    for column, (_, form, is_gain) in columns.items():
        means = [float(np.mean(row[column])) if row.get(column) else None for row in rows.values()]
        numbers = [mean for mean in means if mean is not None]
        best = (max if is_gain else min)(numbers) if len(numbers) > 1 else None
        for line, mean in zip(cells, means, strict=True):
            small = notes[line[0]].get(column, ())
            text = in_form(mean, form) if small or mean is not None else ""
            line.append(TableCell(text, small, best=mean is not None and mean == best))
    heads = ["", *(head for head, _, _ in columns.values())]
    return [block("sortable_table", caption[:1].upper() + caption[1:], heads, cells)]
