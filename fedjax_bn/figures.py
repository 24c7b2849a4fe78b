"""A matplotlib figure as PNG bytes."""

import io

from matplotlib.figure import Figure


def png(figure: Figure) -> bytes:
    """A figure as PNG, without program and date, so that equal runs write equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()
