"""Figures of a sweep from its finished runs, as PNG bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from plan import Table, finished
from report import accuracy, measured, read_summary

from fedjax_bn.figures import png
from fedjax_bn.run.report.unseen import ablation

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


def convergence(workdir: Path, panels: dict[str, dict[str, Sequence[str]]]) -> bytes | None:
    """Training loss over rounds, a panel an algorithm: thin for each client, thick for their mean.

    The first way of a panel is dashed, the second solid; each is the mean over its finished seeds.

    Args:
      workdir: of the sweep.
      panels: title -> {way: names of its runs}.
    """
    losses = {
        title: {way: _mean_losses(_records(workdir, names)) for way, names in ways.items()}
        for title, ways in panels.items()
    }
    losses = {title: ways for title, ways in losses.items() if any(map(len, ways.values()))}
    labelled: dict[str, Any] = {}
    if not losses:
        return None
    columns = min(4, len(losses))
    rows = -(-len(losses) // columns)
    figure = Figure(figsize=(3 * columns, 2.6 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axes, (title, ways) in zip(grid, losses.items(), strict=False):
        for k, (way, values) in enumerate(ways.items()):  # values [rounds, clients]
            if not len(values):
                continue
            x, style = np.arange(1, len(values) + 1), ("--", "-")[k % 2]
            axes.plot(x, values, style, color=f"C{k}", linewidth=0.6, alpha=0.35)
            (line,) = axes.plot(x, values.mean(1), style, color=f"C{k}", linewidth=2.2)
            labelled[f"{way}, mean of the clients"] = line
        axes.set_title(title, fontsize="medium")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    for axes in grid[len(losses) :]:
        axes.set_visible(False)
    figure.supxlabel("round")
    figure.supylabel("training loss")
    place = {"loc": "outside upper center", "ncols": len(labelled), "fontsize": "small"}
    figure.legend(list(labelled.values()), list(labelled), **place)
    return png(figure)


def _mean_losses(runs: list[list[dict[str, Any]]]) -> np.ndarray:
    """f[rounds, clients], the mean over runs, as long as the shortest; [0, 0] of none."""
    if not runs:
        return np.zeros((0, 0))
    rounds = min(map(len, runs))
    values = [[list(record["loss"].values()) for record in run[:rounds]] for run in runs]
    return np.array(values, float).mean(0)  # None, of a client that sat out, is NaN


def adaptations(
    workdir: Path,
    runs: Sequence[str],
    domains: dict[str, str],
    label: str,
    spelled: dict[float, str],
    logarithmic: bool,
) -> bytes | None:
    """Accuracy on unseen domains over a setting of their statistics; dotted with running ones.

    Args:
      workdir: of the sweep.
      runs: names, one a seed.
      domains: label -> unseen domain.
      label: what the setting is.
      spelled: setting -> the adaptation in the runs' summaries.
      logarithmic: whether the setting's axis is.
    """
    done = [read_summary(workdir, name) for name in runs if finished(workdir, name)]
    if not done:
        return None
    values, baseline = {}, {}
    for title, domain in domains.items():
        values[title] = {
            setting: [accuracy(summary, domain, text) for summary in done]
            for setting, text in spelled.items()
        }
        baseline[title] = float(np.mean([accuracy(summary, domain, "running") for summary in done]))
    return ablation(values, label, baseline, logarithmic)


def norm_curves(workdir: Path, methods: dict[str, Sequence[str]]) -> bytes | None:
    """L1 norm of the clients' masks over rounds, the mean over clients and seeds of each line.

    Args:
      workdir: of the sweep.
      methods: label -> names of its runs.
    """
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for label, names in methods.items():
        runs = _records(workdir, names)
        if runs:
            norms = np.array([[record["mask_l1"]["mean"] for record in run] for run in runs])
            axes.plot(np.arange(1, norms.shape[1] + 1), norms.mean(0), label=label)
    if not axes.lines:
        return None
    axes.set(xlabel="round", ylabel="L1 norm of the masks, mean")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
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
    figure.legend(loc="outside upper center", ncols=min(3, len(values)), fontsize="small")
    return png(figure)
