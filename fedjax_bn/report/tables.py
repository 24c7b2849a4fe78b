"""Tables of accuracies as plain text."""

from typing import Any

from fedjax_bn.arguments.text import shown

_MEAN = ("mean", "")


def comparison(summaries: list[dict[str, Any]]) -> str:
    """Returns test accuracy in percent by client as text, one row a run.

    Internal clients use their own model of the selected round. The columns after `mean` are unseen
    domains with the adaptation in brackets.
    """
    rows = [columns(summary) for summary in summaries]
    cells = [
        [summary["method"], *(f"{row.get(head, float('nan')):.1f}" for head in rows[0])]
        for summary, row in zip(summaries, rows, strict=True)
    ]
    return grid([[f"{score_of(summaries[0])} %", *map(heading, rows[0])], *cells])


def score_of(summary: dict[str, Any]) -> str:
    """Returns what the percentages of a summary are: accuracy, or mAP50 for a detector."""
    return summary.get("score", "accuracy")


def columns(summary: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Returns column -> percent: of (client, ""), ("mean", ""), then (domain, adaptation)."""
    internal = {(name, ""): value for name, value in summary["accuracy"]["internal"].items()}
    mean = internal.pop(_MEAN)
    unseen = {
        (domain, adaptation): value
        for domain, values in summary["accuracy"]["unseen"].items()
        for adaptation, value in values.items()
    }
    return internal | {_MEAN: mean} | unseen


def heading(column: tuple[str, str]) -> str:
    """Returns the heading of a column of `columns`."""
    name, adaptation = column
    return f"{name} [{adaptation}]" if adaptation else name


def grid(rows: list[list[str]]) -> str:
    """Returns rows as text: the first column to the left, the others right, row 1 underlined."""
    rows = [[shown(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        lines.append("  ".join(cells))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def by_target(
    summaries: dict[str, list[dict[str, Any]]],
) -> dict[tuple[str, str], dict[str, float]]:
    """Returns (method, adaptation) -> target -> percent, and "mean", as the papers' tables have it.

    Args:
      summaries: target -> the summaries of the runs that left it out.
    """
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for target, runs in summaries.items():
        for summary in runs:
            for adaptation, value in summary["accuracy"]["unseen"][target].items():
                rows.setdefault((summary["method"], adaptation), {})[target] = value
    return {key: row | {"mean": sum(row.values()) / len(row)} for key, row in rows.items()}


def targets(rows: dict[tuple[str, str], dict[str, float]], score: str = "accuracy") -> str:
    """Returns the rows of `by_target` as text."""
    named = {f"{method} [{adaptation}]": row for (method, adaptation), row in rows.items()}
    return accuracies(named, f"unseen, {score} %")


def accuracies(rows: dict[str, dict[str, float]], title: str) -> str:
    """Returns row name -> column -> percent as text, `title` in the corner."""
    heads = list(dict.fromkeys(head for row in rows.values() for head in row))
    cells = [
        [name, *(f"{row[head]:.1f}" if head in row else "-" for head in heads)]
        for name, row in rows.items()
    ]
    return grid([[title, *heads], *cells])


def measures(rows: dict[str, dict[str, float | None]], title: str) -> str:
    """Returns row name -> measure -> value as text; loss and area with three digits."""
    heads = list(next(iter(rows.values())))
    forms = {head: ".3f" if head in ("loss", "auc") else ".1f" for head in heads}
    cells = [
        [name, *("-" if row[h] is None else f"{row[h]:{forms[h]}}" for h in heads)]
        for name, row in rows.items()
    ]
    return grid([[title, *heads], *cells])
