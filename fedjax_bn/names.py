"""Names of clients, domains and files, which may be any text, where they are written or shown.

A name may hold separators of folders, markup, line breaks, or bytes that are no text at all (which
Python reads as lone surrogates). What Python prints as it is stays readable everywhere.
"""

import hashlib
import html
import re
from functools import cache

_LONGEST = 100  # characters of a file's name; ends and temporary files need some of the 255
_DIGEST = 16  # bytes
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.+=@,() ")
_OF_WINDOWS = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)

_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")


def file_name(text: str) -> str:
    """A name for a file or folder that no other text has, at most 100 characters of ASCII.

    Letters, digits, spaces and `-_.+=@,()` stay; all else becomes %XX, byte by byte in UTF-8. So
    do a dot or a space at either end and the first letter of a name that Windows keeps for devices.
    A long text ends in a digest of it. Two texts that differ give two names, on file systems that
    tell capitals from small letters.
    """
    raw = text.encode("utf-8", "surrogatepass")
    coded = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw]
    device = _OF_WINDOWS.fullmatch(text.partition(".")[0].rstrip(" "))
    if raw and (raw[:1] in b". " or device):
        coded[0] = f"%{raw[0]:02X}"
    if raw and raw[-1:] in b". ":
        coded[-1] = f"%{raw[-1]:02X}"
    name = "".join(coded) or "%"
    if len(name) <= _LONGEST:
        return name
    digest = hashlib.blake2b(raw, digest_size=_DIGEST).hexdigest()
    return f"{name[: _LONGEST - len(digest) - 2]}%~{digest}"  # which no coded text holds


def shown(text: str) -> str:
    """A text on one line of valid Unicode: what cannot be printed becomes an escape.

    Backslashes are doubled, so that two texts that differ are shown differently.
    """
    return "".join(
        one if one.isprintable() and one != "\\" else one.encode("unicode_escape").decode()
        for one in text
    )


def cell(text: str) -> str:
    """A text as a cell of a CSV: on one line, and no formula that a spreadsheet would compute.

    One that begins as a formula does gets a single quote before it, as OWASP says.
    """
    return f"'{shown(text)}" if _FORMULA.match(text) else shown(text)


def short(text: str, most: int = 200) -> str:
    """A text as `shown`, of a long one its beginning and its end."""
    one, half = shown(text), most // 2
    return one if len(one) <= most else f"{one[:half]}...{one[3 - half :]}"


def encodable(text: str, encoding: str) -> str:
    """A text that a file in this encoding takes; bytes that are no text become such as \\xff."""
    if text.isascii():
        return text
    plain = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return plain.encode(encoding, "backslashreplace").decode(encoding)


def on_page(text: str) -> str:
    """A text as HTML that shows it, in an element or an attribute."""
    return html.escape(shown(text))


def on_plot(text: str, most: int = 40) -> str:
    """A text as matplotlib's labels show it, without formulas, cut to `most` characters.

    Characters that the font lacks become escapes, and a legend shows it whatever it begins with.
    """
    known = _characters_of_font()
    one_line = "".join(
        one if ord(one) in known else one.encode("unicode_escape").decode() for one in shown(text)
    )
    cut = one_line if len(one_line) <= most else f"{one_line[: most - 3]}..."
    return (f" {cut}" if cut[:1] in ("", "_") else cut).replace("$", r"\$")


@cache
def _characters_of_font() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())
