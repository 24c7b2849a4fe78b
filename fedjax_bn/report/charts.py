"""Curves as inline SVG, drawn by classes of page.css and read off by page.js, and heat maps."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_bn.arguments.text import on_page
from fedjax_bn.run.evaluation.groups import some_of

COLOURS = 8  # classes c0 to c7 of page.css
DASHES = 4  # classes d0 to d3
_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 34
_MOST_BANDS = 4  # lines of a chart whose limits are drawn
_MOST = 1e100  # in size, of a value that is drawn
# Points of a line, and of all of a chart; of more some are drawn, both ends among them.
_LEAST_POINTS, _MOST_POINTS, _MOST_IN_ALL = 30, 300, 3000


class Look(NamedTuple):
    """How a line is drawn.

    Attributes:
      style: (colour, dash), see `_style_of`.
      on: whether it is coloured at first; a reader turns it on and off in the key.
    """

    style: tuple[int, int]
    on: bool = True


class Line(NamedTuple):
    """A curve.

    Attributes:
      name: of whom it is.
      look: how it is drawn.
      x, y: its points, x ascending.
      low, high: limits of y; empty for none.
    """

    name: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def _style_of(style: tuple[int, int]) -> str:
    """The classes of a line's colour and dash; where colours run out, the dash changes."""
    colour, dash = style
    return f"c{colour % COLOURS} d{(dash + colour // COLOURS) % DASHES}"


def chart(title: str, lines: Sequence[Line], unit: str, logarithmic: bool = False) -> str:
    """A figure of curves as HTML; points that are not finite, or beyond 1e100, are left out.

    Args:
      title: above it.
      lines: of more than four the limits are left out.
      unit: what x is.
      logarithmic: whether x is drawn by its logarithm.
    """
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _MOST_IN_ALL // max(len(lines), 1)))
    lines = [thin for line in lines if (thin := _thinned(line, most)).x]
    if not lines:
        return ""
    lines.sort(key=lambda line: line.look.on)
    if len(lines) > _MOST_BANDS:
        lines = [line._replace(low=[], high=[]) for line in lines]
    across = _Scale.over([x for line in lines for x in line.x], _LEFT, _WIDTH - _RIGHT, logarithmic)
    heights = [y for line in lines for y in (*line.y, *line.low, *line.high)]
    up = _Scale.over(heights, _HEIGHT - _BOTTOM, _TOP)
    drawn = [_axes(across, up, unit), *(_drawn(line, across, up) for line in lines)]
    rule = f'<line class="rule" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    name = on_page(title)
    return (
        f'<figure class="chart"><figcaption>{name}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}" '
        f'data-unit="{on_page(unit)}">{"".join(drawn)}{rule}</svg>'
        '<div class="readout"></div></figure>'
    )


def key_of(looks: Mapping[str, Look]) -> str:
    """What the lines of charts mean, as an HTML list; a click turns a line's colour on or off.

    Args:
      looks: name -> look.
    """
    named = {on: [_item(*one) for one in looks.items() if one[1].on is on] for on in (True, False)}
    lists = {on: f'<ul class="key">{"".join(items)}</ul>' for on, items in named.items()}
    if not named[False]:
        return lists[True]
    grey = f"{len(named[False])} more, in grey: a click on a name colours its line"
    return f"{lists[True]}<details><summary>{grey}</summary>{lists[False]}</details>"


def _item(name: str, look: Look) -> str:
    """A button of a key."""
    return (
        f'<li><button type="button" aria-pressed="{str(look.on).lower()}" '
        f'data-name="{on_page(name)}"><svg class="swatch" viewBox="0 0 26 8">'
        f'<path class="line {_style_of(look.style)}" d="M0 4H26"/></svg>{on_page(name)}'
        "</button></li>"
    )


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: np.ndarray,
    form: str = ".2g",
    most: float = 0,
) -> str:
    """A table whose cells are coloured by their values; NaN stays empty.

    Args:
      title: above it.
      rows, columns: names.
      values: f[R, C], at least 0.
      form: of a value.
      most: the value of the full colour; 0 for the greatest.
    """
    most = most or values[np.isfinite(values)].max(initial=0) or 1
    head = "".join(f"<th>{on_page(column)}</th>" for column in columns)
    body = []
    for name, row in zip(rows, values, strict=True):
        cells = "".join(
            f'<td class="heat" style="--share:{value / most:.3f}">{value:{form}}</td>'
            if math.isfinite(value)
            else "<td></td>"
            for value in row.tolist()
        )
        body.append(f"<tr><td>{on_page(name)}</td>{cells}</tr>")
    return (
        f'<p class="soft">{on_page(title)}</p>\n<div class="scroll"><table class="map"><thead><tr>'
        f"<th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


class _Scale(NamedTuple):
    """From values to places: linear between two ends, perhaps of the logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool
    ticks: tuple[float, ...]

    @classmethod
    def over(
        cls, values: Sequence[float], start: float, end: float, logarithmic: bool = False
    ) -> "_Scale":
        """A scale that holds all values; across, of one value alone only that is told."""
        low, high = min(values), max(values)
        if logarithmic:
            ticks = tuple(sorted({*values}))
            ticks = tuple(ticks[i] for i in some_of(len(ticks), 6))
            high = high if high > low else 2 * low
            return cls(math.log(low), math.log(high), start, end, True, ticks)
        least = 1 if all(value == int(value) for value in values) and end > start else 0
        ticks = _ticks_of(low, high, least) if high > low or end < start else (low,)
        return cls(min(low, ticks[0]), max(high, ticks[-1]), start, end, False, ticks)

    def place(self, value: float) -> float:
        value = math.log(value) if self.logarithmic else value
        share = (value - self.low) / ((self.high - self.low) or 1)
        return round(self.start + share * (self.end - self.start), 1)


def _ticks_of(low: float, high: float, least: float = 0, most: int = 5) -> tuple[float, ...]:
    """At most so many steps of a round number, at least `least`, that span two ends."""
    if high <= low:
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    rough = max((high - low) / most, least)
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(step * i, 10) for i in range(first, last + 1))


def _thinned(line: Line, most: int) -> Line:
    good = [i for i, y in enumerate(line.y) if y is not None and abs(y) < _MOST]
    good = [good[i] for i in some_of(len(good), most)] if good else []
    return line._replace(
        **{
            name: [float(part[i]) for i in good] if len(part := getattr(line, name)) else []
            for name in ("x", "y", "low", "high")
        }
    )


def _axes(across: _Scale, up: _Scale, unit: str) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in up.ticks:
        y = up.place(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in across.ticks:
        if across.low <= (math.log(tick) if across.logarithmic else tick) <= across.high:
            x = across.place(tick)
            parts.append(f'<text x="{x}" y="{bottom + 14}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{right}" y="{_HEIGHT - 4}" text-anchor="end">{on_page(unit)}</text>')
    return "".join(parts)


def _drawn(line: Line, across: _Scale, up: _Scale) -> str:
    """A band where there are limits, the line, and points where they are few."""
    style = _style_of(line.look.style)
    x = [across.place(value) for value in line.x]
    y = [up.place(value) for value in line.y]
    parts = []
    if line.low:
        edge = [*zip(x, map(up.place, line.high), strict=True)]
        edge += reversed([*zip(x, map(up.place, line.low), strict=True)])
        parts.append(f'<polygon class="band {style}" points="{_points(edge)}"/>')
    parts.append(
        f'<polyline class="line {style}" points="{_points(zip(x, y, strict=True))}" '
        f'data-name="{on_page(line.name)}" data-x="{" ".join(f"{v:g}" for v in line.x)}" '
        f'data-y="{" ".join(f"{v:.4g}" for v in line.y)}"/>'
    )
    if len(x) <= 30:
        parts += [
            f'<circle class="{style}" cx="{a}" cy="{b}" r="2.5"/>'
            for a, b in zip(x, y, strict=True)
        ]
    return f'<g class="series{"" if line.look.on else " off"}">{"".join(parts)}</g>'


def _points(places: object) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)
