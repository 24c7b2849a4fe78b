"""Draws figures of a sweep from finished runs, as PNG bytes, or None if no run has finished.

Bars and lines show a table's numbers, curves the records of runs. The runs of a curve may differ in
length: each round shows the mean over the runs that have it. Ablations vary the statistics of the
test: size of batches, momentum and order (TsmoBN, Fig. 3; UniFed, Fig. 6).
"""

import io
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas
from plan import Column, Evaluation, Figure, Protocol, Table, Training, finished
from report import measured, printed, read_results

from fedjax_bn.arguments.errors import UserError
from fedjax_bn.tasks.figures import png
from fedjax_bn.training.plots import ablation

STYLES = ("--o", "-s", ":^", "-.v")  # one for each method
IMAGES, SAMPLES = 8, 100  # of each client: images that are shown, images in the histogram
Records = list[dict[str, Any]]
Keys = tuple[str, ...]  # the path of a value in a record
BATCH_SIZES = tuple(2**k for k in range(1, 10))
ORDERS = tuple(range(10))
ABLATIONS = "ablations"  # name of the ablations' evaluation
VARIED = {  # kind -> a figure's title, axis, adaptation, settings, and how it is drawn
    "a": ("one batch at a time", "batch size", "batch:batch_size={}", BATCH_SIZES, "log"),
    "b": ("momentum", "momentum", "tsmobn:momentum={}", [k / 10 for k in range(10)], "line"),
    "c": ("order of the samples", "random order", "tsmobn:order={}", ORDERS, "box"),
    "five": ("order of the samples", "random order", "tsmobn:order={}", ORDERS[:5], "line"),
}


def bar_figure(name: str, title: str, table: Table) -> Figure:
    """Returns the figure of a table's numbers as bars."""
    return Figure(name, title, table.runs, partial(bars, table=table))


def line_figure(table: Table, xlabel: str, log: bool = False) -> Figure:
    """Returns the figure of a table's numbers as lines."""
    draw = partial(lines, table=table, xlabel=xlabel, log=log)
    return Figure(table.name, table.title, table.runs, draw)


def ablations(first: Sequence[str], orders: Sequence[int] = ORDERS) -> Evaluation:
    """Returns the evaluation with the adaptations `first` and all those of the ablations."""
    settings = {**VARIED, "c": (*VARIED["c"][:3], orders)}
    varied = [settings[kind][2].format(one) for kind in "abc" for one in settings[kind][3]]
    return Evaluation(ABLATIONS, {"adaptations": (*first, *varied)})


def ablation_figure(
    name: str, kind: str, protocol: Protocol, training: Training, columns: Mapping[str, Column]
) -> Figure:
    """Returns the figure of a training's runs over one setting of the test, see `VARIED`."""
    what, label, text, settings, drawn = VARIED[kind]
    runs = {c.domain: protocol.names(c.targets[0], training) for c in columns.values()}
    texts = {setting: text.format(setting) for setting in settings}
    draw = partial(adaptations, runs=runs, label=label, texts=texts, test=ABLATIONS, kind=drawn)
    wanted = {name for group in runs.values() for name in group}
    title = f"Fig. {name.removeprefix('fig').partition('-')[0]}: {what}"
    shown = tuple(run for run in protocol.runs([training]) if run.name in wanted)
    return Figure(name, title, shown, draw)


def bars(workdir: Path, table: Table) -> bytes | None:
    """Draws a table as bars with standard deviations, and published numbers as crosses."""
    values = _measured(workdir, table)
    used = [i for i in range(len(table.columns)) if any(row[i] for row in values.values())]
    if not used:
        return None
    figure = Canvas(figsize=(max(6, 1.6 * len(used)), 3.6), layout="constrained")
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
    """Draws a table whose columns are values of a setting, with a line for each row.

    Args:
      table: its headings are numbers or percents, its rows are named "DOMAIN, METHOD"; a domain has
        a colour, a method a line style.
      xlabel: the name of the setting.
      log: whether the setting's axis is logarithmic.
    """
    values = _measured(workdir, table)
    settings = [float(column.rstrip("%")) for column in table.columns]
    domains = list(dict.fromkeys(label.rpartition(", ")[0] for label in values))
    methods = list(dict.fromkeys(label.rpartition(", ")[2] for label in values))
    figure = Canvas(figsize=(7, 4.2), layout="constrained")
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
    """Returns the measured rows of a table that have any number, see `report.measured`."""
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
    test: str,
    kind: str = "line",
) -> bytes | None:
    """Draws accuracy on unseen domains over a setting of adaptation; running statistics dotted.

    Args:
      runs: unseen domain -> names of the runs that left it out, one for each seed.
      label: the name of the setting.
      texts: setting -> the adaptation in the runs' results.
      test: the evaluation that has these adaptations.
      kind: line, log (a line over a logarithmic axis), or box (over the seeds for each setting:
        TsmoBN, Fig. 3c).
    """
    values: dict[str, dict[float, list[float]]] = {}  # domain -> setting -> percent of each run
    baseline: dict[str, float] = {}
    for domain, names in runs.items():
        paths = [workdir / name / "evaluations" / f"{test}.json" for name in names]
        found = [json.loads(path.read_text())["unseen"] for path in paths if path.exists()]
        scores = [one.get(domain, {}) for one in found]
        row = {s: [k[way] for k in scores if way in k] for s, way in texts.items()}
        row = {setting: repeats for setting, repeats in row.items() if repeats}
        plain = [known["running"] for known in scores if "running" in known]
        if row:
            values[domain] = row
        if row and plain:
            baseline[domain] = float(np.mean(plain))
    if not values:
        return None
    if kind != "box":
        return ablation(values, label, baseline, kind == "log")
    figure = Canvas(figsize=(7, 4), layout="constrained")
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


def curves(
    workdir: Path, panels: Mapping[str, Mapping[str, tuple[Sequence[str], Keys]]], ylabel: str
) -> bytes | None:
    """Draws values of the runs' records over rounds, with a panel for each title.

    Args:
      panels: title -> line's label -> (names of runs, path of a value in a record). A line is the
        mean over the finished runs; a value with a number for each client also has thin lines.
      ylabel: the name of the values.
    """
    known = {}
    for title, lines in panels.items():
        means = {label: mean_over(_records(workdir, *one), one[1]) for label, one in lines.items()}
        if drawn := {label: values for label, values in means.items() if len(values)}:
            known[title] = drawn
    if not known:
        return None
    columns = len(known) if len(known) <= 6 else 4  # up to six panels fit one row of a page
    rows = -(-len(known) // columns)
    figure = Canvas(figsize=(2.8 * columns + 1, 2.6 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    legend: dict[str, Any] = {}
    for axes, (title, lines) in zip(grid, known.items(), strict=False):
        for label, values in lines.items():
            k = list(panels[title]).index(label)  # same colour in all panels, if runs are missing
            # rounds without the value are NaN; they are dropped, so that the line has no gaps
            x = 1 + np.flatnonzero(np.isfinite(values).reshape(len(values), -1).all(1))
            y, style = values[x - 1], {"color": f"C{k}", "linestyle": ("--", "-")[k % 2]}
            if y.ndim > 1:
                axes.plot(x, y, linewidth=0.6, alpha=0.35, **style)
                y, label = y.mean(1), f"{label}, mean of the clients"
            (legend[label],) = axes.plot(x, y, linewidth=2, **style)
        axes.set_title(title, fontsize="medium")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    for axes in grid[len(known) :]:
        axes.set_visible(False)
    figure.supxlabel("round")
    figure.supylabel(ylabel)
    place = {"loc": "outside upper center", "ncols": len(legend), "fontsize": "small"}
    figure.legend(list(legend.values()), list(legend), **place)
    return png(figure)


def mean_over(runs: Sequence[Records], keys: Keys) -> np.ndarray:
    """Returns f[rounds] or f[rounds, clients]: the mean of a value over the runs that have a round.

    Args:
      runs: the records of each run; the lengths may differ.
      keys: the path of the value in a record; rounds without the value give NaN.
    """
    return np.array(
        [
            np.mean([np.array(_value(run[r], keys), float) for run in runs if len(run) > r], axis=0)
            for r in range(max(map(len, runs), default=0))
        ]
    )


def _value(record: Any, keys: Keys) -> Any:
    for key in keys:
        record = (record or {}).get(key)
    return list(record.values()) if isinstance(record, dict) else record


def _records(workdir: Path, names: Sequence[str], keys: Keys) -> list[Records]:
    """Returns the records of the finished runs that have the value in any record."""
    runs = [
        [json.loads(line) for line in (workdir / n / "metrics.jsonl").read_text().splitlines()]
        for n in names
        if finished(workdir, n)
    ]
    return [run for run in runs if any(_value(record, keys) is not None for record in run)]


def pictures(workdir: Path, files: Sequence[str]) -> bytes | None:
    """Joins pictures that the runs drew, one below the other; missing ones are left out.

    Args:
      files: globs of the pictures' paths in this folder.
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
    """Draws a row for each client: images, and the histogram of their pixels (FedBN, Fig. 6).

    The data are read again with the configuration of the first finished run.
    """
    from fedjax_bn.run.experiment.datasets import configured_clients, read_data
    from fedjax_bn.run.files.finished_run import configuration

    for name in filter(lambda name: finished(workdir, name), runs):
        try:
            about = json.loads((workdir / name / "config.json").read_text())
            config = configuration(about["config"])
            clients = configured_clients(read_data(config), config)[0].domains
        except (UserError, OSError, ValueError) as error:  # the data may be gone
            print(f"Fig. 6 is left out: {error}", file=sys.stderr)
            continue
        figure = Canvas(figsize=(0.8 * IMAGES + 4, len(clients)), layout="constrained")
        widths = [1] * IMAGES + [4]
        grid = figure.subplots(len(clients), IMAGES + 1, squeeze=False, width_ratios=widths)
        for row, domain in zip(grid, clients, strict=True):
            images = np.asarray(domain.train.images[:SAMPLES])
            for axes in row[:-1]:
                axes.set(xticks=[], yticks=[])
            for axes, image in zip(row[:-1], images, strict=False):
                axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
            row[0].set_ylabel(domain.name, rotation=0, ha="right", va="center")
            row[-1].hist(images.ravel(), bins=64, range=(0, 255), density=True)
            row[-1].set_yticks([])
        return png(figure)
    return None
