"""A matplotlib figure as PNG bytes."""

import io

from matplotlib.figure import Figure
from matplotlib.text import Text

from fedjax_bn.engine.names import font_with


def png(figure: Figure) -> bytes:
    """A figure as PNG, without program and date, so that equal runs write equal bytes."""
    buffer = io.BytesIO()
    _choose_fonts(figure)
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def _choose_fonts(figure: Figure) -> None:
    """Gives texts the fonts of characters that the usual one lacks."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_ticklabels()  # which makes their texts
    usual = font_with("a")
    for text in figure.findobj(Text):
        others = dict.fromkeys(map(font_with, text.get_text().replace("\n", "")))
        if others.keys() - {usual, ""}:
            text.set_fontfamily([*text.get_fontfamily(), *filter(None, others)])
