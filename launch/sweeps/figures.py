"""Figures of a sweep from its finished runs, as PNG bytes; None where none has finished.

Those of a table's numbers draw the table itself: bars of its columns, or lines over them. Curves
over rounds are in `curves`.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from plan import Table, finished
from report import measured, printed, read_results, read_summary

from fedjax_bn.engine.figures import png
from fedjax_bn.report.unseen import ablation

STYLES = ("--o", "-s", ":^", "-.v")  # of methods


def bars(workdir: Path, table: Table) -> bytes | None:
    """The numbers of a table as bars with standard deviations; published ones as crosses."""
    values = _measured(workdir, table)
    used = [i for i in range(len(table.columns)) if any(row[i] for row in values.values())]
    if not used:
        return None
    figure = Figure(figsize=(max(6, 1.6 * len(used)), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(values)
    for row, (label, cells) in enumerate(values.items()):
        place = np.arange(len(used)) + (row - (len(values) - 1) / 2) * width
        means = [cells[i][0] if cells[i] else np.nan for i in used]
        errors = [(cells[i][1] or 0) if cells[i] else 0 for i in used]
        axes.bar(place, means, width, yerr=errors, capsize=2, label=label)
        theirs = [table.rows[label][i] and printed(table.rows[label][i]) for i in used]
        axes.plot(place, [p[0] if p else np.nan for p in theirs], "kx", markersize=4)
    axes.set_xticks(range(len(used)), [table.columns[i] for i in used])
    axes.set(ylabel="test accuracy, % (x: published)")
    figure.legend(loc="outside upper center", ncols=min(3, len(values)), fontsize="small")
    return png(figure)


def lines(workdir: Path, table: Table, xlabel: str, log: bool = False) -> bytes | None:
    """A table whose columns are values of a setting, as one line a row.

    Args:
      workdir: of the sweep.
      table: its columns are numbers, perhaps with a unit behind; rows are named "DOMAIN, METHOD":
        one colour a domain, one line style a method.
      xlabel: what the setting is.
      log: whether its axis is logarithmic.
    """
    values = _measured(workdir, table)
    settings = [float(column.rstrip("%")) for column in table.columns]
    domains = list(dict.fromkeys(label.rpartition(", ")[0] for label in values))
    methods = list(dict.fromkeys(label.rpartition(", ")[2] for label in values))
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for label, cells in values.items():
        domain, _, method = label.rpartition(", ")
        points = sorted((x, c[0]) for x, c in zip(settings, cells, strict=True) if c)
        if points:
            style = STYLES[methods.index(method) % len(STYLES)]
            colour = f"C{domains.index(domain)}"
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
    if not axes.lines:
        return None
    axes.set(xlabel=xlabel, ylabel="test accuracy, %", xscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="x-small")
    return png(figure)


def _measured(workdir: Path, table: Table) -> dict[str, list[tuple[float, float | None] | None]]:
    """The rows of a table that have cells, as `report.measured` gives them."""
    done = {r.name: read_results(workdir, r) for r in table.runs if finished(workdir, r.name)}
    return {
        label: [measured(cell, done) if cell else None for cell in cells]
        for label, cells in table.rows.items()
        if any(cell and cell.runs for cell in cells)
    }


def adaptations(
    workdir: Path,
    runs: Mapping[str, Sequence[str]],
    label: str,
    spelled: Mapping[float, str],
    logarithmic: bool = False,
    test: str = "",
) -> bytes | None:
    """Accuracy on unseen domains over a setting of their statistics; dotted with running ones.

    Args:
      workdir: of the sweep.
      runs: unseen domain -> names of the runs that left it out, one a seed.
      label: what the setting is.
      spelled: setting -> the adaptation in the runs' results.
      logarithmic: whether the setting's axis is.
      test: the evaluation that has them; empty: the summary.
    """
    values, baseline = _by_setting(workdir, runs, spelled, test)
    return ablation(values, label, baseline, logarithmic) if values else None


def boxes(
    workdir: Path,
    runs: Mapping[str, Sequence[str]],
    label: str,
    spelled: Mapping[float, str],
    test: str = "",
) -> bytes | None:
    """Accuracy on unseen domains, a box over the seeds for each setting (TsmoBN, Fig. 3c).

    Args:
      workdir, runs, label, spelled, test: as of `adaptations`.
    """
    values, _ = _by_setting(workdir, runs, spelled, test)
    if not values:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, width, drawn = figure.subplots(), 0.8 / len(values), []
    for k, row in enumerate(values.values()):
        places = np.array([*row], float) + (k - (len(values) - 1) / 2) * width
        look = {"boxprops": {"facecolor": f"C{k}"}, "medianprops": {"color": "black"}}
        parts = axes.boxplot(
            [*row.values()],
            positions=places,
            widths=0.8 * width,
            patch_artist=True,
            manage_ticks=False,
            **look,
        )
        drawn.append(parts["boxes"][0])
    axes.set(xlabel=label, ylabel="test accuracy, %", xticks=sorted(spelled))
    axes.grid(axis="y", alpha=0.3)
    figure.legend(drawn, [*values], loc="outside upper center", ncols=len(drawn), fontsize="small")
    return png(figure)


def _by_setting(
    workdir: Path, runs: Mapping[str, Sequence[str]], spelled: Mapping[float, str], test: str
) -> tuple[dict[str, dict[float, list[float]]], dict[str, float]]:
    """Domain -> setting -> percent of each run, and domain -> mean with running statistics."""
    values: dict[str, dict[float, list[float]]] = {}
    baseline: dict[str, float] = {}
    for domain, names in runs.items():
        scores = [_unseen(workdir, name, test).get(domain, {}) for name in names]
        row = {s: [k[way] for k in scores if way in k] for s, way in spelled.items()}
        row = {setting: repeats for setting, repeats in row.items() if repeats}
        plain = [known["running"] for known in scores if "running" in known]
        if row:
            values[domain] = row
        if row and plain:
            baseline[domain] = float(np.mean(plain))
    return values, baseline


def _unseen(workdir: Path, name: str, test: str) -> dict[str, dict[str, float]]:
    """Domain -> adaptation -> percent of a finished run or its evaluation; {} of no such."""
    if not test:
        return read_summary(workdir, name)["accuracy"]["unseen"] if finished(workdir, name) else {}
    path = workdir / name / "evaluations" / f"{test}.json"
    return json.loads(path.read_text())["unseen"] if path.exists() else {}


def pictures(workdir: Path, files: Sequence[str]) -> bytes | None:
    """Pictures that the runs drew, those that are there below each other.

    Args:
      workdir: of the sweep.
      files: globs of their paths in it.
    """
    from PIL import Image

    there = [path for file in files for path in sorted(workdir.glob(file))]
    found = [Image.open(path).convert("RGB") for path in there]
    if not found:
        return None
    size = max(image.width for image in found), sum(image.height for image in found)
    whole, top = Image.new("RGB", size, "white"), 0
    for image in found:
        whole.paste(image, (0, top))
        top += image.height
    buffer = io.BytesIO()
    whole.save(buffer, format="png")
    return buffer.getvalue()
