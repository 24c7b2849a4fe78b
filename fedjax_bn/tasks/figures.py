"""Writes figures of matplotlib as PNG bytes, and makes labels of any text."""

import io
import textwrap

from matplotlib.figure import Figure

from fedjax_bn.arguments.text import shown


def png(figure: Figure) -> bytes:
    """Returns a figure as PNG without the program's name, so that equal runs write equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def on_plot(label: str, most: int = 40) -> str:
    """Returns a text that labels of matplotlib show literally; a long one loses its middle."""
    label = shown(label)
    head = (most - 3) // 2
    cut = label if len(label) <= most else f"{label[:head]}...{label[head + 3 - most :]}"
    # A space before a leading underscore keeps legends from hiding the text.
    return (f" {cut}" if cut[:1] in ("", "_") else cut).replace("$", r"\$")


def in_lines(label: str, width: int = 30, most: int = 255) -> str:
    """Returns a text as `on_plot` does, in lines of `width`; one above `most` loses its middle."""
    label = label if len(label) <= most else f"{label[: most // 2]}...{label[-(most // 2) :]}"
    return "\n".join(on_plot(line, 10 * width) for line in textwrap.wrap(label, width) or [""])
