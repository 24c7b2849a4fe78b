"""Tables of scores for the page, Markdown, LaTeX and CSV, with sentences on which row is best."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from fedjax_bn.arguments import text as texts
from fedjax_bn.report.blocks import TableCell, block
from fedjax_bn.report.published import beside
from fedjax_bn.report.results import MEAN, Interval, Row, Table, of_batches
from fedjax_bn.report.runs import (
    EQUALS_FEDAVG,
    Variant,
    has_equal_steps,
    relevant,
    samples_scored,
    spell,
)
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
_FIELDS = (
    *("dataset", "table", "variant", "adaptation", "column", "score", "low", "high", "deviation"),
    *("tested_on", "seeds", "samples"),
    *("baseline", "difference", "difference_low", "difference_high", "common"),
    *("published", "published_std", "published_in"),
)


def first_screen(variants: Sequence[Variant], tables: Sequence[Table]) -> list[Markup]:
    """Returns the best row of each table of one data set, the tables, and cautions about them."""
    return [
        block("paragraphs", [_verdict(table) for table in tables], "verdict"),
        *(block("sortable_table", "", _heads(table), _cells(table)) for table in tables),
        block("explanation", "scores", samples_scored(variants)),
        block("paragraphs", [*_cautions(variants, tables), *_other_keys(variants)], "missing"),
        block("paragraphs", list(_paper_notes(tables)), "soft"),
    ]


def text_files(named: Mapping[str, Sequence[Table]]) -> dict[str, str]:
    """Returns file suffix (.md, .tex, .csv) -> the text of all tables, from data set -> tables.

    LaTeX needs booktabs. CSV has all digits, and a line for each cell and published number.
    """
    markdown, latex = [], []
    for title, tables in named.items():
        markdown.append(f"## {_in_markdown(title)}\n")
        latex.append(f"% {texts.shown(title)}\n")
        for table in tables:
            size = " and ".join(dict.fromkeys(size for row in table.rows for size in row.sizes))
            caption = (
                f"{table.part.capitalize()} {table.score} in percent{size and f' at {size}'}, "
                f"{_WHOSE[table.name]}, mean (standard deviation over seeds); best bold; 95 % "
                f"intervals in brackets; differences are to {table.baseline}, over the clients "
                "that both have."
            )
            heads, *rows = _as_texts(table, _in_markdown, "**{}**", " [{}]")
            lines = [f"| {' | '.join(line)} |\n" for line in (heads, ["---"] * len(heads), *rows)]
            markdown.append(f"{_in_markdown(caption)}\n\n{''.join(lines)}")
            rows = _as_texts(table, _in_latex, "\\textbf{{{}}}", " {{\\scriptsize [{}]}}")
            heads, *body = (" & ".join(row) + " \\\\\n" for row in rows)
            inside = f"\\toprule\n{heads}\\midrule\n{''.join(body)}\\bottomrule\n"
            form = "l" + "r" * (len(rows[0]) - 1)
            tabular = f"\\begin{{tabular}}{{{form}}}\n{inside}\\end{{tabular}}\n"
            latex.append(f"% {texts.shown(caption)}\n{tabular}")
    return {".md": "\n".join(markdown), ".tex": "\n".join(latex), ".csv": _long_csv(named)}


def _as_texts(table: Table, escape: Callable[[str], str], bold: str, note: str) -> list[list[str]]:
    """Returns heads and rows of a table, with the given formats for bold text and for notes."""

    def write(cell: TableCell) -> str:
        # bold text and the sign of a difference say what the arrows on the page do
        text = str(cell.text).lstrip("▲▼ ")
        text = "-" if text in ("", "baseline") else bold.format(text) if cell.best else text
        return text + "".join(note.format(line) for line in cell.notes)

    rows = [[escape(row[0].text), *map(write, row[1:])] for row in _cells(table)]
    return [[*map(escape, _heads(table))], *rows]


def _in_markdown(label: str) -> str:
    return texts.shown(label).replace("|", "\\|")


def _in_latex(label: str) -> str:
    return "".join(_IN_LATEX.get(letter, letter) for letter in texts.shown(label))


def _long_csv(named: Mapping[str, Sequence[Table]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_FIELDS)
    pairs = [(name, table) for name, tables in named.items() for table in tables]
    for dataset, table, row in ((*pair, row) for pair in pairs for row in pair[1].rows):
        for column, cell in row.cells.items():
            names = (dataset, table.name, row.variant, row.adaptation, column)
            numbers = _digits([*cell.value, cell.deviation])
            line = [*map(texts.cell, names), *numbers, row.part, cell.seeds]
            line += [cell.samples or "", texts.cell(table.baseline)]
            line += [*_digits(cell.versus or Interval(np.nan)), cell.common or ""]
            # `csv` writes None as an empty field.
            printed = [(n.mean, n.std, n.source) for n in beside(table, row, column)]
            writer.writerows([*line, *ends] for ends in printed or [("", "", "")])
    return file.getvalue()


def _digits(numbers: Sequence[float]) -> list[str]:
    """Returns numbers with all digits; "" for NaN."""
    return ["" if np.isnan(x) else repr(float(x)) for x in numbers]


def _limits(interval: Interval, form: str) -> list[str]:
    return [f"{interval.low:{form}} to {interval.high:{form}}"] if interval.known else []


def _heads(table: Table) -> list[str]:
    main, *clients = table.columns
    name = table.name if table.part == "test" else f"{table.name}, {table.part}"
    return [name, main, f"vs {table.baseline}", *clients, "seeds", "n"]


def _cells(table: Table) -> list[list[TableCell]]:
    """Returns the rows of a table; the difference to the baseline follows the first score."""
    winners = {}
    for column in table.columns:
        ranked = table.ranked(column)
        # A single row is not marked as best, nor is one among rows of other samples.
        if len(ranked) > 1 and table.compares(column):
            winners[column] = ranked[0].label
    rows = []
    for row in table.rows:
        scores = dict.fromkeys(table.columns, TableCell("-"))
        for column, scored in row.cells.items():
            papers = [f"{paper.paper}: {paper.mean:.1f}" for paper in beside(table, row, column)]
            notes, best = [*_limits(scored.value, ".1f"), *papers], winners.get(column) == row.label
            spread = "" if np.isnan(scored.deviation) else f" ({scored.deviation:.1f})"
            scores[column] = TableCell(f"{scored.value.mean:.1f}{spread}", notes, best=best)
        main, *clients = scores.values()
        cell = row.cells.get(table.columns[0])
        seeds, samples = (cell.seeds, cell.samples and f"{cell.samples:,}") if cell else ("-", "-")
        label = row.label if row.part == table.part else f"{row.label} ({row.part})"
        ends = (TableCell(seeds), TableCell(samples or "?"))
        rows.append([TableCell(label), main, _versus(table, row), *clients, *ends])
    return rows


def _versus(table: Table, row: Row) -> TableCell:
    """Returns the difference to the baseline, with an arrow if its interval excludes 0."""
    cell = row.cells.get(table.columns[0])
    if not cell or not cell.versus:
        return TableCell("baseline" if row.label == table.baseline else "", style="soft")
    gap = cell.versus
    mark, style = _MARKS[gap.sign if table.part == "test" else 0]
    common = [] if table.compares(table.columns[0]) else [f"{cell.common} common"]
    return TableCell(f"{mark}{gap.mean:+.1f}", [*_limits(gap, "+.1f"), *common], style)


def _verdict(table: Table) -> str:
    """Returns which row is best in the first column, by how much, and whether that is sure."""
    column = table.columns[0]
    winner, *followers = table.ranked(column)
    best = winner.cells[column]
    of_one = table.name == "unseen" and column != MEAN
    whom = f"Unseen domain {column}" if of_one else _WHOSE[table.name].capitalize()
    whom += "" if table.part == "test" else f", on {table.part} samples"
    if not table.compares(column):
        return f"{whom}: the rows are of different clients or samples, so none is the best."
    start = f"{whom}: {winner.label} has {best.value.mean:.1f} % {table.score}"
    facts = [f"{best.seeds} seed{'s' * (best.seeds > 1)}"]
    facts += [f"{best.samples:,} {winner.part} samples"] if best.samples else []
    if not followers:
        return f"{start} ({', '.join(facts)}). There is nothing to compare it with."
    if winner.label == table.baseline:
        second, gap = followers[0].label, followers[0].cells[column].versus
        # `gap` is second minus baseline; the verdict states baseline minus second
        gap, named = gap and Interval(-gap.mean, -gap.high, -gap.low), f"the next best, {second}"
    else:
        second, gap, named = table.baseline, best.versus, f"the baseline {table.baseline}"
    tied = [label for label in table.tied if label != second]
    ties = f" Not distinguishable from it: {', '.join(tied)}." if tied else ""
    if gap is None:
        return f"{start}, the best here; the baseline has no number to compare.{ties}"
    facts = [*(f"95 % interval {limits}" for limits in _limits(gap, "+.1f")), *facts]
    start += f", the best here: {gap.mean:+.1f} points to {named} ({', '.join(facts)})."
    if table.part != "test":
        meaning = "These samples also chose the round, so they cannot show that it is better."
    elif not gap.known:
        meaning = "Whether that is more than chance is unknown: run other seeds."
    elif gap.sign == 0:
        meaning = "The interval holds 0: the difference may be chance."
    else:
        sure = ", as far as one seed can show" if best.seeds == 1 else ""
        meaning = f"The interval leaves 0 out: the difference is real{sure}."
    return f"{start} {meaning}{ties}"


def _cautions(variants: Sequence[Variant], tables: Sequence[Table]) -> Iterator[str]:
    """Yields sentences on what limits the meaning of the tables."""
    cells = [cell for table in tables for row in table.rows for cell in row.cells.values()]
    runs = [run for variant in variants for run in variant.runs]
    if any(table.part != "test" for table in tables):
        yield "Scores of validation samples, which chose the round, flatter: set config.data.test."
    fednova = [run for run in runs if run.method == "fednova"]
    if fednova and all(has_equal_steps(run.config, run.data) for run in fednova):
        yield f"{EQUALS_FEDAVG}."
    if {cell.seeds for cell in cells} == {1}:
        yield "Every number is of one seed, and intervals are over samples: give several seeds."
        if len(seeds := sorted({run.seed for run in runs})) > 1:
            yield f"The rows are of different seeds ({', '.join(map(str, seeds))}): give the same."
    elif min(cell.seeds for cell in cells) < 3:
        yield "Intervals over two seeds are wide: a third makes them a third as wide, or narrower."
    if (rows := max(len(table.rows) for table in tables)) > _MANY:
        yield f"The best of {rows} rows is chosen by the compared numbers, which flatter it."
    for variant in variants:
        tested, batches, gap = of_batches(variant.runs).get(MEAN, (None, None, None))
        if gap and gap.known and gap.sign:
            yield (
                f"{variant.label}: internal clients have {batches.mean:.1f} with the statistics of "
                f"their test batches, not {tested.mean:.1f}, a difference of "
                f"{_limits(gap, '+.1f')[0]}: see statistics=precise."
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
            values = ", ".join(f"{value} ({', '.join(names)})" for value, names in labels.items())
            yield f"These runs differ in more than their method: {key} is {values}."


def _paper_notes(tables: Sequence[Table]) -> Iterator[str]:
    """Yields sentences on how runs differ from the protocols of the papers beside them."""
    notes: dict[tuple[str, str], dict[str, None]] = {}
    rows = [(table, row) for table in tables for row in table.rows]
    for table, row in rows:
        for column in row.cells:
            for number in beside(table, row, column):
                notes.setdefault((number.table, number.differs), {})[row.variant] = None
    for (table, differs), labels in notes.items():
        yield f"Beside {table}, {', '.join(labels)}: it differs in {differs}."
