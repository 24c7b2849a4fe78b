"""The tables of a report as Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fedjax_bn.arguments.text import cell, shown
from fedjax_bn.report.intervals import Interval
from fedjax_bn.report.papers import beside
from fedjax_bn.report.results import Cell, Row, Table, best_in

_IN_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{one: f"\\{one}" for one in "&%$#_{}"},
}
_FIELDS = (
    *("dataset", "table", "variant", "adaptation", "column", "score", "low", "high"),
    *("seeds", "test_samples", "baseline", "difference", "difference_low", "difference_high"),
    *("published", "published_std", "published_in"),
)


class _Style(NamedTuple):
    """How a language writes what stands in a table."""

    escape: Callable[[str], str]
    bold: Callable[[str], str]
    limits: Callable[[str], str]


def _in_markdown(text: str) -> str:
    return shown(text).replace("|", "\\|")


def _in_latex(text: str) -> str:
    return "".join(_IN_LATEX.get(one, one) for one in shown(text))


_MARKDOWN = _Style(_in_markdown, "**{}**".format, " [{}]".format)
_LATEX = _Style(_in_latex, "\\textbf{{{}}}".format, "$_{{[{}]}}$".format)


def markdown(title: str, tables: Sequence[Table]) -> str:
    """The tables of a data set as Markdown: best bold, limits in brackets, papers' numbers behind.

    Args:
      title: above them, text.
      tables: of a report.
    """
    parts = [f"## {_in_markdown(title)}"]
    for table in tables:
        rows = list(_rows(table, _MARKDOWN))
        head, *rest = (f"| {' | '.join(row)} |" for row in rows)
        rule = f"|{' --- |' * len(rows[0])}"
        parts += [_in_markdown(caption(table)), "\n".join((head, rule, *rest))]
    return "\n\n".join(parts) + "\n"


def latex(title: str, tables: Sequence[Table]) -> str:
    """The tables of a data set as LaTeX tabulars (booktabs): best bold, limits as subscripts.

    Args:
      title: in a comment above them, text.
      tables: of a report.
    """
    parts = [f"% {shown(title)}"]
    for table in tables:
        rows = list(_rows(table, _LATEX))
        head, *rest = (" & ".join(row) + r" \\" for row in rows)
        body = "\n".join((r"\toprule", head, r"\midrule", *rest, r"\bottomrule"))
        columns = "l" + "r" * (len(rows[0]) - 1)
        tabular = f"\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}"
        parts.append(f"% {shown(caption(table))}\n{tabular}")
    return "\n\n".join(parts) + "\n"


def caption(table: Table) -> str:
    """What a table shows, in a sentence."""
    whose = {"internal": "internal clients, each with its own model", "unseen": "unseen domains"}
    return (
        f"Test {table.score} in percent, {whose[table.name]}; best bold; 95 % intervals in "
        f"brackets; differences are to {table.baseline}."
    )


def long_csv(named: Sequence[tuple[str, Sequence[Table]]]) -> str:
    """All cells of all tables with as many digits as there are, a line for each published number.

    Args:
      named: (data set, its tables) pairs.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_FIELDS)
    for dataset, tables in named:
        for table in tables:
            for row in table.rows:
                for column, one in row.cells.items():
                    start = (dataset, table.name, row.variant, row.adaptation, column)
                    numbers = _numbers(table, one)
                    for end in _published(table, row, column):
                        writer.writerow([*map(cell, start), *numbers, *end])
    return file.getvalue()


def _published(table: Table, row: Row, column: str) -> list[tuple]:
    printed = beside(table, row, column)
    return [(one.mean, "" if one.std is None else one.std, one.source) for one in printed] or [
        ("", "", "")
    ]


def _numbers(table: Table, one: Cell) -> list[str]:
    versus = one.versus or Interval(float("nan"))
    counts = (str(one.seeds), str(one.samples or ""), cell(table.baseline))
    return [*map(_number, one.value), *counts, *map(_number, versus)]


def _number(value: float) -> str:
    return "" if value != value else repr(float(value))


def _rows(table: Table, style: _Style) -> Iterator[list[str]]:
    """The rows of a table as texts, the head first; the difference stands behind the mean."""
    first, *others = table.columns
    head = [table.name, first, f"vs {table.baseline}", *others, "seeds", "n"]
    yield [style.escape(text) for text in head]
    best = {column: best_in(table, column) for column in table.columns}
    for row in table.rows:
        texts = [
            _text(row.cells.get(column), style, row is best[column])
            + "".join(f" ({p.paper}: {p.mean:.1f})" for p in beside(table, row, column))
            for column in table.columns
        ]
        cell = row.cells.get(first)
        versus = f"{cell.versus.mean:+.1f}" if cell and cell.versus else "-"
        versus += _limits(cell.versus, style, "+.1f") if cell and cell.versus else ""
        counts = (str(cell.seeds), str(cell.samples or "?")) if cell else ("-", "-")
        yield [style.escape(row.label), texts[0], versus, *texts[1:], *counts]


def _text(cell: Cell | None, style: _Style, best: bool) -> str:
    if cell is None:
        return "-"
    text = f"{cell.value.mean:.1f}"
    return (style.bold(text) if best else text) + _limits(cell.value, style, ".1f")


def _limits(interval: Interval, style: _Style, form: str) -> str:
    if not interval.known:
        return ""
    return style.limits(f"{interval.low:{form}}, {interval.high:{form}}")
