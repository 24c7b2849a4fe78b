"""Curves over rounds: of every variant, client, unseen domain and adaptation, as HTML."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedjax_bn.run.groups import some_of
from fedjax_bn.run.records import Record
from fedjax_bn.run.report import html_parts
from fedjax_bn.run.report.charts import Line, chart, key_of
from fedjax_bn.run.report.finished_runs import Run, Variant
from fedjax_bn.run.report.scores import MEAN

_MOST = 24  # charts of a section; of more columns some are shown, evenly spaced
Values = dict[str, float | None]  # column -> value, of one round


def convergence(variants: Sequence[Variant]) -> str:
    """Test scores, losses, weights and masks over rounds."""
    score = variants[0].runs[0].score
    return "\n".join(
        (
            _section(f"Test {score} of internal clients", variants, _of("accuracy")),
            _unseen(f"Test {score} of unseen domains", variants),
            _section("Training loss", variants, _of("loss"), folded=True),
            _section("Training loss after aggregation", variants, _of("train_loss"), folded=True),
            _section("Aggregation weights, where they vary", variants, _varying, folded=True),
            _section("L1 norm of the masks", variants, _of("mask_l1")),
        )
    )


def _section(
    title: str,
    variants: Sequence[Variant],
    read: Callable[[Run], list[tuple[int, Values]]],
    folded: bool = False,
) -> str:
    """A chart a column, a line a variant: the mean over seeds, from the least to the greatest.

    Args:
      title: of the section.
      variants: of one data set.
      read: run -> (round, values) of the rounds that have some.
      folded: whether columns other than the mean are shown on demand.
    """
    columns: dict[str, list[Line]] = {}
    for colour, variant in enumerate(variants):
        for column, line in _lines(variant.label, (colour, 0), [read(run) for run in variant.runs]):
            columns.setdefault(column, []).append(line)
    if not columns:
        return ""
    names = [(variant.label, (colour, 0)) for colour, variant in enumerate(variants)]
    first = {column: columns.pop(column) for column in (MEAN,) if folded and column in columns}
    columns = {column: columns[column] for column in sorted(columns, key=lambda c: c != MEAN)}
    shown = [list(columns)[i] for i in some_of(len(columns), _MOST)] if columns else []
    charts = "".join(chart(column, columns[column], "round") for column in shown)
    grid = f'<div class="charts">{charts}</div>' if charts else ""
    if first:
        means = "".join(chart(column, lines, "round") for column, lines in first.items())
        rest = f"<details><summary>By client</summary>{grid}</details>" if grid else ""
        grid = f'<div class="charts">{means}</div>{rest}'
    note = f"{len(shown)} of {len(columns)} are shown." if len(shown) < len(columns) else ""
    return f"<h3>{title}</h3>{key_of(names)}{html_parts.paragraphs([note] * bool(note))}{grid}"


def _unseen(title: str, variants: Sequence[Variant]) -> str:
    """A chart a domain, a line a variant and adaptation."""
    columns: dict[str, list[Line]] = {}
    styles: dict[str, tuple[int, int]] = {}
    dashes: dict[str, int] = {}
    for colour, variant in enumerate(variants):
        texts = dict.fromkeys(t for run in variant.runs for t in _adaptations(run))
        for text in texts:
            label = f"{variant.label} [{text}]"
            read = [[(n, v[text]) for n, v in _outside(run) if text in v] for run in variant.runs]
            styles[label] = colour, dashes.setdefault(text, len(dashes))
            for column, line in _lines(label, styles[label], read):
                columns.setdefault(column, []).append(line)
    if not columns:
        return ""
    charts = "".join(chart(name, lines, "round") for name, lines in columns.items())
    return f'<h3>{title}</h3>{key_of(list(styles.items()))}<div class="charts">{charts}</div>'


def _adaptations(run: Run) -> list[str]:
    return [text for _, values in _outside(run) for text in values]


def _outside(run: Run) -> list[tuple[int, dict[str, Values]]]:
    """(round, adaptation -> domain -> value)."""
    found = []
    for record in run.records:
        turned: dict[str, Values] = {}
        for domain, row in record.get("unseen", {}).items():
            for text, value in row.items():
                turned.setdefault(text, {})[domain] = value
        if turned:
            found.append((record["round"], turned))
    return found


def _lines(
    label: str, style: tuple[int, int], runs: Sequence[Sequence[tuple[int, Values]]]
) -> Iterator[tuple[str, Line]]:
    """(column, its line): the mean over the runs that have a round, and their limits."""
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
        yield column, Line(label, style, rounds, values.mean(1), *ends)


def _of(key: str) -> Callable[[Run], list[tuple[int, Values]]]:
    """The values of a key by client, their plain mean in front."""

    def read(run: Run) -> list[tuple[int, Values]]:
        return [(r["round"], _with_mean(r[key])) for r in run.records if key in r]

    return read


def _with_mean(values: Record) -> Values:
    known = [v for k, v in values.items() if k != MEAN and v is not None and np.isfinite(v)]
    mean = values.get(MEAN, float(np.mean(known)) if known else None)
    return {MEAN: mean} | {k: v for k, v in values.items() if k != MEAN}


def _varying(run: Run) -> list[tuple[int, Values]]:
    """The weights by round; none where every client's stays as it is."""
    rows = [(record["round"], record["weights"]) for record in run.records]
    first = rows[0][1]
    if all(_alike(values, first) for _, values in rows):
        return []
    return rows


def _alike(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(
        one[k] == other[k] or abs((one[k] or 0) - (other[k] or 0)) < 1e-6 for k in one
    )
