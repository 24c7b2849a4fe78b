"""The first screen of a report, as HTML: the tables of scores, and sentences on them.

The sentences say who won, by how much, whether it is real, and what to know before believing it.
"""

from collections.abc import Iterator, Sequence

from fedjax_bn.arguments.text import on_page
from fedjax_bn.report import html_parts
from fedjax_bn.report.intervals import Interval
from fedjax_bn.report.papers import beside
from fedjax_bn.report.results import Cell, Row, Table, best_in, ranked
from fedjax_bn.report.scores import MEAN
from fedjax_bn.report.variants import Variant, relevant, spell
from fedjax_bn.run.experiment.method import has_own_weighing

_MARKS = {1: ("▲ ", "up"), -1: ("▼ ", "down"), 0: ("", "soft")}
_MANY = 4  # rows, of which the best is no longer a fair comparison
_OF_ROWS = frozenset(("share",))  # a method's own rule, which baselines do not take over


def first_screen(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """Who won by each table, the tables, and what to know before believing them, as HTML.

    Args:
      variants: of one data set.
      tables: theirs, at least one.
    """
    parts = [html_parts.paragraphs([*map(_verdict, tables)], "verdict"), *map(_table, tables)]
    told = (
        f"Test {tables[0].score} in percent, of the selected round. Best bold; below it the 95 % "
        "interval, and what papers print. vs: points more than that row. n: test samples of a seed."
    )
    parts.append(html_parts.paragraphs([told], "soft"))
    parts.append(html_parts.paragraphs(_cautions(variants, tables), "missing"))
    parts.append(html_parts.paragraphs(_paper_notes(tables), "soft"))
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


def _verdict(table: Table) -> str:
    """Who is best by the first column, by how much, and whether the interval leaves 0 out."""
    column, (first, *others) = table.columns[0], ranked(table, table.columns[0])
    best = first.cells[column]
    start = f"{_whom(table)}: {first.label} has {best.value.mean:.1f} %"
    if not others:
        return f"{start}{_limits(best.value)}{_basis(best)}. There is nothing to compare it with."
    if first.label == table.baseline:
        gap, named = others[0].cells[column].versus, f"the next best, {others[0].label}"
        gap = gap and Interval(-gap.mean, -gap.high, -gap.low)
    else:
        gap, named = best.versus, f"the baseline {table.baseline}"
    compared = others[0].label if first.label == table.baseline else table.baseline
    tied = [label for label in table.tied if label != compared]
    more = f" Not told apart from it: {_named(tied, 3)}." if tied else ""
    if gap is None:
        return f"{start}{_basis(best)}, the best here; the baseline has no number to compare.{more}"
    return f"{start}, the best here: {gap.mean:+.1f} points to {named}{_reality(gap, best)}{more}"


def _limits(interval: Interval) -> str:
    """An interval in brackets; empty where there is none."""
    return f" ({interval.low:.1f} to {interval.high:.1f})" if interval.known else ""


def _whom(table: Table) -> str:
    if table.name == "internal":
        return "Internal clients, each with its own model"
    column = table.columns[0]
    return "Unseen domains" if column == MEAN else f"Unseen domain {column}"


def _reality(gap: Interval, best: Cell) -> str:
    if not gap.known:
        return f"{_basis(best)}. Nothing says whether that is more than chance: run other seeds."
    said = f" (95 % interval {gap.low:+.1f} to {gap.high:+.1f}{_basis(best)})."
    if gap.sign == 0:
        return f"{said} The interval holds 0: these runs do not tell the two apart."
    more = ", as far as one seed can say" if best.seeds == 1 else ""
    return f"{said} The interval leaves 0 out: the difference is real{more}."


def _basis(cell: Cell) -> str:
    seeds = f", {cell.seeds} seed{'s' * (cell.seeds > 1)}"
    return seeds + (f", {cell.samples:,} test samples" if cell.samples else "")


def _cautions(variants: Sequence[Variant], tables: Sequence[Table]) -> list[str]:
    """What a reader must know before believing the tables, a sentence each.

    Args:
      variants: of one data set.
      tables: theirs, at least one.
    """
    cells = [c for table in tables for row in table.rows for c in row.cells.values()]
    counted, found = any(cell.samples for cell in cells), list(_other_keys(variants))
    if {cell.seeds for cell in cells} == {1}:
        what = "Intervals are over test samples" if counted else "There are no intervals"
        found.append(
            f"Every number is of one seed. {what}; how much another seed moves a number nothing "
            "says here: give the workdirs of several seeds."
        )
        if len(seeds := sorted({run.summary["seed"] for one in variants for run in one.runs})) > 1:
            found.append(
                f"The rows are of different seeds ({', '.join(map(str, seeds))}): a difference may "
                "be the seeds' own. Give runs of the same seeds."
            )
    elif min(cell.seeds for cell in cells) < 3:
        found.append(
            "Intervals over two seeds are wide, because two numbers say little of how much seeds "
            "vary: a third makes them a third as wide, or narrower."
        )
    if not counted and tables[0].score == "accuracy":
        found.append(
            "The number of test samples is not known: these runs wrote no data.json, as versions "
            "before 0.2 did not. Trained again with this version they do."
        )
    if (most := max(len(table.rows) for table in tables)) > _MANY:
        found.append(
            f"The best of {most} rows is chosen by the very numbers that are compared, which "
            "flatters it; an interval is for one comparison that was meant beforehand."
        )
    runs = [run for variant in variants for run in variant.runs]
    if len({run.about["data"] for run in runs}) > len(
        {(run.summary["seed"], run.target, spell(run.config["data.fraction"])) for run in runs}
    ):
        found.append("Runs of one seed and target have different data (their hash differs).")
    return found


def _other_keys(variants: Sequence[Variant]) -> Iterator[str]:
    """Sentences on keys that differ, but for those that labels name."""
    configs = [relevant(variant.runs[0]) for variant in variants]
    told = {key for variant in variants for key in variant.keys} | _OF_ROWS
    for key in sorted(set.intersection(*map(set, configs)) - told):
        labels: dict[str, list[str]] = {}
        for variant, config in zip(variants, configs, strict=True):
            if key != "weigh" or not _weighs_its_own_way(variant):
                labels.setdefault(spell(config[key]), []).append(variant.label)
        if len(labels) > 1:
            said = ", ".join(f"{value} ({_named(names)})" for value, names in labels.items())
            yield f"These runs differ in more than their method: {key} is {said}."


def _weighs_its_own_way(variant: Variant) -> bool:
    return has_own_weighing(variant.method) and not variant.runs[0].config["weigh"]


def _named(names: Sequence[str], most: int = 6) -> str:
    """At most so many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _paper_notes(tables: Sequence[Table]) -> list[str]:
    """In what runs differ from the protocols of the papers whose numbers stand beside them."""
    said: dict[tuple[str, str], dict[str, None]] = {}
    for table in tables:
        for row in table.rows:
            for column in row.cells:
                for one in beside(table, row, column):
                    said.setdefault((one.table, one.differs), {})[row.variant] = None
    return [
        f"Beside {table}, {_named(list(labels))} differ{'s' * (len(labels) == 1)} in {differs}."
        for (table, differs), labels in said.items()
    ]
