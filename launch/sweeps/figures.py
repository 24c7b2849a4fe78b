"""Figures of a sweep from its finished runs, as PNG bytes; None if none of them has finished.

Bars and lines are drawn from a table's numbers, curves from the records of runs. The runs of a
curve may differ in length: every round is the mean over those that have it.
"""

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from plan import Table, finished
from report import measured, printed, read_results

from fedjax_bn.data.domain import Dataset
from fedjax_bn.engine.figures import png
from fedjax_bn.report.unseen import ablation
from fedjax_bn.run.errors import UserError

STYLES = ("--o", "-s", ":^", "-.v")  # of methods
IMAGES, SAMPLES = 8, 100  # of a client: images that are shown, and whose pixels are counted
Records = list[dict[str, Any]]


def bars(workdir: Path, table: Table) -> bytes | None:
    """Draws the numbers of a table as bars with standard deviations; published ones as crosses."""
    values = _measured(workdir, table)
    used = [i for i in range(len(table.columns)) if any(row[i] for row in values.values())]
    if not used:
        return None
    figure = Figure(figsize=(max(6, 1.6 * len(used)), 3.6), layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(values)
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
    """Draws a table whose columns are values of a setting, as one line a row.

    Args:
      workdir: of the sweep.
      table: its columns are numbers, or percents; rows are named "DOMAIN, METHOD": one colour a
        domain, one line style a method.
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
    texts: Mapping[float, str],
    logarithmic: bool = False,
    test: str = "",
) -> bytes | None:
    """Draws accuracy on unseen domains over a setting of their statistics; dotted: running ones.

    Args:
      workdir: of the sweep.
      runs: unseen domain -> names of the runs that left it out, one a seed.
      label: what the setting is.
      texts: setting -> the adaptation in the runs' results.
      logarithmic: whether the setting's axis is.
      test: the evaluation that has them; empty: the summary.
    """
    values, baseline = _by_setting(workdir, runs, texts, test)
    return ablation(values, label, baseline, logarithmic) if values else None


def boxes(
    workdir: Path,
    runs: Mapping[str, Sequence[str]],
    label: str,
    texts: Mapping[float, str],
    test: str = "",
) -> bytes | None:
    """Draws the same with a box over the seeds for each setting (TsmoBN, Fig. 3c)."""
    values, _ = _by_setting(workdir, runs, texts, test)
    if not values:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, width, drawn = figure.subplots(), 0.8 / len(values), []
    look = {"patch_artist": True, "manage_ticks": False, "medianprops": {"color": "black"}}
    for k, row in enumerate(values.values()):
        places = np.array([*row], float) + (k - (len(values) - 1) / 2) * width
        given = {"positions": places, "widths": 0.8 * width, "boxprops": {"facecolor": f"C{k}"}}
        drawn.append(axes.boxplot([*row.values()], **given, **look)["boxes"][0])
    axes.set(xlabel=label, ylabel="test accuracy, %", xticks=sorted(texts))
    axes.grid(axis="y", alpha=0.3)
    figure.legend(drawn, [*values], loc="outside upper center", ncols=len(drawn), fontsize="small")
    return png(figure)


def _by_setting(
    workdir: Path, runs: Mapping[str, Sequence[str]], texts: Mapping[float, str], test: str
) -> tuple[dict[str, dict[float, list[float]]], dict[str, float]]:
    """Domain -> setting -> percent of each run, and domain -> mean with running statistics."""
    values: dict[str, dict[float, list[float]]] = {}
    baseline: dict[str, float] = {}
    for domain, names in runs.items():
        scores = []
        for name in names:
            path = workdir / name / (f"evaluations/{test}.json" if test else "summary.json")
            found = json.loads(path.read_text()) if path.exists() else {"unseen": {}}
            scores.append((found if "unseen" in found else found["accuracy"])["unseen"])
        scores = [one.get(domain, {}) for one in scores]
        row = {s: [k[way] for k in scores if way in k] for s, way in texts.items()}
        row = {setting: repeats for setting, repeats in row.items() if repeats}
        plain = [known["running"] for known in scores if "running" in known]
        if row:
            values[domain] = row
        if row and plain:
            baseline[domain] = float(np.mean(plain))
    return values, baseline


def losses(
    workdir: Path,
    methods: Mapping[str, Sequence[str]],
    domains: Mapping[str, str],
    key: str = "loss",
) -> bytes | None:
    """Draws training loss over rounds, one panel a domain, one line a method: its mean over seeds.

    Args:
      workdir: of the sweep.
      methods: label -> names of its runs.
      domains: title of the panel -> client.
      key: which loss of a record, "loss" of the local steps, or "train_loss" after aggregation,
        which only evaluated rounds have.
    """
    known = {
        label: [run for run in _records(workdir, names) if any(key in record for record in run)]
        for label, names in methods.items()
    }
    known = {label: runs for label, runs in known.items() if runs}
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
    """Draws training loss over rounds, a panel an algorithm: thin for each client, thick: mean.

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
    """Draws the L1 norm of the clients' masks over rounds, the mean over clients and seeds.

    Args:
      workdir: of the sweep.
      panels: title -> {label: names of its runs}.
    """
    known = _finished_panels(workdir, panels)
    if not known:
        return None
    figure = Figure(figsize=(max(6.5, 3.6 * len(known)), 3.6), layout="constrained")
    grid = figure.subplots(1, len(known), squeeze=False)[0]
    for axes, (title, each) in zip(grid, known.items(), strict=True):
        for label, runs in each.items():
            values = mean_over(runs, lambda record: record["mask_l1"]["mean"])
            axes.plot(np.arange(1, len(values) + 1), values, label=label)
        axes.set(title=title, xlabel="round")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    grid[0].set_ylabel("L1 norm of the masks, mean")
    return png(figure)


def mean_over(runs: Sequence[Records], of: Callable[[dict[str, Any]], Any]) -> np.ndarray:
    """Returns f[rounds, ...]: the mean of `of(record)` over the runs that have the round.

    Args:
      runs: the records of each; they may differ in length.
      of: returns a number, several, or None, which is NaN.
    """
    return np.array(
        [
            np.mean([np.array(of(run[r]), float) for run in runs if len(run) > r], axis=0)
            for r in range(max(map(len, runs)))
        ]
    )


def _finished_panels(
    workdir: Path, panels: Mapping[str, Mapping[str, Sequence[str]]]
) -> dict[str, dict[str, list[Records]]]:
    """Panels with the records of their lines' finished runs, if there are any."""
    known = {
        title: {label: runs for label, names in each.items() if (runs := _records(workdir, names))}
        for title, each in panels.items()
    }
    return {title: each for title, each in known.items() if each}


def _records(workdir: Path, names: Sequence[str]) -> list[Records]:
    """The lines of metrics.jsonl of the finished runs."""
    return [
        [json.loads(line) for line in (workdir / n / "metrics.jsonl").read_text().splitlines()]
        for n in names
        if finished(workdir, n)
    ]


def pictures(workdir: Path, files: Sequence[str]) -> bytes | None:
    """Joins pictures that the runs drew, those that are there below each other.

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


def pixels(workdir: Path, runs: Sequence[str]) -> bytes | None:
    """Draws the images of every client and their pixel values (FedBN, Fig. 6).

    The data are read again as the first finished run had them.

    Args:
      workdir: of the sweep.
      runs: names.
    """
    from fedjax_bn.run.experiment.datasets import DATASETS, configured_clients
    from fedjax_bn.run.files.finished import configuration

    for name in filter(lambda name: finished(workdir, name), runs):
        try:
            about = json.loads((workdir / name / "config.json").read_text())
            config = configuration(about["config"])
            return _histograms(configured_clients(DATASETS[config.data.name](config), config)[0])
        except (UserError, OSError, ValueError) as error:
            print(f"Fig. 6 is left out: {error}", file=sys.stderr)
    return None


def _histograms(clients: Dataset) -> bytes:
    """A row a client: training images, and beside them the histogram of their pixels."""
    figure = Figure(figsize=(0.8 * IMAGES + 4, len(clients.domains)), layout="constrained")
    widths = [1] * IMAGES + [4]
    rows = len(clients.domains)
    grid = figure.subplots(rows, IMAGES + 1, squeeze=False, width_ratios=widths)
    for row, domain in zip(grid, clients.domains, strict=True):
        images = np.asarray(domain.train.images[:SAMPLES])
        for axes in row[:-1]:
            axes.set(xticks=[], yticks=[])
        for axes, image in zip(row[:-1], images, strict=False):
            axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
        row[0].set_ylabel(domain.name, rotation=0, ha="right", va="center")
        row[-1].hist(images.ravel(), bins=64, range=(0, 255), density=True)
        row[-1].set_yticks([])
    return png(figure)
