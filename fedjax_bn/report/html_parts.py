"""The skeleton of a page, with its style and script inside, and tables that sort."""

import base64
import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from fedjax_bn.arguments.text import on_page
from fedjax_bn.data.regular_files import Refused, read_regular
from fedjax_bn.run.files.workdir import not_readable

_MANY = 12  # rows, of which more scroll within the table's box
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
{style}</style></head><body>
<h1>{title}</h1>
{body}
<script>
{script}</script>
</body></html>
"""


def page(title: str, body: str) -> str:
    """A page that needs no other file.

    Args:
      title: text.
      body: HTML.
    """
    here = files("fedjax_bn.report")
    style, script = (here.joinpath(f"page.{end}").read_text("utf-8") for end in ("css", "js"))
    return _PAGE.format(title=on_page(title), body=body, style=style, script=script)


def sortable(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns sort, in a box of its own that scrolls.

    Args:
      caption: above it, text; empty for none.
      heads: texts.
      rows: of cells, `<td>...</td>`; one with data-value sorts by it.
    """
    head = "".join(
        f'<th scope="col"><button type="button">{on_page(text)}</button></th>' for text in heads
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    above = paragraphs([caption], "soft") if caption else ""
    kind = "scroll tall" if len(rows) > _MANY else "scroll"
    return (
        f'{above}<div class="{kind}"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def panels(parts: Sequence[tuple[str, str]]) -> str:
    """Parts of a section of which the page's script shows one at a time, by buttons.

    Args:
      parts: (heading, HTML); one alone stands as it is.
    """
    if len(parts) == 1:
        return parts[0][1]
    inside = "".join(
        f'<div class="panel" data-title="{on_page(head)}"><h4>{on_page(head)}</h4>{part}</div>'
        for head, part in parts
    )
    return f'<div class="panels">{inside}</div>'


def cell(text: object, value: object = None, kind: str = "") -> str:
    """A cell of a table.

    Args:
      text: shown, with markup escaped.
      value: what it sorts by, a number or a text; empty stays below; None: the text.
      kind: its CSS class; empty for none.
    """
    data = "" if value is None else f' data-value="{on_page(str(value))}"'
    name = f' class="{kind}"' if kind else ""
    return f"<td{name}{data}>{on_page(str(text))}</td>"


def paragraphs(texts: Sequence[str], kind: str = "") -> str:
    """Texts as paragraphs of a class."""
    name = f' class="{kind}"' if kind else ""
    return "\n".join(f"<p{name}>{on_page(text)}</p>" for text in texts)


def picture(path: Path, text: str) -> str:
    """A PNG file inside the page, with its heading; empty where it is not there.

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


def preformatted(text: str) -> str:
    """Text as a block that keeps its lines."""
    return f"<pre>{html.escape(text)}</pre>"
