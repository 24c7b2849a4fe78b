"""Texts for messages, files and pages: names of clients, domains and files may be any text.

A name may hold separators of folders, markup, line breaks, or bytes that are not text (which
Python reads as lone surrogates). Characters that Python can print stay readable.
"""

import difflib
import hashlib
import re
from collections.abc import Iterable
from typing import Any

_LONGEST = 100  # characters of a file's name; endings and temporary files need some of the 255
_DIGEST = 16  # bytes
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.+=@,() ")
_OF_WINDOWS = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")


def brief(value: Any) -> str:
    """Returns a value as messages show it: its `repr`, shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or a deeply nested list
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 200 else f"{text[:100]}...{text[-20:]}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns the end of an error message: the most similar valid name, and all valid ones."""
    valid = sorted(valid)
    lower = {option.lower(): option for option in valid}
    close = difflib.get_close_matches(name.lower()[:100], lower, 1, 0.5)
    hint = f"; did you mean {lower[close[0]]!r}?" if close else ";"
    return f"{hint} valid are {', '.join(valid)}"


def one_line(error: BaseException) -> str:
    """Returns the message of an error on one line, shortened if it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else f"{text[:480]}..."


def file_name(text: str) -> str:
    """Returns a unique name for a file or folder, of at most 100 ASCII characters.

    Letters, digits, spaces and `-_.+=@,()` stay; all else becomes %XX, byte by byte in UTF-8. So do
    a dot or a space at either end, and the first letter of a name that Windows reserves for
    devices. The name of a long text ends in its digest. Different texts give different names on
    file systems that distinguish capitals from small letters.
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
    # No coded text holds "%~", so a shortened name never equals a whole one.
    return f"{name[: _LONGEST - len(digest) - 2]}%~{digest}"


def shown(text: str) -> str:
    """Returns a text on one line of valid Unicode, with escapes for what cannot be printed.

    Backslashes are doubled, so that two texts that differ are shown differently.
    """
    return "".join(
        one if one.isprintable() and one != "\\" else one.encode("unicode_escape").decode()
        for one in text
    )


def short(text: str, most: int = 200) -> str:
    """Returns a text as `shown` does, or the beginning and the end of a long one."""
    one, half = shown(text), most // 2
    return one if len(one) <= most else f"{one[:half]}...{one[3 - half :]}"


def cell(text: str) -> str:
    """Returns a text as a cell of a CSV: on one line, and no formula for a spreadsheet.

    A text that begins like a formula gets a single quote before it, as OWASP recommends.
    """
    return f"'{shown(text)}" if _FORMULA.match(text) else shown(text)


def names_in(text: str) -> tuple[str, ...]:
    """Returns the names of a list such as "norm1, norm2"; an empty entry stays empty."""
    return tuple(map(str.strip, text.split(",")))
