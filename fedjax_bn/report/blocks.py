"""Writes pages and their parts; `block` calls a macro of `templates/blocks.html`.

No module of the report writes HTML: names of folders, clients and classes may be any text, and the
templates escape all of them.
"""

import base64
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedjax_bn.arguments.text import shown


class TableCell(NamedTuple):
    """A cell of a sortable table, whose column is sorted by `text`, as a number if it is one."""

    text: Any
    notes: Sequence[str] = ()  # small lines below the text
    style: str = ""  # the CSS class
    best: bool = False  # of its column


def block(macro: str, *arguments: Any, **options: Any) -> Markup:
    """Returns a part of the page, by a macro of `templates/blocks.html` and its arguments."""
    return getattr(_environment().get_template("blocks.html").module, macro)(*arguments, **options)


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: np.ndarray,
    form: str = "{:.2g}",
    greatest: float = 0,
) -> Markup:
    """Returns a table whose cells are coloured by `values` f[R, C], at least 0; NaN has no cell."""
    # the value of the full colour
    greatest = greatest or values[np.isfinite(values)].max(initial=0) or 1
    return block("heat_map", title, rows, columns, values, form, greatest)


def picture(text: str, png: bytes, caption: Sequence[str] = ()) -> Markup:
    """Returns a PNG within the page, with a text; `caption` lines stand below it."""
    # Base 64 needs no escaping, and may have millions of characters.
    return block("picture", text, Markup(base64.b64encode(png).decode()), caption)


def write_page(title: str, blocks: Sequence[Markup]) -> str:
    """Returns a page that needs no other file."""
    return _environment().get_template("page.html").render(title=title, blocks=blocks)


@cache
def _environment() -> Environment:
    # `finalize` sees every value that a template shows. A lone surrogate of a file's name cannot be
    # written as UTF-8, and a control character would be lost on the page.
    def printable(value: Any) -> Any:
        return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    return Environment(
        loader=PackageLoader("fedjax_bn.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
