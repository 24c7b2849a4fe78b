"""Figures of test batches: their size, momentum and order (TsmoBN, Fig. 3; UniFed, Fig. 6)."""

from collections.abc import Mapping, Sequence
from functools import partial

import figures
from plan import Column, Evaluation, Figure, Protocol, Training, names, runs_of

BATCH_SIZES = tuple(2**k for k in range(1, 10))
MOMENTA = tuple(k / 10 for k in range(10))
ORDERS = tuple(range(10))
NAME = "ablations"
VARIED = {  # kind -> a figure's title, axis, adaptation, settings, and how it is drawn
    "a": ("one batch at a time", "batch size", "batch:batch_size={}", BATCH_SIZES, "log"),
    "b": ("momentum", "momentum", "tsmobn:momentum={}", MOMENTA, "line"),
    "c": ("order of the samples", "random order", "tsmobn:order={}", ORDERS, "box"),
    "five": ("order of the samples", "random order", "tsmobn:order={}", ORDERS[:5], "line"),
}


def evaluation(first: Sequence[str], orders: Sequence[int] = ORDERS) -> Evaluation:
    """All statistics of the figures, after some others."""
    statistics = (
        *first,
        *(f"batch:batch_size={size}" for size in BATCH_SIZES),
        *(f"tsmobn:momentum={momentum}" for momentum in MOMENTA),
        *(f"tsmobn:order={order}" for order in orders),
    )
    return Evaluation(NAME, {"adaptations": statistics})


def figure(
    name: str, kind: str, protocol: Protocol, training: Training, columns: Mapping[str, Column]
) -> Figure:
    """The runs of a training tested with a `kind` of statistics, a key of `VARIED`."""
    what, label, texts, settings, drawn = VARIED[kind]
    runs = {c.domain: names(protocol, c.targets[0], training) for c in columns.values()}
    draw = partial(
        figures.adaptations,
        runs=runs,
        label=label,
        texts={setting: texts.format(setting) for setting in settings},
        test=NAME,
        kind=drawn,
    )
    wanted = {name for group in runs.values() for name in group}
    every = runs_of(protocol, [training])
    title = f"Fig. {name.removeprefix('fig').partition('-')[0]}: {what}"
    return Figure(name, title, tuple(run for run in every if run.name in wanted), draw)
