"""Reads lists of images and tables, with errors that name the file, the reason and the remedy."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedjax_bn.data.messages import first_few


@contextmanager
def corruption_named(path: Path) -> Iterator[None]:
    """Turns any error of a format's parser into a ValueError that names the file.

    Raises:
      ValueError: the body raised anything but a missing file or a missing package.
    """
    try:
        yield
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:  # parsers raise zlib.error, struct.error, TypeError, KeyError, ...
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # some have several lines
        raise ValueError(f"{path} cannot be read ({reason}); fetch it again") from error


def is_label(word: str) -> bool:
    """Returns whether a word is a whole number of up to nine digits, as in lists and tables."""
    return word.isascii() and word.isdecimal() and len(word) < 10


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
      ValueError: the list is not a text, or has other lines; the first ten are named.
    """
    with corruption_named(path):
        lines = path.read_text("utf-8-sig").splitlines()
    rows = {k: line.rsplit(None, 1) for k, line in enumerate(lines, 1) if line.strip()}
    faults = [str(k) for k, row in rows.items() if len(row) != 2 or not is_label(row[1])]
    if faults:
        raise ValueError(
            f"{path}: lines must be FILE LABEL, but these are not: {first_few(faults)}"
        )
    names = [name.strip().replace("\\", "/") for name, _ in rows.values()]
    return names, np.array([int(label) for _, label in rows.values()], np.int64)


@contextmanager
def open_table(path: Path) -> Iterator[csv.DictReader]:
    """Opens a table whose first line has the names of its columns.

    A row with too few cells has None in the last ones.

    Raises:
      ValueError: the file is not a table; raised while reading too.
    """
    # Unknown bytes are replaced, because tables have columns of free text in other encodings.
    with (
        corruption_named(path),
        path.open(encoding="utf-8-sig", errors="replace", newline="") as file,
    ):
        yield csv.DictReader(file)
