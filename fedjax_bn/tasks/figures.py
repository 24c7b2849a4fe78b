"""Writes figures of matplotlib as PNG bytes, and makes labels of any text."""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_bn.arguments.text import shown


def png(figure: Figure) -> bytes:
    """Returns a figure as PNG without the program's name, so that equal runs write equal bytes."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # that the font lacks: a box is drawn
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def on_plot(name: str, limit: int = 40) -> str:
    """Returns a text that labels of matplotlib show literally; a long one loses its middle."""
    label = shown(name)
    head = (limit - 3) // 2
    label = label if len(label) <= limit else f"{label[:head]}...{label[head + 3 - limit :]}"
    # Legends hide a text that begins with an underscore.
    return (f" {label}" if label[:1] in ("", "_") else label).replace("$", r"\$")


def in_lines(name: str, width: int = 30, limit: int = 255) -> str:
    """Returns a text as `on_plot` does, in lines of `width`; one above `limit` loses its middle."""
    name = name if len(name) <= limit else f"{name[: limit // 2]}...{name[-(limit // 2) :]}"
    lines = re.findall(rf".{{1,{width}}}(?: |$)|.{{1,{width}}}", name, re.DOTALL)
    return "\n".join(on_plot(line.removesuffix(" "), 10 * width) for line in lines)


def picture_rows(
    rows: Mapping[str, Sequence[Any]],
    draw: Callable[[Axes, Any], None],
    legend: Sequence[Artist],
    width: float,
    height: float,
) -> bytes:
    """Draws a row of pictures for each client, below a legend, as PNG bytes.

    `rows` is client -> its pictures, of which a shorter row leaves places empty; `width` and
    `height` are those of a picture in inches.
    """
    count = max(map(len, rows.values()))
    size = width * count + 0.6, height * len(rows) + 0.3 + 0.25 * len(legend) / count
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), count, squeeze=False)
    for row, (client, pictures) in zip(grid, rows.items(), strict=True):
        for axes in row:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for axes, picture in zip(row, pictures, strict=False):
            draw(axes, picture)
        row[0].set_ylabel(in_lines(client, 20, 60), fontsize=9)
    figure.legend(handles=legend, loc="outside upper center", ncols=count, fontsize="small")
    return png(figure)
