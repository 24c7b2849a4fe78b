"""Curves of a report as HTML: over rounds, and over settings that adaptations or runs vary.

The values over rounds are in the records of runs: scores, measures, losses, weights. Each line has
its colour; if there are many lines, the best ones are coloured and the others are grey.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fedjax_bn.adaptation.choice import varied
from fedjax_bn.arguments.text import on_page
from fedjax_bn.report import html_parts
from fedjax_bn.report.answers import MEASURES
from fedjax_bn.report.finished_runs import Run, Variant, spell
from fedjax_bn.report.html_parts import COLOURS, Line, Look, chart, joined, key_of
from fedjax_bn.report.intervals import Interval, over_seeds
from fedjax_bn.report.results import MEAN, Table, unseen_scores
from fedjax_bn.run.evaluation.groups import some_of
from fedjax_bn.run.training.records import Record

_MOST = 24  # charts of a section, evenly spaced if there are more columns
_MOST_LINES = 12  # that are all coloured
_LEAST = 3  # values of a setting that make a curve
_WIDE = 16  # ratio of a setting's greatest and least value from which the axis is logarithmic
_Columns = dict[str, list[Line]]  # column -> a line for each variant (and adaptation)
_Values = Mapping[str, float | None]  # column -> value, of one round
_Rounds = list[tuple[int, _Values]]
_Settings = dict[tuple[str, str], dict[str, dict[float, Interval]]]  # (title, axis) -> lines


def convergence(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """Returns charts of test scores, measures, losses, weights and masks over rounds.

    Args:
      variants: of one data set.
      tables: theirs; their best rows are coloured if there are many lines.
    """
    heads = {"": f"{variants[0].runs[0].score} %"}
    heads |= {name: head for name, (head, _, _) in MEASURES.items()}
    scores = [
        {head: lines(variants, name) for name, head in heads.items()}
        for lines in (_inside, _outside)
    ]
    sections = [
        ("Test scores of internal clients", tables[0], scores[0], False),
        ("Test scores of unseen domains", tables[-1], scores[1], False),
    ]
    for title, key, fold in (
        ("Training loss", "loss", True),
        ("Training loss after aggregation", "train_loss", True),
        ("Aggregation weights, where they vary", "weights", True),
        ("L1 norm of the masks", "mask_l1", False),
    ):
        lines = _lines(variants, lambda run, key=key: {"": _recorded(run, key)})
        sections.append((title, tables[0], {"": lines}, fold))
    return joined(*(_section(*section) for section in sections))


def _section(title: str, table: Table, panels: Mapping[str, _Columns], fold: bool) -> str:
    """A section of panels, of which the page's script shows one at a time.

    Args:
      title: its heading.
      table: its best rows are coloured if there are many lines.
      panels: heading -> lines; panels without lines are left out.
      fold: whether charts of clients are folded in the first panel too, as in all others.
    """
    panels = {head: columns for head, columns in panels.items() if columns}
    lines = [line for columns in panels.values() for each in columns.values() for line in each]
    if not lines:
        return ""
    if all(len(line.x) < 2 for line in lines):
        note = html_parts.paragraphs(["One round was evaluated: there is no curve."], "soft")
        return f"<h3>{title}</h3>{note}"
    looks = _looks_of({line.name: line.look for line in lines}, table)
    grids = []
    for number, (head, columns) in enumerate(panels.items()):
        drawn = {
            column: chart(column, [one._replace(look=looks[one.name]) for one in each], "round")
            for column, each in columns.items()
        }
        grid = _grid(drawn, fold or number > 0)
        name = on_page(head)
        grids.append(f'<div class="panel" data-title="{name}"><h4>{name}</h4>{grid}</div>')
    inside = f'<div class="panels">{"".join(grids)}</div>' if len(grids) > 1 else grid
    return f'<section class="curves"><h3>{title}</h3>{key_of(looks)}{inside}</section>'


def _grid(drawn: Mapping[str, str], fold: bool) -> str:
    """Charts beside each other, the mean first; `fold` shows the others on demand."""

    def charts(columns: Sequence[str]) -> str:
        inside = "".join(drawn[column] for column in columns)
        return f'<div class="charts">{inside}</div>' if inside else ""

    first = [MEAN] if fold and MEAN in drawn else []
    rest = sorted((c for c in drawn if c not in first), key=lambda column: column != MEAN)
    shown = [rest[i] for i in some_of(len(rest), _MOST)] if rest else []
    grid = charts(shown)
    if len(shown) < len(rest):
        grid = html_parts.paragraphs([f"{len(shown)} of {len(rest)} are shown."]) + grid
    if first and grid:
        grid = html_parts.folded("By client", grid)
    return charts(first) + grid


def _inside(variants: Sequence[Variant], name: str) -> _Columns:
    """Scores of internal clients over rounds, or a measure of them."""
    if not name:
        return _lines(variants, lambda run: {"": _recorded(run, "accuracy")})

    def measured(run: Run) -> dict[str, _Rounds]:
        rows = ((r["round"], r.get("measures", {}).get(name)) for r in run.records)
        return {"": [(number, _with_mean(values)) for number, values in rows if values]}

    return _lines(variants, measured)


def _outside(variants: Sequence[Variant], name: str) -> _Columns:
    """Scores of unseen domains over rounds, or a measure of them: a line for each adaptation."""

    def unseen(run: Run) -> dict[str, _Rounds]:
        found: dict[str, _Rounds] = {}
        for record in run.records:
            by_text: dict[str, dict[str, float | None]] = {}
            for domain, row in record.get("unseen_measures" if name else "unseen", {}).items():
                for text, value in row.items():
                    by_text.setdefault(text, {})[domain] = value.get(name) if name else value
            for text, values in by_text.items():
                found.setdefault(text, []).append((record["round"], values))
        return found

    return _lines(variants, unseen)


def _recorded(run: Run, key: str) -> _Rounds:
    """The values of a record's key by client, their plain mean first; weights if they vary."""
    rows = [(record["round"], record[key]) for record in run.records if key in record]
    if key != "weights":
        return [(number, _with_mean(values)) for number, values in rows]
    first = rows[0][1]
    alike = (
        values.keys() == first.keys()
        and all(abs((values[k] or 0) - (first[k] or 0)) < 1e-6 for k in values)
        for _, values in rows
    )
    return [] if all(alike) else rows


def _with_mean(values: Record) -> _Values:
    known = [v for k, v in values.items() if k != MEAN and v is not None and np.isfinite(v)]
    mean = values.get(MEAN, float(np.mean(known)) if known else None)
    return {MEAN: mean} | {k: v for k, v in values.items() if k != MEAN}


def _lines(variants: Sequence[Variant], read: Callable[[Run], dict[str, _Rounds]]) -> _Columns:
    """Column -> its lines: means over a variant's seeds, from the least to the greatest.

    Args:
      variants: a colour each.
      read: a run -> adaptation, or "" -> its values by round; a dash for each adaptation.
    """
    found: _Columns = {}
    dashes: dict[str, int] = {}
    for colour, one in enumerate(variants):
        runs = [read(run) for run in one.runs]
        for text in dict.fromkeys(text for rows in runs for text in rows):
            look = Look(colour, dashes.setdefault(text, len(dashes)))
            label = f"{one.label} [{text}]" if text else one.label
            for column, line in _means(label, look, [rows.get(text, []) for rows in runs]):
                found.setdefault(column, []).append(line)
    return found


def _means(label: str, look: Look, runs: Sequence[_Rounds]) -> Iterator[tuple[str, Line]]:
    """(column, its line) of some seeds; rounds that fewer seeds have than others are left out."""
    found: dict[str, dict[int, list[float]]] = {}
    for number, values in (one for run in runs for one in run):
        for column, value in values.items():
            if value is not None and np.isfinite(value):
                found.setdefault(column, {}).setdefault(number, []).append(value)
    for column, by_round in found.items():
        most = max(map(len, by_round.values()))
        rounds = sorted(number for number, values in by_round.items() if len(values) == most)
        values = np.array([by_round[number] for number in rounds])
        ends = (values.min(1), values.max(1)) if most > 1 else ((), ())
        yield column, Line(label, look, rounds, values.mean(1), *ends)


def _looks_of(looks: Mapping[str, Look], table: Table) -> dict[str, Look]:
    """The look of each line; if there are many, the baseline and a table's best rows stand out."""
    if len(looks) <= _MOST_LINES:
        return dict(looks)
    best = [row.label for row in table.ranked(table.columns[0]) if row.label in looks]
    chosen = [label for label in best if label != table.baseline][: COLOURS - 1]
    chosen += [table.baseline] if table.baseline in looks else []
    order = [*sorted(chosen, key=best.index), *(one for one in looks if one not in chosen)]
    return {label: Look(i, 0, label in chosen) for i, label in enumerate(order)}


def sensitivity(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """Returns a chart for each setting that adaptations, or a method's variants, vary alone."""
    return joined(
        _charts("Settings of adaptations", _adapted(variants)),
        _charts("Keys that the runs vary", _swept(variants, tables)),
        _choices(variants),
    )


def _charts(title: str, curves: _Settings) -> str:
    """A chart for each setting, a line for each name; a name has one colour everywhere."""
    names = dict.fromkeys(name for lines in curves.values() for name in lines)
    looks = {name: Look(number) for number, name in enumerate(names)}
    drawn = []
    for (head, setting), lines in curves.items():
        made = []
        for name, points in lines.items():
            values = list(points.values())
            known = all(value.known for value in values)
            ends = ([v.low for v in values], [v.high for v in values]) if known else ((), ())
            made.append(Line(name, looks[name], list(points), [v.mean for v in values], *ends))
        places = [x for line in made for x in line.x]
        wide = min(places) > 0 and max(places) >= _WIDE * min(places)
        drawn.append(chart(head, made, setting, wide))
    if not drawn:
        return ""
    charts = f'<div class="charts">{"".join(drawn)}</div>'
    return f'<section class="curves"><h3>{title}</h3>{key_of(looks)}{charts}</section>'


def _adapted(variants: Sequence[Variant]) -> _Settings:
    """Scores of unseen domains over the settings of adaptations that are numbers."""
    found: _Settings = {}
    for variant in variants:
        scores = unseen_scores(variant.runs)
        for (name, key), choices in varied(scores).items():
            texts = {float(v): text for v, text in choices.items() if _is_number(v)}
            if len(texts) < _LEAST:
                continue
            for domain in scores[next(iter(texts.values()))]:
                points = {
                    v: over_seeds([one.value for one in scores[text][domain].values()])
                    for v, text in sorted(texts.items())
                    if domain in scores[text]
                }
                title = f"{domain}: {key} of {name}"
                found.setdefault((title, key), {})[variant.label] = points
    return found


def _swept(variants: Sequence[Variant], tables: Sequence[Table]) -> _Settings:
    """Scores over the keys that a method's variants vary, if they are numbers."""
    found: _Settings = {}
    for table in tables:
        column = table.columns[0]
        for key in dict.fromkeys(key for variant in variants for key in variant.keys):
            lines: dict[str, dict[float, Interval]] = {}
            for variant in variants:
                config = variant.runs[0].config
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


def _choices(variants: Sequence[Variant]) -> str:
    """A table of settings that are not numbers, such as with and without affine."""
    rows = []
    for variant in variants:
        scores = unseen_scores(variant.runs)
        for (name, key), choices in varied(scores).items():
            for value, text in choices.items():
                for domain, seeds in scores[text].items() if not _is_number(value) else ():
                    mean = np.mean([score.value for score in seeds.values()])
                    rows.append((variant.label, name, key, value, domain, f"{mean:.1f}"))
    if not rows:
        return ""
    heads = ("run", "adaptation", "setting", "value", "domain", "%")
    return html_parts.sortable("Settings of adaptations that are not numbers.", heads, rows)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
