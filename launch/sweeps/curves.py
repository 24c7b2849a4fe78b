"""Curves over rounds of a sweep's finished runs, as PNG bytes; None where none has finished.

Runs of a line may differ in length: every round is the mean over those that have it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from plan import finished

from fedjax_bn.engine.figures import png

Records = list[dict[str, Any]]


def losses(
    workdir: Path,
    methods: Mapping[str, Sequence[str]],
    domains: Mapping[str, str],
    key: str = "loss",
) -> bytes | None:
    """Training loss over rounds, one panel a domain, one line a method: its mean over seeds.

    Args:
      workdir: of the sweep.
      methods: label -> names of its runs.
      domains: title of the panel -> client.
      key: which loss of a record, "loss" of the local steps, or "train_loss" after aggregation,
        which only evaluated rounds have.
    """
    known = {label: _records(workdir, names) for label, names in methods.items()}
    known = {
        label: runs
        for label, every in known.items()
        if (runs := [run for run in every if any(key in record for record in run)])
    }
    clients = {n for runs in known.values() for run in runs for r in run for n in r.get(key, {})}
    panels = {title: client for title, client in domains.items() if client in clients}
    if not panels:
        return None
    figure = Figure(figsize=(2.6 * len(panels) + 1, 2.8), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, client) in zip(grid, panels.items(), strict=True):
        for label, runs in known.items():
            values = mean_over(runs, lambda record, c=client: record.get(key, {}).get(c))
            there = np.flatnonzero(~np.isnan(values))
            axes.plot(there + 1, values[there], label=label)
        axes.set(title=title, xlabel="round")
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("training loss")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize="small")
    return png(figure)


def convergence(workdir: Path, panels: Mapping[str, Mapping[str, Sequence[str]]]) -> bytes | None:
    """Training loss over rounds, a panel an algorithm: thin for each client, thick for their mean.

    The first way of a panel is dashed, the second solid; each is the mean over its finished seeds.

    Args:
      workdir: of the sweep.
      panels: title -> {way: names of its runs}.
    """
    known = _finished_panels(workdir, panels)
    if not known:
        return None
    labelled: dict[str, Any] = {}
    columns = min(4, len(known))
    rows = -(-len(known) // columns)
    figure = Figure(figsize=(3 * columns, 2.6 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axes, (title, ways) in zip(grid, known.items(), strict=False):
        for way, runs in ways.items():
            k = list(panels[title]).index(way)
            values = mean_over(runs, lambda record: list(record["loss"].values()))
            x, style = np.arange(1, len(values) + 1), ("--", "-")[k % 2]
            axes.plot(x, values, style, color=f"C{k}", linewidth=0.6, alpha=0.35)
            (line,) = axes.plot(x, values.mean(1), style, color=f"C{k}", linewidth=2.2)
            labelled[f"{way}, mean of the clients"] = line
        axes.set_title(title, fontsize="medium")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    for axes in grid[len(known) :]:
        axes.set_visible(False)
    figure.supxlabel("round")
    figure.supylabel("training loss")
    place = {"loc": "outside upper center", "ncols": len(labelled), "fontsize": "small"}
    figure.legend(list(labelled.values()), list(labelled), **place)
    return png(figure)


def norms(workdir: Path, panels: Mapping[str, Mapping[str, Sequence[str]]]) -> bytes | None:
    """L1 norm of the clients' masks over rounds, the mean over clients and seeds of each line.

    Args:
      workdir: of the sweep.
      panels: title -> {label: names of its runs}.
    """
    known = _finished_panels(workdir, panels)
    if not known:
        return None
    figure = Figure(figsize=(max(6.5, 3.6 * len(known)), 3.6), layout="constrained")
    grid = figure.subplots(1, len(known), squeeze=False)[0]
    for axes, (title, lines) in zip(grid, known.items(), strict=True):
        for label, runs in lines.items():
            values = mean_over(runs, lambda record: record["mask_l1"]["mean"])
            axes.plot(np.arange(1, len(values) + 1), values, label=label)
        axes.set(title=title, xlabel="round")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    grid[0].set_ylabel("L1 norm of the masks, mean")
    return png(figure)


def mean_over(runs: Sequence[Records], of: Callable[[dict[str, Any]], Any]) -> np.ndarray:
    """f[rounds, ...]: the mean of `of(record)` over the runs that have the round.

    Args:
      runs: the records of each, perhaps of different length.
      of: a number, several, or None, which is NaN.
    """
    rounds = max(map(len, runs))
    return np.array(
        [
            np.mean([np.array(of(run[r]), float) for run in runs if len(run) > r], axis=0)
            for r in range(rounds)
        ]
    )


def _finished_panels(
    workdir: Path, panels: Mapping[str, Mapping[str, Sequence[str]]]
) -> dict[str, dict[str, list[Records]]]:
    """Panels with the records of their lines' finished runs, without lines and panels of none."""
    known = {
        title: {label: runs for label, names in lines.items() if (runs := _records(workdir, names))}
        for title, lines in panels.items()
    }
    return {title: lines for title, lines in known.items() if lines}


def _records(workdir: Path, names: Sequence[str]) -> list[Records]:
    """The lines of metrics.jsonl of the finished runs."""
    return [
        [json.loads(line) for line in (workdir / n / "metrics.jsonl").read_text().splitlines()]
        for n in names
        if finished(workdir, n)
    ]
