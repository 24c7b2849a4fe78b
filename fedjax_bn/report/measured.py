"""Metrics beyond accuracy: loss, balanced accuracy, area under the curve, calibration, as HTML."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedjax_bn.report import html_parts
from fedjax_bn.report.finished_runs import Run
from fedjax_bn.report.scores import MEAN
from fedjax_bn.report.variants import Variant

# name in a summary -> head, form, whether more is better
MEASURES = {
    "balanced_accuracy": ("balanced accuracy %", ".1f", True),
    "auc": ("AUC", ".3f", True),
    "loss": ("cross entropy", ".3f", False),
    "ece": ("calibration error %", ".1f", False),
}
_CAPTION = (
    "Of test samples in the selected round, means over seeds, best bold. Balanced accuracy is the "
    "mean over classes. AUC is the area under the ROC curve, of more than two classes the mean of "
    "each against all others. The calibration error (ECE) has 15 bins."
)
_MISSING = (
    "These runs wrote no measures beyond accuracy, as versions before 0.2 did not: train again "
    "with this version to have them."
)
_Values = Mapping[str, Mapping[str, list[float]]]  # measure -> column -> values of the seeds


def measured(variants: Sequence[Variant]) -> str:
    """A table of all measures, and one a measure by client and by unseen domain."""
    if variants[0].runs[0].score != "accuracy":
        return ""
    inside = {variant.label: _gathered(variant.runs, _inside) for variant in variants}
    outside = {
        f"{variant.label} [{text}]": _gathered(
            variant.runs, lambda run, text=text: _outside(run, text)
        )
        for variant in variants
        for text in _adaptations(variant.runs)
    }
    if not any(inside.values()) and not any(outside.values()):
        return html_parts.paragraphs([_MISSING], "missing")
    parts = [
        _table(whom, _summary(rows), MEASURES)
        for whom, rows in (("Internal clients, their mean", inside), ("Unseen domains", outside))
        if any(rows.values())
    ]
    parts.insert(0, html_parts.paragraphs([_CAPTION], "soft"))
    parts.append("<details><summary>By client and domain</summary>")
    for name, (head, _, _) in MEASURES.items():
        for whom, rows in (("internal clients", inside), ("unseen domains", outside)):
            own = {label: values.get(name, {}) for label, values in rows.items()}
            if any(own.values()):
                columns = dict.fromkeys(column for values in own.values() for column in values)
                forms = {column: (column, *MEASURES[name][1:]) for column in columns}
                parts.append(_table(f"{head[:1].upper()}{head[1:]}, {whom}", own, forms))
    return "\n".join([*parts, "</details>"])


def _gathered(runs: Sequence[Run], read: object) -> dict[str, dict[str, list[float]]]:
    """Measure -> column -> the values of the runs that have one."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, column, value in read(run):
            if value is not None and np.isfinite(value):
                found.setdefault(name, {}).setdefault(column, []).append(value)
    return found


def _inside(run: Run) -> Iterator[tuple[str, str, float | None]]:
    for name, values in run.summary.get("measures", {}).get("internal", {}).items():
        order = sorted(values, key=lambda column: column != MEAN)
        yield from ((name, column, values[column]) for column in order)


def _outside(run: Run, adaptation: str) -> Iterator[tuple[str, str, float | None]]:
    for domain, rows in run.summary.get("measures", {}).get("unseen", {}).items():
        yield from ((name, domain, value) for name, value in rows.get(adaptation, {}).items())


def _adaptations(runs: Sequence[Run]) -> list[str]:
    domains = (run.summary.get("measures", {}).get("unseen", {}).values() for run in runs)
    return list(dict.fromkeys(text for rows in domains for row in rows for text in row))


def _summary(rows: Mapping[str, _Values]) -> dict[str, dict[str, list[float]]]:
    """Row -> measure -> values: the mean over clients where there is one, else all domains."""
    return {
        label: {
            name: columns.get(MEAN, [v for values in columns.values() for v in values])
            for name, columns in measures.items()
        }
        for label, measures in rows.items()
    }


def _table(
    caption: str,
    rows: Mapping[str, Mapping[str, list[float]]],
    columns: Mapping[str, tuple[str, str, bool]],
) -> str:
    """A table of means over seeds, with the best of each column bold.

    Args:
      caption: above it.
      rows: label -> column -> values.
      columns: column -> (head, form, whether more is better).
    """
    rows = {label: values for label, values in rows.items() if values}
    means = {
        label: {column: float(np.mean(values)) for column, values in row.items() if values}
        for label, row in rows.items()
    }
    best = {}
    for column, (_, _, more) in columns.items():
        known = [row[column] for row in means.values() if column in row]
        best[column] = (max if more else min)(known) if len(known) > 1 else None
    body = [
        [
            html_parts.cell(label),
            *(_value(row.get(c), columns[c][1], row.get(c) == best[c]) for c in columns),
        ]
        for label, row in means.items()
    ]
    return html_parts.sortable(caption, ["", *(head for head, _, _ in columns.values())], body)


def _value(value: float | None, form: str, best: bool) -> str:
    if value is None:
        return html_parts.cell("", "")
    text = f"<strong>{value:{form}}</strong>" if best else f"{value:{form}}"
    mark = ' class="best"' if best else ""
    return f'<td{mark} data-value="{value!r}">{text}</td>'
