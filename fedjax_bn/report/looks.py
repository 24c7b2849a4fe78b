"""How lines are drawn: each in its colour, or, of many, the best ones before the grey others."""

from collections.abc import Mapping, Sequence

from fedjax_bn.report.charts import COLOURS, Line, Look
from fedjax_bn.report.results import Table, ranked

_MOST_LINES = 12  # that are all coloured


def looks_of(styles: Mapping[str, tuple[int, int]], table: Table) -> dict[str, Look]:
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


def coloured(lines: Sequence[Line], looks: Mapping[str, Look]) -> list[Line]:
    """The lines, each with the look of its name."""
    return [line._replace(look=looks[line.name]) for line in lines]
