"""Writes tables of scores as HTML, Markdown, LaTeX and CSV, with sentences on which row is best."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence

from fedjax_bn.arguments import text as texts
from fedjax_bn.report.finished_runs import (
    EQUALS_FEDAVG,
    Variant,
    has_equal_steps,
    relevant,
    samples_scored,
    sizes_of_masks,
    spell,
)
from fedjax_bn.report.html_parts import cell, joined, paragraphs, sortable
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
    **{one: f"\\{one}" for one in "&%$#_{}"},
}
_WHOSE = {"internal": "internal clients, each with its own model", "unseen": "unseen domains"}
_GROUPS = ("internal clients", "unseen domains")  # of the tables
_FIELDS = (
    *("dataset", "table", "variant", "adaptation", "column", "score", "low", "high"),
    *("tested_on", "seeds", "samples"),
    *("baseline", "difference", "difference_low", "difference_high", "common"),
    *("published", "published_std", "published_in"),
)


def first_screen(variants: Sequence[Variant], tables: Sequence[Table]) -> str:
    """Returns the best row of each table, the tables, and cautions about them, as HTML.

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
    return joined(
        paragraphs(map(_verdict, tables), "verdict"),
        *(sortable("", *_parts(table, _in_html)) for table in tables),
        paragraphs([about], "soft"),
        paragraphs(_cautions(variants, tables), "missing"),
        paragraphs(_paper_notes(tables), "soft"),
    )


def text_files(named: Mapping[str, Sequence[Table]]) -> dict[str, str]:
    """Returns file suffix (.md, .tex, .csv) -> the text of all tables in that format.

    Markdown and LaTeX (booktabs) print the best of a column in bold and limits in brackets. CSV
    has all digits, and one line for each cell and published number.

    Args:
      named: data set -> its tables.
    """
    markdown, latex = [], []
    for title, tables in named.items():
        one, other = [f"## {_in_markdown(title)}"], [f"% {texts.shown(title)}"]
        for table in tables:
            size = " and ".join(dict.fromkeys(size for row in table.rows for size in row.sizes))
            caption = (
                f"{table.part.capitalize()} {table.score} in percent{size and f' at {size}'}, "
                f"{_WHOSE[table.name]}; best bold; 95 % intervals in brackets; differences are to "
                f"{table.baseline}, over the clients that both have."
            )
            head, *rows = _texts(table, _in_markdown, "**{}**", " [{}]")
            lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
            one += [_in_markdown(caption), "\n".join(lines)]
            rows = _texts(table, _in_latex, "\\textbf{{{}}}", "$_{{[{}]}}$")
            first, *body = (" & ".join(row) + r" \\" for row in rows)
            inside = "\n".join((r"\toprule", first, r"\midrule", *body, r"\bottomrule"))
            columns = "l" + "r" * (len(head) - 1)
            tabular = f"\\begin{{tabular}}{{{columns}}}\n{inside}\n\\end{{tabular}}"
            other.append(f"% {texts.shown(caption)}\n{tabular}")
        markdown.append("\n\n".join(one) + "\n")
        latex.append("\n\n".join(other) + "\n")
    return {".md": "\n".join(markdown), ".tex": "\n".join(latex), ".csv": _long_csv(named)}


def _in_markdown(text: str) -> str:
    return texts.shown(text).replace("|", "\\|")


def _in_latex(text: str) -> str:
    return "".join(_IN_LATEX.get(one, one) for one in texts.shown(text))


def _long_csv(named: Mapping[str, Sequence[Table]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_FIELDS)
    every = [(dataset, table) for dataset, tables in named.items() for table in tables]
    for dataset, table, row in [(*one, row) for one in every for row in one[1].rows]:
        for column, one in row.cells.items():
            start = (dataset, table.name, row.variant, row.adaptation, column)
            counts = (row.part, one.seeds, one.samples or "", texts.cell(table.baseline))
            versus = one.versus or Interval(float("nan"))
            value, gap = (["" if x != x else repr(float(x)) for x in ends]
                          for ends in (one.value, versus))  # fmt: skip
            line = [*map(texts.cell, start), *value, *counts, *gap, one.common or ""]
            printed = [(p.mean, "" if p.std is None else p.std, p.source)
                       for p in beside(table, row, column)]  # fmt: skip
            writer.writerows([*line, *end] for end in printed or [("", "", "")])
    return file.getvalue()


def _limits(interval: Interval, form: str) -> list[str]:
    return [f"{interval.low:{form}}", f"{interval.high:{form}}"] if interval.known else []


def _in_html(
    text: str, limits: list[str], papers: Sequence[str] = (), best: bool = False, sign: int = 9
) -> str:
    """Returns a cell; a difference to the baseline gets an arrow if its interval excludes 0."""
    mark, kind = _MARKS.get(sign, ("", ""))
    return cell(mark + text, [*[" to ".join(limits)] * bool(limits), *papers], kind, best)


def _parts(table: Table, write: Callable[..., str]) -> tuple[list[str], list[list[str]]]:
    """Returns heads and rows of a table; the difference to the baseline follows the first score.

    Args:
      table: the scores.
      write: makes a cell from the arguments of `_in_html`.
    """
    first, *others = table.columns
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
        one = row.cells.get(first)
        if one and (gap := one.versus):
            common = [f"{one.common} common"] * (not table.compares(first))
            sign = gap.sign if table.part == "test" else 0
            versus = write(f"{gap.mean:+.1f}", _limits(gap, "+.1f"), common, sign=sign)
        else:
            versus = write("baseline" if row.label == table.baseline else "", [], sign=0)
        counts = [str(one.seeds), f"{one.samples:,}" if one.samples else "?"] if one else ["-", "-"]
        label = row.label if row.part == table.part else f"{row.label} ({row.part})"
        rows.append([label, scores[0], versus, *scores[1:], *counts])
    name = table.name if table.part == "test" else f"{table.name}, {table.part}"
    return [name, first, f"vs {table.baseline}", *others, "seeds", "n"], rows


def _texts(table: Table, escape: Callable[[str], str], bold: str, brackets: str) -> list[list[str]]:
    """Returns heads and rows of a table, with the given formats for bold text and limits."""

    def write(
        text: str, limits: list[str], papers: Sequence[str] = (), best: bool = False, sign: int = 0
    ) -> str:
        del sign
        text = "-" if text in ("", "baseline") else bold.format(text) if best else text
        text += brackets.format(", ".join(limits)) if limits else ""
        return text + "".join(f" ({paper})" for paper in papers)

    heads, rows = _parts(table, write)
    return [[*map(escape, heads)], *([escape(row[0]), *row[1:]] for row in rows)]


def _verdict(table: Table) -> str:
    """Returns which row is best in the first column, by how much, and whether that is sure."""
    column = table.columns[0]
    first, *others = table.ranked(column)
    best = first.cells[column]
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
    start = f"{whom}: {first.label} has {best.value.mean:.1f} %"
    basis = f", {best.seeds} seed{'s' * (best.seeds > 1)}"
    basis += f", {best.samples:,} {first.part} samples" if best.samples else ""
    if not others:
        limits = f" ({best.value.low:.1f} to {best.value.high:.1f})" if best.value.known else ""
        return f"{start}{limits}{basis}. There is nothing to compare it with."
    if first.label == table.baseline:
        second, gap = others[0].label, others[0].cells[column].versus
        # `gap` is second minus baseline; the verdict states baseline minus second
        gap, named = gap and Interval(-gap.mean, -gap.high, -gap.low), f"the next best, {second}"
    else:
        second, gap, named = table.baseline, best.versus, f"the baseline {table.baseline}"
    tied = [label for label in table.tied if label != second]
    more = f" Not distinguishable from it: {_named(tied, 3)}." if tied else ""
    if gap is None:
        return f"{start}{basis}, the best here; the baseline has no number to compare.{more}"
    start += f", the best here: {gap.mean:+.1f} points to {named}"
    if table.part != "test":
        limits = f" (95 % interval {gap.low:+.1f} to {gap.high:+.1f})" if gap.known else ""
        return (
            f"{start}{limits}{basis}. These samples also chose the round, so they cannot show that "
            f"it is better on new ones.{more}"
        )
    if not gap.known:
        chance = "Whether that is more than chance is unknown: run other seeds."
        return f"{start}{basis}. {chance}{more}"
    start += f" (95 % interval {gap.low:+.1f} to {gap.high:+.1f}{basis})."
    if gap.sign == 0:
        return f"{start} The interval holds 0: the difference may be chance.{more}"
    sure = ", as far as one seed can show" if best.seeds == 1 else ""
    return f"{start} The interval leaves 0 out: the difference is real{sure}.{more}"


def _cautions(variants: Sequence[Variant], tables: Sequence[Table]) -> Iterator[str]:
    """Yields sentences on what limits the meaning of the tables."""
    cells = [one for table in tables for row in table.rows for one in row.cells.values()]
    runs = [run for variant in variants for run in variant.runs]
    counted = any(one.samples for one in cells)
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
    if {one.seeds for one in cells} == {1}:
        over_samples = counted and tables[0].score == "accuracy"
        over = f"Intervals are over {samples_scored(variants)}"
        what = over if over_samples else "Intervals need several seeds"
        yield (
            f"Every number is of one seed. {what}; how much another seed changes a number is "
            "unknown: give the workdirs of several seeds."
        )
        if len(seeds := sorted({run.seed for run in runs})) > 1:
            yield (
                f"The rows are of different seeds ({', '.join(map(str, seeds))}), which may cause "
                "a difference. Give runs of the same seeds."
            )
    elif min(one.seeds for one in cells) < 3:
        yield (
            "Intervals over two seeds are wide, because two numbers show little of how much seeds "
            "vary: a third makes them a third as wide, or narrower."
        )
    if not counted and tables[0].score == "accuracy":
        yield (
            f"The number of {samples_scored(variants)} is not known: these runs wrote no "
            "data.json, as versions before 0.2 did not. Trained again with this version they do."
        )
    if (most := max(len(table.rows) for table in tables)) > _MANY:
        yield (
            f"The best of {most} rows is chosen by the numbers that are compared, which flatters "
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
    known = {"share"} | {key for variant in variants for key in variant.keys}
    for key in sorted(set.intersection(*map(set, configs)) - known):
        labels: dict[str, list[str]] = {}
        for variant, config in zip(variants, configs, strict=True):
            own = has_own_weighing(variant.method) and not variant.runs[0].config["weigh"]
            if key != "weigh" or not own:
                labels.setdefault(spell(config[key]), []).append(variant.label)
        if len(labels) > 1:
            each = ", ".join(f"{value} ({_named(who)})" for value, who in labels.items())
            yield f"These runs differ in more than their method: {key} is {each}."


def _paper_notes(tables: Sequence[Table]) -> Iterator[str]:
    """Yields sentences on how runs differ from the protocols of the papers beside them."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for table in tables:
        for row in table.rows:
            for column in row.cells:
                for one in beside(table, row, column):
                    found.setdefault((one.table, one.differs), {})[row.variant] = None
    for (table, differs), labels in found.items():
        verb = "differs" if len(labels) == 1 else "differ"
        yield f"Beside {table}, {_named(list(labels))} {verb} in {differs}."


def _named(labels: Sequence[str], most: int = 6) -> str:
    """Returns at most `most` labels, and how many more there are."""
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return ", ".join(labels[:most]) + more
