"""Parts of a page as data; `templates/blocks.html` has a macro of the same name for each.

No module of the report writes HTML: names of folders, clients and classes may be any text, and the
templates escape all of them.
"""

import base64
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedjax_bn.arguments.text import shown

Block = tuple[Any, ...]  # a NamedTuple of this module or of `curves`


class Heading(NamedTuple):
    """A heading; `level` 2 begins a section."""

    text: str
    level: int = 3


class Paragraphs(NamedTuple):
    """Texts, a paragraph each, in a CSS class of the page."""

    texts: Sequence[str]
    style: str = ""


class Explanation(NamedTuple):
    """A text of `templates/blocks.html` on a section, which may name the scored samples."""

    name: str
    samples: str = ""


class Commands(NamedTuple):
    """Lines that can be copied into a terminal."""

    lines: Sequence[str]


class TableCell(NamedTuple):
    """A cell of a sortable table, whose column is sorted by `text`, as a number if it is one."""

    text: Any
    notes: Sequence[str] = ()  # small lines below the text
    style: str = ""  # the CSS class
    best: bool = False  # of its column


class SortableTable(NamedTuple):
    """A table that a click on a heading sorts; cells are `TableCell`s, or values to be shown."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]


class HeatMap(NamedTuple):
    """A table whose cells are coloured by their values f[R, C], at least 0; NaN gives none."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    form: str = "{:.2g}"
    greatest: float = 0  # the value of the full colour; 0 for the greatest of `values`

    @property
    def shares(self) -> list[list[float]]:
        """The share of the full colour of each cell."""
        greatest = self.greatest or self.values[np.isfinite(self.values)].max(initial=0) or 1
        return (self.values / greatest).tolist()


class Picture(NamedTuple):
    """A PNG within the page, with a text; `caption` lines stand below it, if there are any."""

    text: str
    png: bytes
    caption: Sequence[str] = ()

    @property
    def data(self) -> Markup:
        """The file in base 64, which needs no escaping: it may have millions of characters."""
        return Markup(base64.b64encode(self.png).decode())


class Group(NamedTuple):
    """Blocks in a box of a CSS class, such as "side" for blocks side by side."""

    blocks: Sequence[Block]
    style: str = ""


class Folded(NamedTuple):
    """Blocks that a click on the summary shows."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False


def picture_of_run(path: Path, text: str) -> list[Block]:
    """Returns a PNG file below a heading; [] if the run has drawn none."""
    return [Heading(text), Picture(text, path.read_bytes())] if path.exists() else []


def write_page(title: str, blocks: Sequence[Block]) -> str:
    """Returns a page that needs no other file."""
    return _environment().get_template("page.html").render(title=title, blocks=blocks)


@cache
def _environment() -> Environment:
    # `finalize` sees every value that a template shows. A lone surrogate of a file's name cannot be
    # written as UTF-8, and a control character would be lost on the page.
    def printable(value: Any) -> Any:
        return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=PackageLoader("fedjax_bn.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def html(block: Block) -> Markup:
        macros = environment.get_template("blocks.html").module
        return getattr(macros, type(block).__name__)(block)

    environment.filters["html"] = html
    return environment
