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
from fedjax_bn.training.workdir import not_readable

Block = tuple[Any, ...]  # a NamedTuple of this module or of `charts`


class Heading(NamedTuple):
    """A heading; `level` 2 begins a section."""

    text: str
    level: int = 3


class Paragraphs(NamedTuple):
    """Texts, a paragraph each, in a CSS class of the page."""

    texts: Sequence[str]
    style: str = ""


class Commands(NamedTuple):
    """Lines that can be copied into a terminal."""

    lines: Sequence[str]


class TableCell(NamedTuple):
    """A cell of a sortable table.

    Attributes:
      text: the content, by which its column is sorted, as a number if it is one.
      notes: small lines below the text.
      style: the CSS class.
      best: whether the cell is marked as the best of its column.
    """

    text: object
    notes: Sequence[str] = ()
    style: str = ""
    best: bool = False


class SortableTable(NamedTuple):
    """A table that a click on a heading sorts; `cells` are `TableCell`s, or values to be shown."""

    caption: str
    heads: Sequence[str]
    cells: Sequence[Sequence[object]]

    @property
    def rows(self) -> list[list[TableCell]]:
        """The cells, each as a `TableCell`."""
        return [
            [cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row]
            for row in self.cells
        ]


class HeatMap(NamedTuple):
    """A table whose cells are coloured by their values; NaN gives an empty cell.

    Attributes:
      title: the text above the table.
      rows, columns: their names.
      values: f[R, C], at least 0 or NaN.
      form: the number format.
      greatest: the value of the full colour; 0 for the greatest of `values`.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    form: str = ".2g"
    greatest: float = 0

    @property
    def cells(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(name of a row, (text, share of the full colour) of each cell)."""
        greatest = self.greatest or self.values[np.isfinite(self.values)].max(initial=0) or 1
        texts = [
            [
                (f"{x:{self.form}}", f"{x / greatest:.3f}") if np.isfinite(x) else ("", "")
                for x in row
            ]
            for row in self.values.tolist()
        ]
        return list(zip(self.rows, texts, strict=True))


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
    """Returns a PNG file below a heading; [] if the run has drawn none.

    Raises:
      WorkdirError: the file cannot be read.
    """
    if not path.exists():
        return []
    try:
        return [Heading(text), Picture(text, path.read_bytes())]
    except OSError as error:
        raise not_readable(path, error) from error


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
