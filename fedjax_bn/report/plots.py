"""Draws the plots of a finished run's folder as PNG bytes."""

import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.data.domain import part_of_all
from fedjax_bn.tasks.figures import on_plot, png
from fedjax_bn.training.records import Record
from fedjax_bn.training.score_tables import columns, heading, part_tested, score_of


def curves(records: list[Record], key: str, label: str) -> bytes:
    """Draws `key` (such as "loss") over rounds, a line for each client and the mean in black."""
    records = [record for record in records if key in record]
    rounds = [record["round"] for record in records]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in records[0][key]:
        # JSON has null for a value that is not finite
        values = [np.nan if r[key][name] is None else r[key][name] for r in records]
        style = {"color": "black", "linewidth": 2.5} if name == "mean" else {}
        style["marker"] = "." if len(rounds) < 50 else ""
        axes.plot(rounds, values, label=on_plot(name), **style)
    axes.set(xlabel="round", ylabel=label)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside upper center", ncols=min(6, len(records[0][key])))
    return png(figure)


def methods(summaries: list[Record]) -> bytes:
    """Draws bars of accuracy by client (and unseen domain), one colour for each method."""
    rows = [columns(summary) for summary in summaries]
    heads = list(rows[0])
    width = 0.8 / len(rows)
    figure = Figure(figsize=(max(7, 1.2 * len(heads)), 4), layout="constrained")
    axes = figure.subplots()
    for i, (row, summary) in enumerate(zip(rows, summaries, strict=True)):
        place = np.arange(len(heads)) + (i - (len(rows) - 1) / 2) * width
        values = [row.get(head, np.nan) for head in heads]
        bars = axes.bar(place, values, width, label=on_plot(summary["method"]))
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    titles = [on_plot(heading(head)).replace(" ", "\n") for head in heads]
    axes.set_xticks(range(len(heads)), titles, fontsize=8)
    part, score = part_of_all(map(part_tested, summaries)), score_of(summaries[0])
    label = f"{part} {score}, %"
    if part != "test" and summaries[0]["accuracy"]["unseen"]:
        label = f"{score}, % (clients: {part} samples)"
    axes.set(ylabel=label, ylim=(0, 105))
    figure.legend(fontsize="small", loc="outside upper center", ncols=len(rows))
    return png(figure)
