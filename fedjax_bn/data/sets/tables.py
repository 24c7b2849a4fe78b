"""Tables with a line of column names: what Python's `csv` reads, with faults that name the file."""

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from fedjax_bn.data.regular_files import open_regular

_LARGEST = 2**32  # bytes; Camelyon17's, of which a line is held at a time, has 30 million
_LONGEST = 2**17  # characters of a line, as of a field in Python's `csv`


def column_names(path: Path) -> tuple[str, ...]:
    """The names in the first line of a table; none where it is empty.

    Raises:
      ValueError: the line is none of a table, such as one of absurd length.
    """
    with _opened(path) as table:
        return tuple(table.fieldnames or ())


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (number of the line, column -> text) of every row of a table that has these columns.

    Texts are without spaces around them, and empty where a row is cut short.

    Raises:
      ValueError: a line is none of a table, such as one of absurd length.
    """
    with _opened(path) as table:
        for row in table:
            yield table.line_num, {column: (row[column] or "").strip() for column in columns}


@contextmanager
def _opened(path: Path) -> Iterator[csv.DictReader]:
    with (
        open_regular(path, _LARGEST) as raw,
        TextIOWrapper(raw, "utf-8-sig", errors="replace", newline="") as file,
    ):
        try:
            yield csv.DictReader(_lines(file, path))
        except csv.Error as error:
            raise ValueError(f"{path} is no table ({error}); fetch it again") from error


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    while line := file.readline(_LONGEST):
        if len(line) == _LONGEST:
            raise ValueError(f"{path} has a line of over {_LONGEST} characters; fetch it again")
        yield line
