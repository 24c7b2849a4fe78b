"""Names of clients, domains and files, which may be any text, where they are written or shown.

A name may hold separators of folders, markup, line breaks, or bytes that are no text at all (which
Python reads as lone surrogates). What Python prints as it is stays readable everywhere.
"""

import hashlib
import html
import re
import unicodedata
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
    """Returns a text that a file in this encoding takes; what it lacks becomes such as \\u4eac."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def on_page(text: str) -> str:
    """A text as HTML that shows it, in an element or an attribute."""
    return html.escape(shown(text))


def on_plot(text: str, most: int = 40) -> str:
    """A text as matplotlib's labels show it, without formulas; beyond `most` its middle is cut.

    `figures.png` draws characters that the usual font lacks with another installed font. Without
    one they are spelled: letters by their names, all else as <name of it> or <U+4EAC>. A legend
    shows the text whatever it begins with.
    """
    drawn = "".join(one if font_with(one) else _spelled(one) for one in shown(text))
    head = (most - 3) // 2
    cut = drawn if len(drawn) <= most else f"{drawn[:head]}...{drawn[head + 3 - most :]}"
    return (f" {cut}" if cut[:1] in ("", "_") else cut).replace("$", r"\$")


def in_lines(text: str, width: int = 30, most: int = 255) -> str:
    """A text as `on_plot` shows it, in lines of `width` characters; all of it up to `most`."""
    text = text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"
    lines = re.findall(rf".{{1,{width}}}(?: |$)|.{{1,{width}}}", text, re.DOTALL)
    return "\n".join(on_plot(line.removesuffix(" "), 10 * width) for line in lines)


def _spelled(one: str) -> str:
    """A character in those of ASCII: a letter's sound where its name holds it."""
    name = unicodedata.name(one, "")
    if sound := re.search(r"(?:LETTER|SYLLABLE|VOWEL SIGN)(?: SMALL)? ([A-Z]+)$", name):
        return sound[1].lower()
    return f"<U+{ord(one):04X}>" if not name or "IDEOGRAPH" in name else f"<{name.lower()}>"


@cache
def font_with(one: str) -> str:
    """Returns the family of an installed font that draws a character, the usual first, or ""."""
    fonts = _fonts().items()
    return next((family for family, path in fonts if ord(one) in _characters(path)), "")


@cache
def _fonts() -> dict[str, str]:
    """Family -> file, the usual one first and then those of many scripts."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    usual = findfont(FontProperties())
    plain = [font for font in fontManager.ttflist if (font.style, font.weight) == ("normal", 400)]
    # "Last Resort" has a box for each character that there is.
    others = {font.name: font.fname for font in plain if "Last Resort" not in font.name}
    order = sorted(others, key=lambda name: ("Noto" not in name, name))
    first = get_font(usual).family_name
    return {first: usual} | {name: others[name] for name in order if name != first}


@cache
def _characters(path: str) -> frozenset[int]:
    from matplotlib.font_manager import get_font

    try:
        font = get_font(path)
        return frozenset(font.get_charmap()) if font.scalable else frozenset()
    except (OSError, RuntimeError):  # a damaged file, or pictures of one size only
        return frozenset()
