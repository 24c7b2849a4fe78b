"""Texts for messages, files and pages: names of clients, domains and files may be any text."""

import difflib
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

_LONGEST = 100  # characters of a file's name; endings and temporary files need some of the 255
_OF_WINDOWS = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")


def brief(value: Any) -> str:
    """Returns a value as messages show it: its `repr`, shortened if it is long."""
    return _cut(repr(value), 200)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns the end of an error message: the most similar valid name, and all valid ones."""
    valid = sorted(valid)
    by_lower_case = {option.lower(): option for option in valid}
    close = difflib.get_close_matches(name.lower(), by_lower_case, 1, 0.5)
    hint = f"; did you mean {by_lower_case[close[0]]!r}?" if close else ";"
    return f"{hint} valid are {', '.join(valid) or 'none'}"


def one_line(error: BaseException) -> str:
    """Returns the whole message of an error on one line; it may end in a long path."""
    return " ".join(str(error).split())


def file_name(text: str) -> str:
    """Returns a unique name for a file or folder, of at most 100 ASCII characters.

    Letters, digits, spaces and `-_.+=@,()` stay, all else becomes %XX. So do a dot or a space at
    either end, and the first letter of a device of Windows. Long texts end in a digest.
    """
    name = quote(text, safe="+=@,() ", errors="surrogatepass").replace("~", "%7E")
    if name[:1] in (".", " ") or _OF_WINDOWS.fullmatch(text.partition(".")[0].rstrip(" ")):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if name[-1:] in (".", " "):
        name = f"{name[:-1]}%{ord(name[-1]):02X}"
    if len(name) <= _LONGEST:
        return name or "%"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    # No coded text holds "%~", so a shortened name never equals a whole one.
    return f"{name[: _LONGEST - len(digest) - 2]}%~{digest}"


def shown(name: str) -> str:
    """Returns a text on one line of valid Unicode, with escapes for what cannot be printed."""

    # Backslashes are doubled, so that two texts that differ are shown differently.
    def escaped(character: str) -> str:
        printable = character.isprintable() and character != "\\"
        return character if printable else character.encode("unicode_escape").decode()

    return "".join(map(escaped, name))


def short(name: str, limit: int = 200) -> str:
    """Returns a text as `shown` does, or the beginning and the end of a long one."""
    return _cut(shown(name), limit)


def first_few(culprits: Sequence[str], limit: int = 10) -> str:
    """Returns the first `limit` culprits, whole, and the number of the others."""
    others_note = f" and {len(culprits) - limit} more" if len(culprits) > limit else ""
    return ", ".join(map(shown, culprits[:limit])) + others_note


def _cut(line: str, limit: int) -> str:
    """Returns a line of at most `limit` characters; the end stays, by which names often differ."""
    half = limit // 2
    return line if len(line) <= limit else f"{line[:half]}...{line[3 - half :]}"


def cell(value: str) -> str:
    """Returns a text as a cell of a CSV: on one line, and no formula for a spreadsheet."""
    # A single quote before what begins like a formula is OWASP's recommendation.
    return f"'{shown(value)}" if _FORMULA.match(value) else shown(value)


def names_in(names: str) -> tuple[str, ...]:
    """Returns the names of a list such as "norm1, norm2"; an empty entry stays empty."""
    return tuple(map(str.strip, names.split(",")))
