"""A JSON file that is one long list, read value by value: BDD100K's labels of 2018 have 1.4 GB."""

import json
import re
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from fedjax_bn.data.regular_files import open_regular
from fedjax_bn.data.sets.files import corruption_named

_LARGEST = 2**34  # bytes, of which a value is held at a time
_CHUNK = 2**20  # characters that are read at a time
_SPACE = re.compile(r"[ \t\n\r]*")
_LONGEST = 2**27  # of a value; BDD100K's longest takes some hundred thousand


def read_rows(path: Path) -> Iterator[Any]:
    """The values of the list, in order; of the file only the present one's text is held.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: it is damaged, no list, or a value is absurdly long.
    """
    with (
        corruption_named(path),
        open_regular(path, _LARGEST) as raw,
        TextIOWrapper(raw, "utf-8-sig") as file,
    ):
        text = _Text(file)
        if text.peek() != "[":
            raise ValueError("it must be a list")
        text.at += 1
        mark = text.peek()
        while mark != "]":
            yield text.value()
            mark = text.peek()
            if mark not in ("]", ","):
                raise ValueError(f"a value of its list is followed by {mark or 'nothing'!r}")
            if mark == ",":
                text.at += 1
                text.peek()
        text.at += 1
        if text.peek():
            raise ValueError("something follows its list")


class _Text:
    """The text of a file from the character `at` on, as far as it has been read."""

    def __init__(self, file: TextIO):
        self._file, self._decoder = file, json.JSONDecoder()
        self._text, self._ended, self.at = "", False, 0

    def peek(self) -> str:
        """The next character but for space, to which `at` moves; empty at the end."""
        while True:
            self.at = _SPACE.match(self._text, self.at).end()
            if self.at < len(self._text) or self._ended:
                return self._text[self.at : self.at + 1]
            self._more()

    def value(self) -> Any:
        """The value that begins here; `at` moves behind it."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self.at)
            except json.JSONDecodeError:  # it may go on
                if self._ended:
                    raise
            else:
                behind = _SPACE.match(self._text, end).end()
                if self._text[behind : behind + 1] in (",", "]") or self._ended:
                    self.at = end
                    return value  # else a number may go on
            self._more()

    def _more(self) -> None:
        """Reads as much as is at hand, so that the longest value is tried a few times only."""
        left = self._text[self.at :]
        if len(left) > _LONGEST:
            raise ValueError(f"a value of its list has over {_LONGEST:,} characters")
        new = self._file.read(max(_CHUNK, len(left)))
        self._text, self._ended, self.at = left + new, not new, 0
