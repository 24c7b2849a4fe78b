"""Draws curves of a report as HTML: over rounds, and over settings of adaptations or runs.

Curves over rounds show what the records of runs have: scores, measures, losses, weights, norms of
updates and masks. Each line has a colour; if there are many lines, the best are coloured and the
others are grey.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedjax_bn.adaptation.choice import varied
from fedjax_bn.arguments.text import on_page
from fedjax_bn.report import html_parts
from fedjax_bn.report.answers import MEASURES, measures_of_classes
from fedjax_bn.report.finished_runs import Run, Variant, spell
from fedjax_bn.report.html_parts import COLOURS, Line, Look, chart, joined, key_of
from fedjax_bn.report.intervals import Interval, over_seeds
from fedjax_bn.report.results import MEAN, Table, unseen_scores
from fedjax_bn.training.evaluation.groups import some_of
from fedjax_bn.training.records import Record

_MOST = 24  # charts of a section; of more columns an evenly spaced selection is shown
_MOST_LINES = 12  # up to so many lines are all coloured
_LEAST = 3  # a curve needs at least so many values of a setting
_WIDE = 16  # the axis is logarithmic if greatest / least value is at least this
_Columns = dict[str, list[Line]]  # column -> a line for each variant (and adaptation)
_Settings = dict[tuple[str, str], dict[str, dict[float, Interval]]]  # (title, axis) -> lines


def convergence(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """Returns charts of scores, measures, losses, weights, norms and masks over rounds.

    Args:
      variants: those of one data set.
      tables: their tables, whose best rows are coloured if there are many lines.
    """
    forms = measures_of_classes(variants[0].runs[0].data.get("classes", [])) | MEASURES
    heads = {name: head for name, (head, _, _) in forms.items()}
    sections = []
    for whom, table, key, measures in (
        ("internal clients", tables[0], "accuracy", "measures"),
        ("unseen domains", tables[-1], "unseen", "unseen_measures"),
    ):
        panels = {f"{variants[0].runs[0].score} %": _lines(variants, key)}
        panels |= {head: _lines(variants, measures, name) for name, head in heads.items()}
        part = table.part.capitalize()
        sections.append(_section(f"{part} scores of {whom}", table, panels, False))
    for title, key, fold in (
        ("Training loss", "loss", True),
        ("Training loss after aggregation", "train_loss", True),
        ("Aggregation weights, where they vary", "weights", True),
        ("Norm of the clients' updates", "norm", True),
        ("L1 norm of the masks", "mask_l1", False),
    ):
        sections.append(_section(title, tables[0], {"": _lines(variants, key)}, fold))
    return joined(*sections, html_parts.paragraphs(_far_norms(variants), "missing"))


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


def _section(title: str, table: Table, panels: Mapping[str, _Columns], fold: bool) -> str:
    """Returns a section of panels; the page's script shows one panel at a time.

    Args:
      title: the heading.
      table: the table whose best rows are coloured if there are many lines.
      panels: heading -> lines; panels without lines are left out.
      fold: whether the first panel folds the charts of single clients, as all other panels do.
    """
    panels = {head: columns for head, columns in panels.items() if columns}
    lines = [line for columns in panels.values() for each in columns.values() for line in each]
    if not lines:
        return ""
    if all(len(line.x) < 2 for line in lines):
        note = html_parts.paragraphs(["One round was evaluated: there is no curve."], "soft")
        return f"<h3>{title}</h3>{note}"
    looks = {line.name: line.look for line in lines}
    if len(looks) > _MOST_LINES:  # the baseline and the table's best rows stand out
        best = [row.label for row in table.ranked(table.columns[0]) if row.label in looks]
        chosen = [label for label in best if label != table.baseline][: COLOURS - 1]
        chosen += [table.baseline] if table.baseline in looks else []
        order = [*sorted(chosen, key=best.index), *(one for one in looks if one not in chosen)]
        looks = {label: Look(i, 0, label in chosen) for i, label in enumerate(order)}
    grids = []
    for number, (head, columns) in enumerate(panels.items()):
        drawn = {
            column: chart(column, [one._replace(look=looks[one.name]) for one in each], "round")
            for column, each in columns.items()
        }
        # the mean's chart comes first; panels after the first always fold the clients' charts
        first = [MEAN] if (fold or number) and MEAN in drawn else []
        rest = sorted((c for c in drawn if c not in first), key=lambda column: column != MEAN)
        shown = [rest[i] for i in some_of(len(rest), _MOST)] if rest else []
        grid = _charts_of(drawn, shown)
        if len(shown) < len(rest):
            grid = html_parts.paragraphs([f"{len(shown)} of {len(rest)} are shown."]) + grid
        if first and grid:
            grid = html_parts.folded("By client", grid)
        grid = _charts_of(drawn, first) + grid
        name = on_page(head)
        grids.append(f'<div class="panel" data-title="{name}"><h4>{name}</h4>{grid}</div>')
    inside = f'<div class="panels">{"".join(grids)}</div>' if len(grids) > 1 else grid
    return f'<section class="curves"><h3>{title}</h3>{key_of(looks)}{inside}</section>'


def _charts_of(drawn: Mapping[str, str], columns: Sequence[str]) -> str:
    inside = "".join(drawn[column] for column in columns)
    return f'<div class="charts">{inside}</div>' if inside else ""


def _lines(variants: Sequence[Variant], key: str, measure: str = "") -> _Columns:
    """Returns column -> lines: the mean over a variant's seeds, with their least and greatest.

    Each variant has a colour, each adaptation a dash. Rounds that not all seeds reached are left
    out.
    """
    looks: dict[str, Look] = {}
    dashes: dict[str, int] = {}
    found: dict[str, dict[str, dict[int, list[float]]]] = {}  # column -> line -> round -> seeds
    for colour, variant in enumerate(variants):
        for run in variant.runs:
            for adaptation, number, values in _recorded(run, key, measure):
                label = f"{variant.label} [{adaptation}]" if adaptation else variant.label
                dash = dashes.setdefault(adaptation, len(dashes))
                looks.setdefault(label, Look(colour, dash))
                for column, value in values.items():
                    if value is not None and np.isfinite(value):
                        rounds = found.setdefault(column, {}).setdefault(label, {})
                        rounds.setdefault(number, []).append(value)
    columns: _Columns = {}
    for column, lines in found.items():
        columns[column] = []
        for label, by_round in lines.items():
            most = max(map(len, by_round.values()))
            # some seeds stop early; a mean over the remaining ones would jump
            rounds = sorted(number for number, values in by_round.items() if len(values) == most)
            values = np.array([by_round[number] for number in rounds])
            ends = (values.min(1), values.max(1)) if most > 1 else ((), ())
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
                for text, value in row.items():
                    one = value.get(measure) if measure else value
                    by_adaptation.setdefault(text, {})[domain] = one
            for text, row in by_adaptation.items():
                yield text, number, row
        elif row := values.get(measure) if measure else values:
            known = [v for v in row.values() if v is not None and np.isfinite(v)]
            mean = {MEAN: row.get(MEAN, float(np.mean(known)) if known else None)}
            # weights sum to 1, so their mean shows nothing
            yield "", number, (mean if key != "weights" else {}) | row


def sensitivity(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """Returns charts of scores over each setting that adaptations or a method's variants vary.

    Numeric settings of adaptations give a chart of the scores of unseen domains; other settings,
    such as with and without affine, give rows of a table.
    """
    adapted: _Settings = {}
    rows = []
    for variant in variants:
        scores = unseen_scores(variant.runs)
        for (name, key), choices in varied(scores).items():
            numbers = {float(v): text for v, text in choices.items() if _is_number(v)}
            for domain in scores[next(iter(choices.values()))] if len(numbers) >= _LEAST else ():
                points = {
                    v: over_seeds([one.value for one in scores[text][domain].values()])
                    for v, text in sorted(numbers.items())
                    if domain in scores[text]
                }
                lines = adapted.setdefault((f"{domain}: {key} of {name}", key), {})
                lines[variant.label] = points
            for value, text in choices.items():
                for domain, seeds in scores[text].items() if not _is_number(value) else ():
                    mean = np.mean([score.value for score in seeds.values()])
                    rows.append((variant.label, name, key, value, domain, f"{mean:.1f}"))
    heads = ("run", "adaptation", "setting", "value", "domain", "%")
    title = "Settings of adaptations that are not numbers."
    return joined(
        _charts("Settings of adaptations", adapted),
        _charts("Keys that the runs vary", _swept(variants, tables)),
        html_parts.sortable(title, heads, rows) if rows else "",
    )


def _charts(title: str, curves: _Settings) -> str:
    """Returns a chart for each setting, a line for each name; a name keeps its colour."""
    if not curves:
        return ""
    names = dict.fromkeys(name for lines in curves.values() for name in lines)
    looks = {name: Look(number) for number, name in enumerate(names)}
    drawn = []
    for (head, setting), lines in curves.items():
        made = []
        for name, points in lines.items():
            mean, low, high = zip(*points.values(), strict=True)
            ends = (low, high) if all(value.known for value in points.values()) else ((), ())
            made.append(Line(name, looks[name], list(points), mean, *ends))
        places = [x for line in made for x in line.x]
        # such as batch sizes and learning rates
        wide = min(places) > 0 and max(places) >= _WIDE * min(places)
        drawn.append(chart(head, made, setting, wide))
    charts = f'<div class="charts">{"".join(drawn)}</div>'
    return f'<section class="curves"><h3>{title}</h3>{key_of(looks)}{charts}</section>'


def _swept(variants: Sequence[Variant], tables: Sequence[Table]) -> _Settings:
    """Returns scores over the numeric keys that a method's variants vary."""
    found: _Settings = {}
    for table in tables:
        column = table.columns[0]
        for key in dict.fromkeys(key for variant in variants for key in variant.keys):
            lines: dict[str, dict[float, Interval]] = {}
            for variant in variants:
                config = variant.runs[0].values
                if key not in variant.keys or not _is_number(config[key]):
                    continue
                others = [f"{k}={spell(config[k])}" for k in variant.keys if k != key]
                for row in table.rows:
                    if row.variant == variant.label and column in row.cells:
                        name = " ".join(filter(None, (variant.method, *others, row.adaptation)))
                        points = lines.setdefault(name, {})
                        points[float(config[key])] = row.cells[column].value
            lines = {n: dict(sorted(p.items())) for n, p in lines.items() if len(p) >= _LEAST}
            if lines:
                found[f"{table.name} {column} over {key}", key] = lines
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
