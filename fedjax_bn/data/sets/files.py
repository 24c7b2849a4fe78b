"""Reads lists of images and tables from outside, with errors that name the file."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from textwrap import shorten

import numpy as np

from fedjax_bn.data.messages import first_few
from fedjax_bn.data.regular_files import Refused, open_regular, read_text

_LARGEST_TABLE = 2**32  # bytes; Camelyon17's, read line by line, has 30 million
_LONGEST_LINE = 2**17  # characters, as many as Python's `csv` allows in a field


@contextmanager
def corruption_named(path: Path) -> Iterator[None]:
    """Turns any error of a format's parser into a ValueError that names the file.

    Raises:
      ValueError: the body raised anything but a missing file, a missing package, or
        `regular_files.Refused`, which names the file already.
    """
    try:
        yield
    except (FileNotFoundError, ImportError, Refused):
        raise
    except MemoryError as error:
        raise ValueError(f"{path} takes more memory than there is; fetch it again") from error
    except Exception as error:  # parsers raise zlib.error, struct.error, TypeError, KeyError, ...
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {shorten(str(error), 200)}); fetch it "
            "again"
        ) from error


def is_label(text: str) -> bool:
    """Returns whether a word is a whole number of up to nine digits, as in lists and tables."""
    return text.isascii() and text.isdecimal() and len(text) < 10


def without_suffix(name: str) -> str:
    """Returns a name without its suffix, because copies of a dataset differ in image formats."""
    head, dot, suffix = name.rpartition(".")
    return head if dot and "/" not in suffix else name


def read_list(path: Path) -> tuple[list[str], np.ndarray]:
    """Reads a text of lines `FILE LABEL`.

    Returns:
      The files, with / in their names, and their labels i64[N] as written.

    Raises:
      FileNotFoundError: the list is missing.
      ValueError: the list is not a text, is empty, or has other lines; the first ten are named.
    """
    if not path.exists():
        raise FileNotFoundError(f"the list {path} is missing; fetch it again")
    with corruption_named(path):
        lines = read_text(path).splitlines()
    rows = [(number, line.rsplit(None, 1)) for number, line in enumerate(lines, 1) if line.strip()]
    wrong = [str(number) for number, row in rows if len(row) != 2 or not is_label(row[1])]
    if wrong:
        raise ValueError(f"{path}: lines must be FILE LABEL, but these are not: {first_few(wrong)}")
    if not rows:
        raise ValueError(f"the list {path} is empty; fetch it again")
    names = [row[0].strip().replace("\\", "/") for _, row in rows]
    return names, np.array([int(row[1]) for _, row in rows], np.int64)


@contextmanager
def open_table(path: Path) -> Iterator[csv.DictReader]:
    """Opens a table whose first line has the names of its columns.

    A row with too few cells has None in the last ones.

    Raises:
      ValueError: the file is not a table, or has a line of absurd length; raised while reading too.
    """
    with (
        corruption_named(path),
        open_regular(path, _LARGEST_TABLE) as raw,
        TextIOWrapper(raw, "utf-8-sig", errors="replace", newline="") as file,
    ):

        def lines() -> Iterator[str]:
            while line := file.readline(_LONGEST_LINE):
                if len(line) == _LONGEST_LINE:  # csv would hold the whole line in memory
                    raise ValueError(f"it has a line of over {_LONGEST_LINE} characters")
                yield line

        yield csv.DictReader(lines())
