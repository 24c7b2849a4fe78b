"""Prints tables of accuracies as plain text."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from fedjax_bn.arguments.text import shown
from fedjax_bn.data.domain import part_of_all

_MEAN = ("mean", "")
# Number formats of measures that are not percentages.
OF_MEASURES = {"loss": ".3f", "auc": ".3f", "auc_interval": ".3f", "counts": ".0f"}
_MOST_COUNTS = 10  # classes whose numbers of samples are shown


def comparison(rows: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Returns accuracy in percent by client as text, from the summaries of each row's seeds."""
    scores = [[columns(summary) for summary in seeds] for seeds in rows]
    heads = [*scores[0][0]]
    cells = [
        [seeds[0]["method"], *(mean_and_deviation([x.get(head) for x in row]) for head in heads)]
        for seeds, row in zip(rows, scores, strict=True)
    ]
    summaries = [summary for seeds in rows for summary in seeds]
    percent = f"{summaries[0].get('score', 'accuracy')} %"
    inside, outside = (
        part_of_all(part_tested(summary, whom) for summary in summaries)
        for whom in ("internal", "unseen")
    )
    if inside != "test":
        of_all = inside == outside or not summaries[0]["accuracy"]["unseen"]
        percent = f"{inside} {percent}" if of_all else f"{percent} (clients: {inside})"
    if (count := len(rows[0])) > 1:
        percent += f", mean (deviation) of {count} seeds"
    return grid([[percent, *map(heading, heads)], *cells])


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """Returns the mean with the standard deviation, if any, in brackets; "-" if one is unknown."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values):
        return "-"
    return f"{fmean(known):.1f}" + (f" ({stdev(known):.1f})" if len(known) > 1 else "")


def part_tested(summary: dict[str, Any], whom: str = "internal") -> str:
    """Returns which samples of the internal clients or unseen domains a summary's scores are of."""
    return summary.get("tested_on", {}).get(whom, "test")


def columns(summary: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Returns column -> percent, in the order (client, ""), ("mean", ""), (domain, adaptation)."""
    # with pairs as keys, a client named "a [running]" does not collide with the domain a
    values = {(name, ""): value for name, value in summary["accuracy"]["internal"].items()}
    values[_MEAN] = values.pop(_MEAN)
    for domain, row in summary["accuracy"]["unseen"].items():
        values |= {(domain, adaptation): value for adaptation, value in row.items()}
    return values


def heading(column: tuple[str, str]) -> str:
    """Returns the heading of a column of `columns`, or the label of a row of `by_target`."""
    name, adaptation = column
    return f"{name} [{adaptation}]" if adaptation else name


def grid(rows: list[list[str]]) -> str:
    """Returns rows as aligned text: first column left, others right, the first row underlined."""
    rows = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *values in rows:
        cells = (cell.rjust(width) for cell, width in zip(values, widths[1:], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *cells)))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def by_target(
    summaries: dict[str, list[dict[str, Any]]],
) -> dict[tuple[str, str], dict[str, float]]:
    """Returns (method, adaptation) -> target -> percent, with their "mean", as papers print it."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for target, runs in summaries.items():
        for summary in runs:
            for adaptation, value in summary["accuracy"]["unseen"][target].items():
                rows.setdefault((summary["method"], adaptation), {})[target] = value
    return {key: row | {"mean": sum(row.values()) / len(row)} for key, row in rows.items()}


def accuracies(
    rows: Mapping[str, Mapping[str, Any]], title: str, forms: Mapping[str, str] = {}
) -> str:
    """Returns row name -> column -> percent as text; `forms` are other columns' number formats."""
    heads = list(dict.fromkeys(head for row in rows.values() for head in row))
    table = [[title, *heads]]
    for name, row in rows.items():
        table.append([name, *(in_form(row.get(head), forms.get(head, ".1f")) for head in heads)])
    return grid(table)


def in_form(value: Any, form: str) -> str:
    """Returns a number, several as "30/12", or "-" for None; of many counts the sum."""
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, float | int):
        return f"{value:{form}}"
    if len(value) > _MOST_COUNTS:
        return f"{sum(value):{form}} in {len(value)} classes"
    return "/".join(f"{x:{form}}" for x in value)
