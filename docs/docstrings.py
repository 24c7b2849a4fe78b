"""Our docstrings as reStructuredText: $formulas$ are typeset, and stars are stars.

A paragraph that is indented is a literal block. A name in backticks that stands on a page of the
API becomes a link to it.
"""

import functools
import re

import api_pages

_SECTION = re.compile(
    r"(Args|Arguments|Attributes|Returns|Yields|Raises|Example|Examples|Note|References):$"
)
_NAME = re.compile(r"^(\s+\*{0,2}\w+)(.*)$")
# Code or a formula; `maths.py` draws formulas.
_SET_APART = re.compile(r"(`[^`]*`|\$[^$\s](?:[^$]*[^$\s])?\$)")
_CALL = re.compile(r"`(?:fedjax_bn\.)?([\w.]+)((?:\([^<>]*\))?)`$")


@functools.cache
def _places() -> dict[str, str]:
    """Names of the API as docstrings write them, such as `sharing.split`, and the full ones.

    A name alone means the entry of that name in a module at the top, such as `methods.fedbn`: those
    of deeper ones are also names of arguments, such as `init`.
    """
    places: dict[str, set[str]] = {}
    for module, name, _ in api_pages.entries():
        parts = [*module.split(".")[1:], name]
        alone = module.count(".") == 1
        for start in range(len(parts) if alone else len(parts) - 1):
            places.setdefault(".".join(parts[start:]), set()).add(f"{module}.{name}")
    return {name: found.pop() for name, found in places.items() if len(found) == 1}


def process(app: object, what: str, name: str, thing: object, options: object, lines: list[str]):
    """Rewrites the lines of a docstring in place, before Sphinx reads them."""
    lines[:] = as_rest(lines)


def as_rest(lines: list[str]) -> list[str]:
    """Lines in which indented paragraphs are literal blocks and other text is escaped.

    Sections such as "Args:" are left to napoleon.
    """
    result: list[str] = []
    section = literal = False
    blank = [not line.strip() for line in ["", *lines, ""]]
    for i, line in enumerate(lines):
        indented = line.startswith(" ")
        if line.strip() and not indented:
            section, literal = bool(_SECTION.match(line)), False
        opens = indented and not section and not literal and result and not result[-1].strip()
        if opens and "".join(result).strip():
            result += ["::", ""]
            literal = True
        # A directive is a paragraph of its own; within one a formula is a role.
        if blank[i] and blank[i + 2] and line[:1] == "$" and _SET_APART.fullmatch(line):
            result.append(f".. math:: {line[1:-1]}")
        else:
            result.append(line if literal and indented else _escaped(line, section and indented))
    return result


def _escaped(line: str, in_section: bool) -> str:
    """The line with stars, bars and closing underscores as they are, but in code and formulas."""
    name, rest = "", line
    if in_section and (found := _NAME.match(line)):
        name, rest = found.groups()
    pieces = _SET_APART.split(rest)
    pieces[::2] = [re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", piece) for piece in pieces[::2]]
    for i in range(1, len(pieces), 2):  # code stands free, if only by a blank that is not shown
        found = _CALL.match(pieces[i])
        if found and found[1] in (places := _places()):
            pieces[i] = f":py:obj:`{found[1]}{found[2]} <{places[found[1]]}>`"
        elif pieces[i][0] == "$":
            pieces[i] = f":math:`{pieces[i][1:-1]}`"
        before = "\\ " if pieces[i - 1][-1:].isalnum() else ""
        after = "\\ " if re.match(r"[\w\[({<]", pieces[i + 1]) else ""
        pieces[i] = before + pieces[i] + after
    return name + "".join(pieces)
