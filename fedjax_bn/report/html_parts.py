"""The parts of a page in HTML: its skeleton, tables that sort, heat maps, curves as inline SVG.

page.css has the colours (c0 to c7) and dashes (d0 to d3) of curves; page.js sorts tables and shows
the values below the pointer. A page may have a hundred charts, so their SVG is written here:
matplotlib takes a third of a second for each, and its pictures cannot be read off or recoloured.
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
from fedjax_bn.run.evaluation.groups import some_of
from fedjax_bn.run.files.workdir import not_readable

COLOURS = 8
_DASHES = 4
_MANY = 12  # rows; a longer table scrolls within its box
_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 34  # margins of a chart
_MOST_BANDS = 4  # lines of a chart whose limits are drawn
_MOST = 1e100  # greatest size of a value that is drawn
# Points of a line and of a whole chart, which keep pages of long runs small.
_LEAST_POINTS, _MOST_POINTS, _MOST_IN_ALL = 30, 300, 3000


def page(title: str, body: str) -> str:
    """Returns a page that needs no other file, from its title (text) and body (HTML)."""
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
      text: shown, and what its column sorts by: as a number if it is one.
      notes: small lines below it.
      kind: CSS class.
      best: whether it is marked as the best of its column.
    """
    inside = f"<strong>{on_page(str(text))}</strong>" if best else on_page(str(text))
    small = "".join(f"<small>{on_page(note)}</small>" for note in notes)
    kind = f' class="{kind or "best"}"' if kind or best else ""
    return _Td(f"<td{kind}>{inside}{small}</td>")


def sortable(caption: str, heads: Iterable[str], rows: Sequence[Iterable[object]]) -> str:
    """Returns a table whose columns sort by a click, in a box of its own that scrolls.

    Args:
      caption: text above it; empty for none.
      heads: texts.
      rows: of `cell`s, or of values that are shown as text.
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
    """Returns a table whose cells are coloured by their values; the cells of NaN are empty.

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
    """Returns HTML that a click on its summary (text) opens."""
    mark = " open" if is_open else ""
    return f"<details{mark}><summary>{on_page(summary)}</summary>{inside}</details>"


def side_by_side(parts: Iterable[str]) -> str:
    """Returns the parts that are not empty beside each other, as far as there is room."""
    return f'<div class="side">{"".join(f"<div>{part}</div>" for part in parts if part)}</div>'


def picture(path: Path, text: str) -> str:
    """Returns a PNG file inside the page, with its heading; empty if there is no such file.

    Raises:
      WorkdirError: it cannot be read.
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
      colour, dash: numbers; where colours run out, the dash changes.
      on: whether it is coloured at first; a reader turns it on and off in the key.
    """

    colour: int
    dash: int = 0
    on: bool = True

    @property
    def style(self) -> str:
        """Its CSS classes."""
        return f"c{self.colour % COLOURS} d{(self.dash + self.colour // COLOURS) % _DASHES}"


class Line(NamedTuple):
    """A curve.

    Attributes:
      name: in the key.
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


def key_of(looks: Mapping[str, Look]) -> str:
    """Returns the key of charts, name -> look: a list whose names turn colours on and off."""
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
      title: above it.
      lines: limits are drawn if there are at most four lines.
      unit: what x is.
      logarithmic: whether x is drawn by its logarithm.
    """
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _MOST_IN_ALL // max(len(lines), 1)))
    drawn: list[Line] = []
    for line in lines:
        good = [i for i, y in enumerate(line.y) if abs(y) < _MOST]  # which NaN is not
        if good:
            kept = [good[i] for i in some_of(len(good), most)]
            values = ([float(v[i]) for i in kept] if len(v) else [] for v in line[2:])
            drawn.append(Line(line.name, line.look, *values))
    if not (lines := drawn):
        return ""
    lines.sort(key=lambda line: line.look.on)  # coloured lines are drawn above grey ones
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
    """Where values are on an axis: linear between the ends of its ticks, or in logarithms."""
    scale = np.log if logarithmic else np.asarray
    low, high = scale(ticks[0]), scale(ticks[-1])
    share = (scale(np.asarray(values, float)) - low) / ((high - low) or 1)
    return (start + share * (end - start)).round(1)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """At most six round numbers that span two ends."""
    if high <= low:
        margin = abs(low) * 0.05 or 1.0  # a constant is a line in the middle
        low, high = low - margin, high + margin
    locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=1)
    return locator.tick_values(low, high).tolist()


def _drawn(line: Line, across: Callable, up: Callable) -> str:
    """A band where there are limits, the line, and points where they are few."""
    style, x, y = line.look.style, across(line.x).tolist(), up(line.y).tolist()
    points = [f"{a:g},{b:g}" for a, b in zip(x, y, strict=True)]
    parts = []
    if line.low:
        # there along the upper limits, and back along the lower ones
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
