"""Computes curves as inline SVG: where the points, limits and ticks of a chart lie.

A page may have a hundred charts, so the templates write their SVG: matplotlib takes a third of a
second for each, and a PNG shows no values below the pointer and no choice of colours. page.css has
the colours (c0 to c7) and dashes (d0 to d3) of curves.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

from fedjax_bn.report.blocks import Block
from fedjax_bn.training.records import some_of

COLOURS = 8
_DASHES = 4
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 350, 8, 186  # of the area of curves in 360 x 220 units
_MOST_BANDS = 4  # limits are drawn in charts of up to so many lines
_GREATEST = 1e100  # larger absolute values are not drawn
# Numbers of points of a line and of a whole chart, which keep the pages of long runs small.
_LEAST_POINTS, _MOST_POINTS, _POINTS_OF_CHART = 30, 300, 3000


class Look(NamedTuple):
    """How a line is drawn.

    Attributes:
      colour, dash: their numbers; a colour beyond the last repeats the first with another dash.
      on: whether the line is coloured at first; a click in the key changes it.
    """

    colour: int
    dash: int = 0
    on: bool = True

    @property
    def style(self) -> str:
        """The CSS classes of the line."""
        return f"c{self.colour % COLOURS} d{(self.dash + self.colour // COLOURS) % _DASHES}"


class Line(NamedTuple):
    """A curve.

    Attributes:
      name: the name in the key.
      look: how the curve is drawn.
      x, y: the points, x ascending.
      low, high: the limits of y; empty for no limits.
    """

    name: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Curves(NamedTuple):
    """A section of charts with their key; of several panels the page's script shows one at a time.

    Attributes:
      title: the heading.
      looks: name of a line -> its look; the names are the key.
      panels: heading -> blocks.
    """

    title: str
    looks: Mapping[str, Look]
    panels: Mapping[str, Sequence[Block]]


class Chart(NamedTuple):
    """A figure of curves.

    Attributes:
      title: the text above the figure.
      unit: the label of the x-axis.
      heights, places: (coordinate, text) of the ticks of the y-axis and the x-axis.
      lines: the curves, those in colour last.
      box: the coordinates of the area of curves: left, right, top, bottom.
    """

    title: str
    unit: str
    heights: Sequence[tuple[float, str]]
    places: Sequence[tuple[float, str]]
    lines: Sequence["_DrawnLine"]
    box: tuple[int, int, int, int] = (_LEFT, _RIGHT, _TOP, _BOTTOM)


class _DrawnLine(NamedTuple):
    """A curve as attributes of SVG: points and band as coordinates, x and y as values."""

    name: str
    look: Look
    points: str
    band: str
    dots: Sequence[tuple[str, str]]
    x: str
    y: str


def chart(title: str, lines: Sequence[Line], unit: str, logarithmic: bool = False) -> list[Chart]:
    """Returns a chart; [] if no line has a point.

    Points that are not finite, or beyond 1e100, are left out.

    Args:
      title: the text above the figure.
      lines: the curves; limits are drawn if there are at most four.
      unit: the label of the x-axis.
      logarithmic: whether the x-axis is logarithmic.
    """
    lines = _thinned(lines)
    if not lines:
        return []
    if len(lines) > _MOST_BANDS:
        lines = [line._replace(low=[], high=[]) for line in lines]
    xs = sorted({x for line in lines for x in line.x})
    if logarithmic:
        ticks = [xs[i] for i in some_of(len(xs), 6)]
    else:
        are_integers = all(x == int(x) for x in xs)
        ticks = _ticks(xs[0], xs[-1], are_integers) if len(xs) > 1 else xs
    across = partial(_coordinates, ticks=ticks, start=_LEFT, end=_RIGHT, logarithmic=logarithmic)
    ys = [y for line in lines for y in (*line.y, *line.low, *line.high)]
    heights = _ticks(min(ys), max(ys))
    up = partial(_coordinates, ticks=heights, start=_BOTTOM, end=_TOP)
    labels = ([f"{tick:g}" for tick in values] for values in (heights, ticks))
    rows = [
        list(zip(places.tolist(), texts, strict=True))
        for places, texts in zip((up(heights), across(ticks)), labels, strict=True)
    ]
    # SVG draws later elements on top, so coloured lines come last.
    ordered = sorted(lines, key=lambda line: line.look.on)
    return [Chart(title, unit, *rows, [_drawn(line, across, up) for line in ordered])]


def _thinned(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines with points that can be drawn, evenly spaced if there are many."""
    limit = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS_OF_CHART // max(len(lines), 1)))
    thinned = []
    for line in lines:
        drawable = [i for i, y in enumerate(line.y) if abs(y) < _GREATEST]  # false for NaN
        if drawable:
            chosen = [drawable[i] for i in some_of(len(drawable), limit)]
            values = ([float(v[i]) for i in chosen] if len(v) else [] for v in line[2:])
            thinned.append(Line(line.name, line.look, *values))
    return thinned


def _coordinates(
    values: Sequence[float],
    ticks: Sequence[float],
    start: float,
    end: float,
    logarithmic: bool = False,
) -> np.ndarray:
    """Returns the coordinates of values on an axis, linear or logarithmic between its end ticks."""
    scale = np.log if logarithmic else np.asarray
    low, high = scale(ticks[0]), scale(ticks[-1])
    share = (scale(np.asarray(values, float)) - low) / ((high - low) or 1)
    return (start + share * (end - start)).round(1)


def _ticks(low: float, high: float, integer: bool = False) -> list[float]:
    """Returns round numbers, in about five steps, that span the range from low to high."""
    if high <= low:
        margin = abs(low) * 0.05 or 1.0  # draws a constant in the middle
        low, high = low - margin, high + margin
    locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer, min_n_ticks=1)
    return locator.tick_values(low, high).tolist()


def _drawn(line: Line, across: Callable, up: Callable) -> _DrawnLine:
    """Returns a line with a band if it has limits and dots if it has few points."""
    x, y = across(line.x).tolist(), up(line.y).tolist()
    band = ""
    if line.low:
        # the outline goes right along the upper limits and back along the lower ones
        outline = [*up(line.high).tolist(), *up(line.low).tolist()[::-1]]
        band = _pairs([*x, *x[::-1]], outline)
    return _DrawnLine(
        name=line.name,
        look=line.look,
        points=_pairs(x, y),
        band=band,
        dots=list(zip(x, y, strict=True)) if len(x) <= _LEAST_POINTS else [],
        x=" ".join(f"{value:g}" for value in line.x),
        y=" ".join(f"{value:.4g}" for value in line.y),
    )


def _pairs(x: Sequence[float], y: Sequence[float]) -> str:
    return " ".join(f"{a:g},{b:g}" for a, b in zip(x, y, strict=True))
