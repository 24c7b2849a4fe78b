"""Curves over rounds: of every variant, client, unseen domain and adaptation, as HTML.

The values are in the records of runs: scores, measures, losses, weights. Each line has its colour;
of many lines the best ones have one, and the others are grey.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from fedjax_bn.report import html_parts
from fedjax_bn.report.charts import COLOURS, Line, Look, chart, key_of
from fedjax_bn.report.finished_runs import Run
from fedjax_bn.report.measured import MEASURES
from fedjax_bn.report.results import Table, ranked
from fedjax_bn.report.scores import MEAN
from fedjax_bn.report.variants import Variant
from fedjax_bn.run.evaluation.groups import some_of
from fedjax_bn.run.training.records import Record

_MOST = 24  # charts of a section; of more columns some are shown, evenly spaced
_MOST_LINES = 12  # that are all coloured
_Columns = dict[str, list[Line]]  # column -> a line a variant, perhaps an adaptation
_Panels = dict[str, _Columns]  # heading -> what it shows
_Values = dict[str, float | None]  # column -> value, of one round
_Rounds = list[tuple[int, _Values]]  # (round, its values), of the rounds that have some
_Read = Callable[[Run], _Rounds]


def convergence(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """Test scores, measures, losses, weights and masks over rounds.

    Args:
      variants: of one data set.
      tables: theirs; where there are many lines the best of these are coloured.
    """
    score = variants[0].runs[0].score
    inside = partial(_inside, variants)
    within, without = partial(_titled, tables[0]), partial(_titled, tables[-1])

    def by_client(name: str) -> _Columns:
        return inside(_measure(name) if name else _internal("accuracy"))

    parts = (
        within("Test scores of internal clients", _scores(score, by_client)),
        without("Test scores of unseen domains", _scores(score, partial(_outside, variants))),
        within("Training loss", {"": inside(_internal("loss"))}, True),
        within("Training loss after aggregation", {"": inside(_internal("train_loss"))}, True),
        within("Aggregation weights, where they vary", {"": inside(_varying_weights)}, True),
        within("L1 norm of the masks", {"": inside(_internal("mask_l1"))}),
    )
    return "\n".join(filter(None, parts))


def _scores(score: str, columns_of: Callable[[str], _Columns]) -> _Panels:
    """A panel for the score, and one for each measure.

    Args:
      score: what its percentages are.
      columns_of: name of a measure, empty for the score -> its lines.
    """
    heads = {"": f"{score} %"} | {name: head for name, (head, _, _) in MEASURES.items()}
    return {head: columns_of(name) for name, head in heads.items()}


def _titled(table: Table, title: str, panels: _Panels, folded: bool = False) -> str:
    """A section of panels that have lines, the clients of all but the first one on demand.

    Args:
      table: see `looks_of`.
      title: of the section.
      panels: heading -> lines.
      folded: whether clients of the first one are shown on demand too.
    """
    panels = {head: columns for head, columns in panels.items() if columns}
    lines = [line for columns in panels.values() for each in columns.values() for line in each]
    if not lines:
        return ""
    if all(len(line.x) < 2 for line in lines):
        note = html_parts.paragraphs(["One round was evaluated: there is no curve."], "soft")
        return f"<h3>{title}</h3>{note}"
    looks = _looks_of({line.name: line.look.style for line in lines}, table)
    grids = [
        (
            head,
            _grid(
                {
                    c: [line._replace(look=looks[line.name]) for line in each]
                    for c, each in columns.items()
                },
                folded or i > 0,
            ),
        )
        for i, (head, columns) in enumerate(panels.items())
    ]
    content = html_parts.panels(grids)
    return f'<section class="curves"><h3>{title}</h3>{key_of(looks)}{content}</section>'


def _grid(columns: _Columns, folded: bool = False) -> str:
    """A chart a column, the mean in front.

    Args:
      columns: their lines.
      folded: whether columns other than the mean are shown on demand.
    """
    first = {MEAN: columns[MEAN]} if folded and MEAN in columns else {}
    rest = {c: columns[c] for c in sorted(columns, key=lambda c: c != MEAN) if c not in first}
    names = [list(rest)[i] for i in some_of(len(rest), _MOST)] if rest else []
    grid = _charts({name: rest[name] for name in names})
    if len(names) < len(rest):
        grid = html_parts.paragraphs([f"{len(names)} of {len(rest)} are shown."]) + grid
    if first and grid:
        grid = f"<details><summary>By client</summary>{grid}</details>"
    return _charts(first) + grid


def _charts(columns: _Columns) -> str:
    drawn = "".join(chart(column, lines, "round") for column, lines in columns.items())
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _inside(variants: Sequence[Variant], read: _Read) -> _Columns:
    """The mean over a variant's seeds, from the least to the greatest."""
    found: _Columns = {}
    for colour, one in enumerate(variants):
        runs = [read(run) for run in one.runs]
        for column, line in _lines_of(one.label, Look((colour, 0)), runs):
            found.setdefault(column, []).append(line)
    return found


def _outside(variants: Sequence[Variant], name: str = "") -> _Columns:
    """The same of unseen domains, a line a variant and adaptation."""
    found: _Columns = {}
    dashes: dict[str, int] = {}
    for colour, one in enumerate(variants):
        runs = [_unseen(run, name) for run in one.runs]
        for text in dict.fromkeys(text for rows in runs for text in rows):
            look = Look((colour, dashes.setdefault(text, len(dashes))))
            values = [rows.get(text, []) for rows in runs]
            for column, line in _lines_of(f"{one.label} [{text}]", look, values):
                found.setdefault(column, []).append(line)
    return found


def _lines_of(label: str, look: Look, runs: Sequence[_Rounds]) -> Iterator[tuple[str, Line]]:
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


def _internal(key: str) -> _Read:
    """Reads the values of a key by client, their plain mean in front where none is recorded."""

    def read(run: Run) -> _Rounds:
        return [(r["round"], _with_mean(r[key])) for r in run.records if key in r]

    return read


def _measure(name: str) -> _Read:
    """Reads a measure of `run.answers` by client, the mean over clients in front."""

    def read(run: Run) -> _Rounds:
        rows = ((r["round"], r.get("measures", {}).get(name)) for r in run.records)
        return [(number, _with_mean(values)) for number, values in rows if values]

    return read


def _unseen(run: Run, name: str = "") -> dict[str, _Rounds]:
    """Adaptation -> the values of unseen domains: their scores, or a measure of `run.answers`."""
    found: dict[str, _Rounds] = {}
    for record in run.records:
        by_text: dict[str, _Values] = {}
        for domain, row in record.get("unseen_measures" if name else "unseen", {}).items():
            for text, value in row.items():
                by_text.setdefault(text, {})[domain] = value.get(name) if name else value
        for text, values in by_text.items():
            found.setdefault(text, []).append((record["round"], values))
    return found


def _varying_weights(run: Run) -> _Rounds:
    """The weights by round; none where every client's stays as it is."""
    rows = [(record["round"], record["weights"]) for record in run.records]
    first = rows[0][1]
    return [] if all(_alike(values, first) for _, values in rows) else rows


def _with_mean(values: Record) -> _Values:
    known = [v for k, v in values.items() if k != MEAN and v is not None and np.isfinite(v)]
    mean = values.get(MEAN, float(np.mean(known)) if known else None)
    return {MEAN: mean} | {k: v for k, v in values.items() if k != MEAN}


def _alike(one: _Values, other: _Values) -> bool:
    return one.keys() == other.keys() and all(
        one[k] == other[k] or abs((one[k] or 0) - (other[k] or 0)) < 1e-6 for k in one
    )


def _looks_of(styles: Mapping[str, tuple[int, int]], table: Table) -> dict[str, Look]:
    """The look of each line; of many the baseline and the best of a table's first column stand out.

    Args:
      styles: label of a line -> (colour, dash) where there are few.
      table: whose rows have these labels.
    """
    if len(styles) <= _MOST_LINES:
        return {label: Look(style) for label, style in styles.items()}
    best = [row.label for row in ranked(table, table.columns[0]) if row.label in styles]
    chosen = [label for label in best if label != table.baseline][: COLOURS - 1]
    chosen += [table.baseline] if table.baseline in styles else []
    order = [*sorted(chosen, key=best.index), *(one for one in styles if one not in chosen)]
    return {label: Look((i, 0), label in chosen) for i, label in enumerate(order)}
