"""Writes the parts of a page in HTML: skeleton, sortable tables, heat maps, curves as inline SVG.

page.css has the colours (c0 to c7) and dashes (d0 to d3) of curves; page.js sorts tables and shows
the values below the pointer. A page may have a hundred charts, so this module writes their SVG
itself: matplotlib takes a third of a second for each, and a PNG shows no values and no choice of
colours.
"""

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

from fedjax_bn.arguments.text import on_page
from fedjax_bn.data.regular_files import Refused, read_regular
from fedjax_bn.training.evaluation.groups import some_of
from fedjax_bn.training.workdir import not_readable

COLOURS = 8
_DASHES = 4
_MANY = 12  # rows; a longer table scrolls within its box
_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 34  # margins of a chart
_MOST_BANDS = 4  # limits are drawn in charts of up to so many lines
_MOST = 1e100  # larger absolute values are not drawn
# Numbers of points of a line and of a whole chart, which keep the pages of long runs small.
_LEAST_POINTS, _MOST_POINTS, _MOST_IN_ALL = 30, 300, 3000


def page(title: str, body: str) -> str:
    """Returns a page that needs no other file, from a title (text) and a body (HTML)."""
    here = files("fedjax_bn.report")
    style, script = (here.joinpath(f"page.{end}").read_text("utf-8") for end in ("css", "js"))
    title = on_page(title)  # names of folders and clients may be any text
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title><style>\n{style}</style></head><body>\n<h1>{title}</h1>\n"
        f"{body}\n<script>\n{script}</script>\n</body></html>\n"
    )


class _Td(str):
    """A table's cell as HTML, `<td>...</td>`."""


def cell(text: object, notes: Iterable[str] = (), kind: str = "", best: bool = False) -> str:
    """Returns a table's cell.

    Args:
      text: the content, by which its column is sorted, as a number if it is one.
      notes: small lines below the text.
      kind: the CSS class.
      best: whether the cell is marked as the best of its column.
    """
    inside = f"<strong>{on_page(str(text))}</strong>" if best else on_page(str(text))
    small = "".join(f"<small>{on_page(note)}</small>" for note in notes)
    kind = f' class="{kind or "best"}"' if kind or best else ""
    return _Td(f"<td{kind}>{inside}{small}</td>")


def sortable(caption: str, heads: Iterable[str], rows: Sequence[Iterable[object]]) -> str:
    """Returns a table that a click on a heading sorts, in a box that scrolls.

    Args:
      caption: the text above the table; "" for none.
      heads: the headings, as text.
      rows: rows of `cell`s, or of values that are shown as text.
    """
    head = "".join(
        f'<th scope="col"><button type="button">{on_page(text)}</button></th>' for text in heads
    )
    body = "".join(
        f"<tr>{''.join(one if isinstance(one, _Td) else cell(one) for one in row)}</tr>"
        for row in rows
    )
    above = paragraphs([caption], "soft") if caption else ""
    kind = "scroll tall" if len(rows) > _MANY else "scroll"
    return (
        f'{above}<div class="{kind}"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def heat_map(
    title: str,
    rows: Iterable[str],
    columns: Iterable[str],
    values: np.ndarray,
    form: str = ".2g",
    most: float = 0,
) -> str:
    """Returns a table whose cells are coloured by their values; NaN gives an empty cell.

    Args:
      title: the text above the table.
      rows, columns: their names.
      values: f[R, C], at least 0 or NaN.
      form: the number format.
      most: the value of the full colour; 0 for the greatest of `values`.
    """
    most = most or values[np.isfinite(values)].max(initial=0) or 1
    head = "".join(f"<th>{on_page(column)}</th>" for column in columns)
    body = []
    for name, row in zip(rows, values.tolist(), strict=True):
        cells = "".join(
            f'<td class="heat" style="--share:{value / most:.3f}">{value:{form}}</td>'
            if math.isfinite(value)
            else "<td></td>"
            for value in row
        )
        body.append(f"<tr><td>{on_page(name)}</td>{cells}</tr>")
    return (
        f'<p class="soft">{on_page(title)}</p>\n<div class="scroll"><table class="map"><thead><tr>'
        f"<th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def paragraphs(texts: Iterable[str], kind: str = "") -> str:
    """Returns texts as paragraphs of a CSS class."""
    name = f' class="{kind}"' if kind else ""
    return "\n".join(f"<p{name}>{on_page(text)}</p>" for text in texts)


def joined(*parts: str) -> str:
    """Returns the parts that are not empty, one below the other."""
    return "\n".join(filter(None, parts))


def folded(summary: str, inside: str, is_open: bool = False) -> str:
    """Returns HTML that is folded below a summary (text); a click on the summary opens it."""
    mark = " open" if is_open else ""
    return f"<details{mark}><summary>{on_page(summary)}</summary>{inside}</details>"


def side_by_side(parts: Iterable[str]) -> str:
    """Returns the parts that are not empty, side by side as far as they fit."""
    return f'<div class="side">{"".join(f"<div>{part}</div>" for part in parts if part)}</div>'


def picture(path: Path, text: str) -> str:
    """Returns a PNG file, embedded in the page below a heading; "" if there is no such file.

    Raises:
      WorkdirError: the file cannot be read.
    """
    if not path.exists():
        return ""
    try:
        data = base64.b64encode(read_regular(path)).decode()
    except (OSError, Refused) as error:
        raise not_readable(path, error) from error
    name = on_page(text)
    return f'<h3>{name}</h3>\n<img alt="{name}" src="data:image/png;base64,{data}">'


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


def key_of(looks: Mapping[str, Look]) -> str:
    """Returns the key of charts, a list of names; a click on one turns its colour on or off."""
    items: dict[bool, list[str]] = {True: [], False: []}
    for name, look in looks.items():
        items[look.on].append(
            f'<li><button type="button" aria-pressed="{str(look.on).lower()}" '
            f'data-name="{on_page(name)}"><svg class="swatch" viewBox="0 0 26 8">'
            f'<path class="line {look.style}" d="M0 4H26"/></svg>{on_page(name)}</button></li>'
        )
    shown, grey = (f'<ul class="key">{"".join(items[on])}</ul>' for on in (True, False))
    more = f"{len(items[False])} more, in grey: a click on a name colours its line"
    return shown + (folded(more, grey) if items[False] else "")


def chart(title: str, lines: Sequence[Line], unit: str, logarithmic: bool = False) -> str:
    """Returns a figure of curves; points that are not finite, or beyond 1e100, are left out.

    Args:
      title: the text above the figure.
      lines: the curves; limits are drawn if there are at most four.
      unit: the label of the x-axis.
      logarithmic: whether the x-axis is logarithmic.
    """
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _MOST_IN_ALL // max(len(lines), 1)))
    drawn: list[Line] = []
    for line in lines:
        good = [i for i, y in enumerate(line.y) if abs(y) < _MOST]  # false for NaN
        if good:
            kept = [good[i] for i in some_of(len(good), most)]
            values = ([float(v[i]) for i in kept] if len(v) else [] for v in line[2:])
            drawn.append(Line(line.name, line.look, *values))
    if not (lines := drawn):
        return ""
    lines.sort(key=lambda line: line.look.on)  # SVG draws later elements on top: coloured lines
    if len(lines) > _MOST_BANDS:
        lines = [line._replace(low=[], high=[]) for line in lines]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    xs = sorted({x for line in lines for x in line.x})
    if logarithmic:
        ticks = [xs[i] for i in some_of(len(xs), 6)]
    else:
        whole = all(x == int(x) for x in xs)
        ticks = _ticks(xs[0], xs[-1], whole) if len(xs) > 1 else xs
    across = partial(_places, ticks=ticks, start=_LEFT, end=right, logarithmic=logarithmic)
    ys = [y for line in lines for y in (*line.y, *line.low, *line.high)]
    heights = _ticks(min(ys), max(ys))
    up = partial(_places, ticks=heights, start=bottom, end=_TOP)
    parts = []
    for y, tick in zip(up(heights), heights, strict=True):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:g}" y2="{y:g}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:g}" text-anchor="end">{tick:g}</text>')
    for x, tick in zip(across(ticks), ticks, strict=True):
        parts.append(f'<text x="{x:g}" y="{bottom + 14}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{right}" y="{_HEIGHT - 4}" text-anchor="end">{on_page(unit)}</text>')
    parts += [_drawn(line, across, up) for line in lines]
    name = on_page(title)
    return (
        f'<figure class="chart"><figcaption>{name}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}" '
        f'data-unit="{on_page(unit)}">{"".join(parts)}'
        f'<line class="rule" y1="{_TOP}" y2="{bottom}"/></svg><div class="readout"></div></figure>'
    )


def _places(
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


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Returns round numbers, in about five steps, that span the range from low to high."""
    if high <= low:
        margin = abs(low) * 0.05 or 1.0  # draws a constant in the middle
        low, high = low - margin, high + margin
    locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=1)
    return locator.tick_values(low, high).tolist()


def _drawn(line: Line, across: Callable, up: Callable) -> str:
    """Returns the SVG of a line, with a band if it has limits and dots if it has few points."""
    style, x, y = line.look.style, across(line.x).tolist(), up(line.y).tolist()
    points = [f"{a:g},{b:g}" for a, b in zip(x, y, strict=True)]
    parts = []
    if line.low:
        # the outline goes right along the upper limits and back along the lower ones
        ends = zip([*x, *x[::-1]], [*up(line.high), *up(line.low)[::-1]], strict=True)
        around = " ".join(f"{a:g},{b:g}" for a, b in ends)
        parts.append(f'<polygon class="band {style}" points="{around}"/>')
    parts.append(
        f'<polyline class="line {style}" points="{" ".join(points)}" '
        f'data-name="{on_page(line.name)}" data-x="{" ".join(f"{v:g}" for v in line.x)}" '
        f'data-y="{" ".join(f"{v:.4g}" for v in line.y)}"/>'
    )
    if len(x) <= _LEAST_POINTS:
        dots = zip(x, y, strict=True)
        parts += [f'<circle class="{style}" cx="{a:g}" cy="{b:g}" r="2.5"/>' for a, b in dots]
    return f'<g class="series{"" if line.look.on else " off"}">{"".join(parts)}</g>'
