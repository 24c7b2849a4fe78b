"""Figures of a sweep from its finished runs, as PNG bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from report import accuracy, measured, read_summary
from sweep import Table, finished

from fedjax_bn.report.plots import png

STYLES = ("--o", "-s", ":^", "-.v")  # of methods


def loss_curves(
    workdir: Path, methods: dict[str, Sequence[str]], domains: dict[str, str]
) -> bytes | None:
    """Training loss over rounds, one panel a domain, one line a method: its mean over seeds.

    Args:
      workdir: of the sweep.
      methods: label -> names of its runs.
      domains: title of the panel -> client.
    """
    records = {label: _records(workdir, names) for label, names in methods.items()}
    records = {label: runs for label, runs in records.items() if runs}
    clients = {name for runs in records.values() for run in runs for name in run[0]["loss"]}
    panels = {title: client for title, client in domains.items() if client in clients}
    if not panels:
        return None
    figure = Figure(figsize=(2.6 * len(panels) + 1, 2.8), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, client) in zip(grid, panels.items(), strict=True):
        for label, runs in records.items():
            rounds = min(len(run) for run in runs)
            losses = [[r["loss"].get(client) for r in run[:rounds]] for run in runs]
            values = np.array(losses, float)  # None, of a client that sat out, is NaN
            axes.plot(np.arange(1, rounds + 1), values.mean(0), label=label)
        axes.set(title=title, xlabel="round")
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("training loss")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize="small")
    return png(figure)


def _records(workdir: Path, names: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The lines of metrics.jsonl of the finished runs."""
    return [
        [json.loads(line) for line in (workdir / n / "metrics.jsonl").read_text().splitlines()]
        for n in names
        if finished(workdir, n)
    ]


def accuracy_lines(
    workdir: Path,
    methods: dict[str, dict[float, Sequence[str]]],
    domains: dict[str, str],
    xlabel: str,
    log: bool = False,
) -> bytes | None:
    """Test accuracy over a setting: one colour a domain, one line style a method.

    Args:
      workdir: of the sweep.
      methods: label -> {value of the setting: names of its runs}.
      domains: label -> client.
      xlabel: what the setting is.
      log: whether its axis is logarithmic.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for style, (method, settings) in zip(STYLES, methods.items(), strict=False):
        for colour, (label, client) in enumerate(domains.items()):
            points = []
            for x, names in settings.items():
                done = [read_summary(workdir, n) for n in names if finished(workdir, n)]
                values = [accuracy(summary, client, "running") for summary in done]
                values = [value for value in values if value is not None]
                if values:
                    points.append((x, np.mean(values)))
            if points:
                x, y = zip(*sorted(points), strict=True)
                axes.plot(x, y, style, color=f"C{colour}", label=f"{label}, {method}")
    if not axes.lines:
        return None
    axes.set(xlabel=xlabel, ylabel="test accuracy, %", xscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="x-small")
    return png(figure)


def accuracy_bars(workdir: Path, table: Table) -> bytes | None:
    """The numbers of a table as bars with standard deviations; published ones as crosses."""
    names = {n for row in table.rows.values() for cell in row if cell for n in cell.runs}
    done = {name: read_summary(workdir, name) for name in names if finished(workdir, name)}
    if not done:
        return None
    values = {
        label: [measured(cell, done) if cell else None for cell in row]
        for label, row in table.rows.items()
    }
    used = [i for i in range(len(table.columns)) if any(row[i] for row in values.values())]
    figure = Figure(figsize=(max(6, 1.6 * len(used)), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(values)
    for row, (label, cells) in enumerate(values.items()):
        place = np.arange(len(used)) + (row - (len(values) - 1) / 2) * width
        means = [cells[i][0] if cells[i] else np.nan for i in used]
        errors = [(cells[i][1] or 0) if cells[i] else 0 for i in used]
        axes.bar(place, means, width, yerr=errors, capsize=2, label=label)
        printed = [table.rows[label][i] and table.rows[label][i].published for i in used]
        axes.plot(place, [p[0] if p else np.nan for p in printed], "kx", markersize=4)
    axes.set_xticks(range(len(used)), [table.columns[i] for i in used])
    axes.set(ylabel="test accuracy, % (x: published)")
    figure.legend(loc="outside upper center", ncols=len(values), fontsize="small")
    return png(figure)
