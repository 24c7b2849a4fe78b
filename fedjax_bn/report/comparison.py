"""Tables of scores for the page, Markdown, LaTeX and CSV, with sentences on which row is best."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fedjax_bn.arguments import text as texts
from fedjax_bn.report.blocks import Block, Paragraphs, SortableTable, TableCell
from fedjax_bn.report.finished_runs import (
    EQUALS_FEDAVG,
    Variant,
    has_equal_steps,
    relevant,
    samples_scored,
    sizes_of_masks,
    spell,
)
from fedjax_bn.report.intervals import Interval
from fedjax_bn.report.published import beside
from fedjax_bn.report.results import MEAN, Table
from fedjax_bn.run.experiment.method import has_own_weighing

_MARKS = {1: ("▲ ", "up"), -1: ("▼ ", "down"), 0: ("", "soft")}
_MANY = 4  # rows; the best of more rows is chosen by the numbers that are compared
_IN_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}
_WHOSE = {"internal": "internal clients, each with its own model", "unseen": "unseen domains"}
_GROUPS = ("internal clients", "unseen domains")  # of the tables
_FIELDS = (
    *("dataset", "table", "variant", "adaptation", "column", "score", "low", "high"),
    *("tested_on", "seeds", "samples"),
    *("baseline", "difference", "difference_low", "difference_high", "common"),
    *("published", "published_std", "published_in"),
)


def first_screen(variants: Sequence[Variant], tables: Sequence[Table]) -> list[Block]:
    """Returns the best row of each table, the tables, and cautions about them.

    Args:
      variants: those of one data set.
      tables: the tables of these variants, at least one.
    """
    scores = [f"{table.part} {table.score}" for table in tables]
    if len({*scores}) == 1:
        scores = scores[:1]
    else:
        scores = [f"{score} of {whose}" for score, whose in zip(scores, _GROUPS, strict=True)]
    about = (
        f"In percent, of the selected round: {' and '.join(scores)}. Best bold; below it the 95 % "
        "interval, and what papers print. vs: points more than that row, over the clients that "
        f"both have. n: {samples_scored(variants)} of a seed."
    )
    about = " ".join(filter(None, (about, sizes_of_masks(variants))))
    return [
        Paragraphs([_verdict(table) for table in tables], "verdict"),
        *(SortableTable("", *_heads_and_rows(table, _page_cell)) for table in tables),
        Paragraphs([about], "soft"),
        Paragraphs(list(_cautions(variants, tables)), "missing"),
        Paragraphs(list(_paper_notes(tables)), "soft"),
    ]


def text_files(named: Mapping[str, Sequence[Table]]) -> dict[str, str]:
    """Returns file suffix (.md, .tex, .csv) -> the text of all tables in that format.

    Markdown and LaTeX (booktabs) print the best of a column in bold and limits in brackets. CSV
    has all digits, and one line for each cell and published number.

    Args:
      named: data set -> its tables.
    """
    markdown, latex = [], []
    for title, tables in named.items():
        markdown_parts, latex_parts = [f"## {_in_markdown(title)}"], [f"% {texts.shown(title)}"]
        for table in tables:
            size = " and ".join(dict.fromkeys(size for row in table.rows for size in row.sizes))
            caption = (
                f"{table.part.capitalize()} {table.score} in percent{size and f' at {size}'}, "
                f"{_WHOSE[table.name]}; best bold; 95 % intervals in brackets; differences are to "
                f"{table.baseline}, over the clients that both have."
            )
            head, *rows = _texts(table, _in_markdown, "**{}**", " [{}]")
            lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
            markdown_parts += [_in_markdown(caption), "\n".join(lines)]
            rows = _texts(table, _in_latex, "\\textbf{{{}}}", "$_{{[{}]}}$")
            heads, *body = (" & ".join(row) + r" \\" for row in rows)
            inside = "\n".join((r"\toprule", heads, r"\midrule", *body, r"\bottomrule"))
            columns = "l" + "r" * (len(head) - 1)
            tabular = f"\\begin{{tabular}}{{{columns}}}\n{inside}\n\\end{{tabular}}"
            latex_parts.append(f"% {texts.shown(caption)}\n{tabular}")
        markdown.append("\n\n".join(markdown_parts) + "\n")
        latex.append("\n\n".join(latex_parts) + "\n")
    return {".md": "\n".join(markdown), ".tex": "\n".join(latex), ".csv": _long_csv(named)}


def _in_markdown(label: str) -> str:
    return texts.shown(label).replace("|", "\\|")


def _in_latex(label: str) -> str:
    return "".join(_IN_LATEX.get(letter, letter) for letter in texts.shown(label))


def _long_csv(named: Mapping[str, Sequence[Table]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_FIELDS)
    rows = [
        (dataset, table, row)
        for dataset, tables in named.items()
        for table in tables
        for row in table.rows
    ]
    for dataset, table, row in rows:
        for column, cell in row.cells.items():
            names = (dataset, table.name, row.variant, row.adaptation, column)
            counts = (row.part, cell.seeds, cell.samples or "", texts.cell(table.baseline))
            gap = cell.versus or Interval(float("nan"))
            line = [*map(texts.cell, names), *_digits(cell.value), *counts, *_digits(gap)]
            line.append(cell.common or "")
            printed = [
                (number.mean, "" if number.std is None else number.std, number.source)
                for number in beside(table, row, column)
            ]
            writer.writerows([*line, *ends] for ends in printed or [("", "", "")])
    return file.getvalue()


def _digits(interval: Interval) -> list[str]:
    """Returns the mean and the limits with all digits; "" for NaN."""
    return ["" if np.isnan(x) else repr(float(x)) for x in interval]


def _limits(interval: Interval, form: str) -> list[str]:
    return [f"{interval.low:{form}}", f"{interval.high:{form}}"] if interval.known else []


def _page_cell(
    value: str,
    limits: list[str],
    papers: Sequence[str] = (),
    best: bool = False,
    sign: int | None = None,
) -> TableCell:
    """Returns a cell; a difference to the baseline gets an arrow if its interval excludes 0."""
    mark, style = ("", "") if sign is None else _MARKS[sign]
    notes = [*([" to ".join(limits)] if limits else []), *papers]
    return TableCell(mark + value, notes, style, best)


def _heads_and_rows(
    table: Table, write: Callable[..., object]
) -> tuple[list[str], list[list[object]]]:
    """Returns heads and rows of a table; the difference to the baseline follows the first score.

    Args:
      table: the scores.
      write: makes a cell from the arguments of `_page_cell`.
    """
    main, *clients = table.columns
    ranks = {column: table.ranked(column) for column in table.columns}
    rows = []
    for row in table.rows:
        scores = []
        for column, rank in ranks.items():
            if column not in row.cells:
                scores.append("-")
                continue
            value = row.cells[column].value
            papers = [f"{paper.paper}: {paper.mean:.1f}" for paper in beside(table, row, column)]
            # A single row is not marked as best, nor is one among rows of other samples.
            best = len(rank) > 1 and row is rank[0] and table.compares(column)
            scores.append(write(f"{value.mean:.1f}", _limits(value, ".1f"), papers, best))
        cell = row.cells.get(main)
        if cell and (gap := cell.versus):
            common = [] if table.compares(main) else [f"{cell.common} common"]
            sign = gap.sign if table.part == "test" else 0
            versus = write(f"{gap.mean:+.1f}", _limits(gap, "+.1f"), common, sign=sign)
        else:
            versus = write("baseline" if row.label == table.baseline else "", [], sign=0)
        counts = ["-", "-"]
        if cell:
            counts = [str(cell.seeds), f"{cell.samples:,}" if cell.samples else "?"]
        label = row.label if row.part == table.part else f"{row.label} ({row.part})"
        rows.append([label, scores[0], versus, *scores[1:], *counts])
    name = table.name if table.part == "test" else f"{table.name}, {table.part}"
    return [name, main, f"vs {table.baseline}", *clients, "seeds", "n"], rows


def _texts(table: Table, escape: Callable[[str], str], bold: str, brackets: str) -> list[list[str]]:
    """Returns heads and rows of a table, with the given formats for bold text and limits."""

    def write(
        value: str,
        limits: list[str],
        papers: Sequence[str] = (),
        best: bool = False,
        sign: int | None = None,
    ) -> str:
        del sign
        value = "-" if value in ("", "baseline") else bold.format(value) if best else value
        value += brackets.format(", ".join(limits)) if limits else ""
        return value + "".join(f" ({paper})" for paper in papers)

    heads, rows = _heads_and_rows(table, write)
    return [[*map(escape, heads)], *([escape(row[0]), *row[1:]] for row in rows)]


def _verdict(table: Table) -> str:
    """Returns which row is best in the first column, by how much, and whether that is sure."""
    column = table.columns[0]
    winner, *followers = table.ranked(column)
    best = winner.cells[column]
    whom = _WHOSE[table.name].capitalize()
    if table.name == "unseen" and column != MEAN:
        whom = f"Unseen domain {column}"
    if table.part != "test":
        whom += f", on {table.part} samples"
    if not table.compares(column):
        return (
            f"{whom}: the rows are of different clients or samples, so none is the best. "
            "Differences are over the clients that both rows have."
        )
    start = f"{whom}: {winner.label} has {best.value.mean:.1f} %"
    basis = f", {best.seeds} seed{'s' * (best.seeds > 1)}"
    basis += f", {best.samples:,} {winner.part} samples" if best.samples else ""
    if not followers:
        limits = f" ({best.value.low:.1f} to {best.value.high:.1f})" if best.value.known else ""
        return f"{start}{limits}{basis}. There is nothing to compare it with."
    if winner.label == table.baseline:
        second, gap = followers[0].label, followers[0].cells[column].versus
        # `gap` is second minus baseline; the verdict states baseline minus second
        gap, named = gap and Interval(-gap.mean, -gap.high, -gap.low), f"the next best, {second}"
    else:
        second, gap, named = table.baseline, best.versus, f"the baseline {table.baseline}"
    tied = [label for label in table.tied if label != second]
    ties = f" Not distinguishable from it: {_named(tied, 3)}." if tied else ""
    if gap is None:
        return f"{start}{basis}, the best here; the baseline has no number to compare.{ties}"
    start += f", the best here: {gap.mean:+.1f} points to {named}"
    if table.part != "test":
        limits = f" (95 % interval {gap.low:+.1f} to {gap.high:+.1f})" if gap.known else ""
        return (
            f"{start}{limits}{basis}. These samples also chose the round, so they cannot show that "
            f"it is better on new ones.{ties}"
        )
    if not gap.known:
        chance = "Whether that is more than chance is unknown: run other seeds."
        return f"{start}{basis}. {chance}{ties}"
    start += f" (95 % interval {gap.low:+.1f} to {gap.high:+.1f}{basis})."
    if gap.sign == 0:
        return f"{start} The interval holds 0: the difference may be chance.{ties}"
    sure = ", as far as one seed can show" if best.seeds == 1 else ""
    return f"{start} The interval leaves 0 out: the difference is real{sure}.{ties}"


def _cautions(variants: Sequence[Variant], tables: Sequence[Table]) -> Iterator[str]:
    """Yields sentences on what limits the meaning of the tables."""
    cells = [cell for table in tables for row in table.rows for cell in row.cells.values()]
    runs = [run for variant in variants for run in variant.runs]
    if any(table.part != "test" for table in tables):
        yield (
            "Scores of validation samples flatter, because these samples chose the round: set "
            "data.test, such as --config.data.test=0.2, and train again for scores of samples that "
            "chose nothing."
        )
    yield from _other_keys(variants)
    fednova = [run for run in runs if run.method == "fednova"]
    if fednova and all(has_equal_steps(run.config, run.data) for run in fednova):
        yield f"{EQUALS_FEDAVG}."
    if {cell.seeds for cell in cells} == {1}:
        over_samples = any(cell.samples for cell in cells) and tables[0].score == "accuracy"
        over = f"Intervals are over {samples_scored(variants)}"
        basis = over if over_samples else "Intervals need several seeds"
        yield (
            f"Every number is of one seed. {basis}; how much another seed changes a number is "
            "unknown: give the workdirs of several seeds."
        )
        if len(seeds := sorted({run.seed for run in runs})) > 1:
            yield (
                f"The rows are of different seeds ({', '.join(map(str, seeds))}), which may cause "
                "a difference. Give runs of the same seeds."
            )
    elif min(cell.seeds for cell in cells) < 3:
        yield (
            "Intervals over two seeds are wide, because two numbers show little of how much seeds "
            "vary: a third makes them a third as wide, or narrower."
        )
    if (rows := max(len(table.rows) for table in tables)) > _MANY:
        yield (
            f"The best of {rows} rows is chosen by the numbers that are compared, which flatters "
            "it; an interval is for one comparison that was planned before."
        )
    # the hash covers the drawn samples and the target, so each such setting may have its own hash
    settings = {(run.seed, run.target, spell(run.config["data.fraction"])) for run in runs}
    if len({run.about["data"] for run in runs}) > len(settings):
        yield "Runs of one seed and target have different data (their hash differs)."


def _other_keys(variants: Sequence[Variant]) -> Iterator[str]:
    """Yields sentences on keys that differ, except keys in labels and a method's own rules."""
    configs = [relevant(variant.runs[0]) for variant in variants]
    # what a method shares is part of the method, not another setting
    labelled = {"share"} | {key for variant in variants for key in variant.keys}
    for key in sorted(set.intersection(*map(set, configs)) - labelled):
        labels: dict[str, list[str]] = {}
        for variant, config in zip(variants, configs, strict=True):
            by_method = has_own_weighing(variant.method) and not variant.runs[0].config["weigh"]
            if key != "weigh" or not by_method:
                labels.setdefault(spell(config[key]), []).append(variant.label)
        if len(labels) > 1:
            values = ", ".join(f"{value} ({_named(whose)})" for value, whose in labels.items())
            yield f"These runs differ in more than their method: {key} is {values}."


def _paper_notes(tables: Sequence[Table]) -> Iterator[str]:
    """Yields sentences on how runs differ from the protocols of the papers beside them."""
    notes: dict[tuple[str, str], dict[str, None]] = {}
    for table in tables:
        for row in table.rows:
            for column in row.cells:
                for number in beside(table, row, column):
                    notes.setdefault((number.table, number.differs), {})[row.variant] = None
    for (table, differs), labels in notes.items():
        verb = "differs" if len(labels) == 1 else "differ"
        yield f"Beside {table}, {_named(list(labels))} {verb} in {differs}."


def _named(labels: Sequence[str], limit: int = 6) -> str:
    """Returns at most `most` labels, and how many more there are."""
    end = f" and {len(labels) - limit} more" if len(labels) > limit else ""
    return ", ".join(labels[:limit]) + end
