"""The first screen of a report: the tables of who won, with a sentence on each, as HTML."""

from collections.abc import Sequence

from fedjax_bn.engine.names import on_page
from fedjax_bn.report import html_parts
from fedjax_bn.report.papers import beside
from fedjax_bn.report.results import Cell, Row, Table, best_in
from fedjax_bn.report.variants import Variant
from fedjax_bn.report.verdicts import cautions, paper_notes, verdict

_MARKS = {1: ("▲ ", "up"), -1: ("▼ ", "down"), 0: ("", "soft")}


def first_screen(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """Who won by each table, the tables, and what to know before believing them, as HTML.

    Args:
      variants: of one data set.
      tables: theirs, at least one.
    """
    parts = [html_parts.paragraphs([*map(verdict, tables)], "verdict"), *map(_table, tables)]
    told = (
        f"Test {tables[0].score} in percent, of the selected round. Best bold; below it the 95 % "
        "interval, and what papers print. vs: points more than that row. n: test samples of a seed."
    )
    parts.append(html_parts.paragraphs([told], "soft"))
    parts.append(html_parts.paragraphs(cautions(variants, tables), "missing"))
    parts.append(html_parts.paragraphs(paper_notes(tables), "soft"))
    return "\n".join(parts)


def _table(table: Table) -> str:
    """A table: the mean and the difference to the baseline in front."""
    first, *others = table.columns
    heads = [table.name, first, f"vs {table.baseline}", *others, "seeds", "n"]
    best = {column: best_in(table, column) for column in table.columns}
    rows = []
    for row in table.rows:
        cells = [_score(table, row, column, best[column]) for column in table.columns]
        one = row.cells.get(first)
        versus = _versus(one, row.label == table.baseline)
        counts = (one.seeds, f"{one.samples:,}" if one.samples else "?") if one else ("", "")
        ends = [html_parts.cell(text, str(text).replace(",", "")) for text in counts]
        rows.append([html_parts.cell(row.label), cells[0], versus, *cells[1:], *ends])
    return html_parts.sortable("", heads, rows)


def _score(table: Table, row: Row, column: str, best: Row | None) -> str:
    cell = row.cells.get(column)
    if cell is None:
        return html_parts.cell("", "")
    text = f"{cell.value.mean:.1f}"
    text = f"<strong>{text}</strong>" if row is best else text
    if cell.value.known:
        text += f"<small>{cell.value.low:.1f} to {cell.value.high:.1f}</small>"
    for one in beside(table, row, column):
        text += f"<small>{on_page(one.paper)}: {one.mean:.1f}</small>"
    mark = ' class="best"' if row is best else ""
    return f'<td{mark} data-value="{cell.value.mean:.6f}">{text}</td>'


def _versus(cell: Cell | None, is_baseline: bool) -> str:
    """The difference to the baseline, with an arrow where its interval leaves 0 out."""
    if cell is None or cell.versus is None:
        return html_parts.cell("baseline" if is_baseline else "", "", "soft")
    gap = cell.versus
    mark, kind = _MARKS[gap.sign]
    text = f'<span class="{kind}">{mark}{gap.mean:+.1f}</span>'
    if gap.known:
        text += f"<small>{gap.low:+.1f} to {gap.high:+.1f}</small>"
    return f'<td data-value="{gap.mean:.6f}">{text}</td>'
