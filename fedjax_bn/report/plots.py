"""Plots of a run, as PNG bytes."""

import io
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.data.domain import Domain
from fedjax_bn.report.tables import columns

Record = dict[str, Any]


def curves(records: list[Record], key: str, label: str) -> bytes:
    """One line a client of `key` (such as "loss") over rounds; the mean in black."""
    records = [record for record in records if key in record]
    rounds = [record["round"] for record in records]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in records[0][key]:
        values = [np.nan if r[key][name] is None else r[key][name] for r in records]
        style = {"color": "black", "linewidth": 2.5} if name == "mean" else {}
        axes.plot(rounds, values, marker="." if len(rounds) < 50 else "", label=name, **style)
    axes.set(xlabel="round", ylabel=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside upper center", ncols=min(6, len(records[0][key])))
    return png(figure)


def methods(summaries: list[Record]) -> bytes:
    """Bars of test accuracy by client (and unseen domain), one colour a method."""
    rows = [columns(summary) for summary in summaries]
    heads = list(rows[0])
    width = 0.8 / len(rows)
    figure = Figure(figsize=(max(7, 1.2 * len(heads)), 4), layout="constrained")
    axes = figure.subplots()
    for i, (row, summary) in enumerate(zip(rows, summaries, strict=True)):
        place = np.arange(len(heads)) + (i - (len(rows) - 1) / 2) * width
        bars = axes.bar(place, [row.get(h, np.nan) for h in heads], width, label=summary["method"])
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(heads)), [head.replace(" ", "\n") for head in heads], fontsize=8)
    axes.set(ylabel="test accuracy, %", ylim=(0, 105))
    figure.legend(fontsize="small", loc="outside upper center", ncols=len(rows))
    return png(figure)


def samples(domains: list[Domain], count: int = 10) -> bytes:
    """The first training images of each client, a row each; features are drawn as a strip."""
    figure = Figure(figsize=(count * 0.75 + 1.5, 0.8 * len(domains)), layout="constrained")
    grid = figure.subplots(len(domains), count, squeeze=False)
    for row, domain in zip(grid, domains, strict=True):
        for axes in row:
            axes.set(xticks=[], yticks=[])
        for axes, image in zip(row, domain.train.images, strict=False):
            strip = image[None] if image.ndim == 1 else image
            axes.imshow(strip, cmap="gray", aspect="auto" if image.ndim == 1 else "equal")
        row[0].set_ylabel(domain.name, rotation=0, ha="right", va="center", fontsize=9)
    return png(figure)


def png(figure: Figure) -> bytes:
    """A figure as PNG, without the date, so that equal runs write equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()
