"""Reads JSON and XML of labels, which may come from anyone: each fault is one error message."""

import json
import re
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fedjax_bn.arguments.text import shown
from fedjax_bn.data.regular_files import open_regular, read_regular, read_text
from fedjax_bn.data.sets.files import corruption_named

_LARGEST_XML = 2**24  # bytes; one image's labels take a few thousand
_LARGEST_JSON = 2**32  # bytes; Objects365, the largest that we know, takes half of them
_LARGEST_ROWS = 2**34  # bytes of a file of which one row is held at a time
_CHUNK = 2**20  # characters that are read at a time
_LONGEST = 2**27  # characters of a row; the longest row of BDD100K has some hundred thousand
_SPACE = re.compile(r"[ \t\n\r]*")
_WORDS = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: it is damaged, nested absurdly deep, or not a regular file of up to 4 GiB.
    """
    with corruption_named(path):
        return json.loads(read_text(path, _LARGEST_JSON))


def read_rows(path: Path) -> Iterator[Any]:
    """Yields the values of a JSON file that is one long list, and holds the text of one at a time.

    BDD100K's labels of 2018 have 1.4 GB.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: it is damaged, not a list, or a value is absurdly long.
    """
    decoder = json.JSONDecoder()
    text, at, ended = "", 0, False  # what has been read, from the value at hand on

    def read_more() -> None:
        nonlocal text, at, ended
        left = text[at:]
        if len(left) > _LONGEST:
            raise ValueError(f"a value of its list has over {_LONGEST:,} characters")
        # As much as is at hand, so that the longest value is tried a few times only.
        new = file.read(max(_CHUNK, len(left)))
        text, at, ended = left + new, 0, not new

    def next_character() -> str:
        nonlocal at
        while True:
            at = _SPACE.match(text, at).end()
            if at < len(text) or ended:
                return text[at : at + 1]
            read_more()

    def next_value() -> Any:
        nonlocal at
        while True:
            try:
                value, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError:  # the value may continue in the next chunk
                if ended:
                    raise
            else:
                # A number at the end of the text may continue; before a comma it does not.
                after = _SPACE.match(text, end).end()
                if text[after : after + 1] in (",", "]") or ended:
                    at = end
                    return value
            read_more()

    with (
        corruption_named(path),
        open_regular(path, _LARGEST_ROWS) as raw,
        TextIOWrapper(raw, "utf-8-sig") as file,
    ):
        if next_character() != "[":
            raise ValueError("it must be a list")
        at += 1
        mark = next_character()
        while mark != "]":
            yield next_value()
            mark = next_character()
            if mark not in ("]", ","):
                raise ValueError(f"a value of its list is followed by {mark or 'nothing'!r}")
            if mark == ",":
                at += 1
                next_character()
        at += 1
        if next_character():
            raise ValueError("something follows its list")


def entry(value: Any, key: str, kind: type, place: str) -> Any:
    """Returns `value[key]`, which must be of a kind: dict, list, str or int.

    Raises:
      ValueError: `value` is not an object, lacks the key, or has another kind of value there.
    """
    if key not in of_kind(value, dict, place):
        raise ValueError(f"{place} has no {key!r}")
    return of_kind(value[key], kind, f"{place}: {key!r}")


def of_kind(value: Any, kind: type, place: str) -> Any:
    """Returns the value, or raises ValueError if it is of another kind."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{place} must be {_WORDS[kind]}")
    return value


def number(value: Any, place: str) -> float:
    """Returns a number of JSON, which may not be finite, or raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{place} is too large a number") from None


class _NoDoctype(ElementTree.TreeBuilder):
    """Builds XML without a document type: entities, which may grow without bound, need one."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it declares a document type, which labels do not need")


def read_xml(path: Path) -> ElementTree.Element:
    """Returns the root of an XML file.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: it is damaged, too large, or declares a document type.
    """
    parser = ElementTree.XMLParser(target=_NoDoctype())
    with corruption_named(path):
        parser.feed(read_regular(path, _LARGEST_XML))
        return parser.close()


def text_of(element: ElementTree.Element, name: str, place: str) -> str:
    """Returns the text of the first element of that name in another; it must not be empty."""
    found = (element.findtext(name) or "").strip()
    if not found:
        raise ValueError(f"{place} has no <{name}>")
    return found


def number_of(element: ElementTree.Element, name: str, place: str) -> float:
    """Returns the number that `text_of` finds, or raises ValueError."""
    text = text_of(element, name, place)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{place}: <{name}> is {shown(text[:40])!r}, not a number") from None
