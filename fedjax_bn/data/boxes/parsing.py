"""JSON and XML of labels, read without trust: what is not of the form is told in a sentence."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fedjax_bn.arguments.text import shown
from fedjax_bn.data.regular_files import read_regular, read_text
from fedjax_bn.data.sets.files import corruption_named

_LARGEST_XML = 2**24  # bytes; one image's labels take a few thousand
_LARGEST_JSON = 2**32  # bytes; Objects365's, the largest that we know, takes half of them
_WORDS = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is damaged, nested absurdly deep, or no regular file of up to 4 GiB.
    """
    with corruption_named(path):
        return json.loads(read_text(path, _LARGEST_JSON))


def entry(value: Any, key: str, kind: type, place: str) -> Any:
    """`value[key]`, which must be of a kind: dict, list, str or int.

    Raises:
      ValueError: `value` is no object, has no such key, or another kind of value there.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object")
    if key not in value:
        raise ValueError(f"{place} has no {key!r}")
    return of_kind(value[key], kind, f"{place}: {key!r}")


def of_kind(value: Any, kind: type, place: str) -> Any:
    """The value, which must be of a kind.

    Raises:
      ValueError: it is of another.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{place} must be {_WORDS[kind]}")
    return value


def number(value: Any, place: str) -> float:
    """A number, as JSON has it; it may not be finite.

    Raises:
      ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{place} is too large a number") from None


def read_xml(path: Path) -> ElementTree.Element:
    """The root of an XML file, which may declare no document type, and so no entities.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is damaged, too large, or declares a document type.
    """
    parser = ElementTree.XMLParser(target=_NoDoctype())
    with corruption_named(path):
        parser.feed(read_regular(path, _LARGEST_XML))
        return parser.close()


class _NoDoctype(ElementTree.TreeBuilder):
    """A tree of XML without document type: entities, which may grow without bound, need one."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it declares a document type, which labels do not need")


def text_of(element: ElementTree.Element, name: str, place: str) -> str:
    """The text of the first element of that name within another.

    Raises:
      ValueError: there is none, or it is empty.
    """
    found = element.findtext(name)
    if found is None or not found.strip():
        raise ValueError(f"{place} has no <{name}>")
    return found.strip()


def number_of(element: ElementTree.Element, name: str, place: str) -> float:
    """The number that `text_of` gives.

    Raises:
      ValueError: there is none.
    """
    text = text_of(element, name, place)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{place}: <{name}> is {shown(text[:40])!r}, which is no number") from None
