"""Writes figures of matplotlib as PNG bytes, and makes labels of any text."""

import io
import re
import unicodedata
from functools import cache

from matplotlib.figure import Figure
from matplotlib.text import Text

from fedjax_bn.arguments.text import shown


def png(figure: Figure) -> bytes:
    """Returns a figure as PNG without the program's name, so that equal runs write equal bytes."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_ticklabels()  # this creates their texts
    usual = _font_with("a")
    for text in figure.findobj(Text):
        others = dict.fromkeys(map(_font_with, text.get_text().replace("\n", "")))
        if others.keys() - {usual, ""}:
            text.set_fontfamily([*text.get_fontfamily(), *filter(None, others)])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def on_plot(text: str, most: int = 40) -> str:
    """Returns a text that labels of matplotlib show literally; a long one loses its middle.

    `png` draws characters that the usual font lacks with another installed font. Without such a
    font a letter becomes its name, and another character <its name> or <U+4EAC>. A space before a
    leading underscore keeps legends from hiding the text.
    """
    drawn = "".join(one if _font_with(one) else _spelled(one) for one in shown(text))
    head = (most - 3) // 2
    cut = drawn if len(drawn) <= most else f"{drawn[:head]}...{drawn[head + 3 - most :]}"
    return (f" {cut}" if cut[:1] in ("", "_") else cut).replace("$", r"\$")


def in_lines(text: str, width: int = 30, most: int = 255) -> str:
    """Returns a text as `on_plot` does, in lines of `width`; one above `most` loses its middle."""
    text = text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"
    lines = re.findall(rf".{{1,{width}}}(?: |$)|.{{1,{width}}}", text, re.DOTALL)
    return "\n".join(on_plot(line.removesuffix(" "), 10 * width) for line in lines)


def _spelled(one: str) -> str:
    """Returns a character in ASCII: a letter's sound if its Unicode name has it, else a tag."""
    name = unicodedata.name(one, "")
    if sound := re.search(r"(?:LETTER|SYLLABLE|VOWEL SIGN)(?: SMALL)? ([A-Z]+)$", name):
        return sound[1].lower()
    return f"<U+{ord(one):04X}>" if not name or "IDEOGRAPH" in name else f"<{name.lower()}>"


@cache
def _font_with(one: str) -> str:
    """Returns the family of an installed font with a character, first the usual font, or ""."""
    fonts = _fonts().items()
    return next((family for family, path in fonts if ord(one) in _characters(path)), "")


@cache
def _fonts() -> dict[str, str]:
    """Returns family -> file of fonts: the usual one first, then Noto's, then the others."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    usual = findfont(FontProperties())
    plain = [font for font in fontManager.ttflist if (font.style, font.weight) == ("normal", 400)]
    # "Last Resort" draws a box for every character.
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
    except (OSError, RuntimeError):  # a damaged file, or a bitmap font
        return frozenset()
