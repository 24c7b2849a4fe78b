"""Reads lists, tables and NumPy's archives; errors name the file, the reason and the remedy."""

import csv
from collections.abc import Collection, Iterator
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


@contextmanager
def _opened_npz(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    # NumPy leaves a file that it has opened itself open if it is damaged.
    with (
        corruption_named(path),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        yield archive


def names_in_npz(path: Path) -> tuple[str, ...]:
    """Returns the names of an archive's arrays; ValueError if it is not one."""
    with _opened_npz(path) as archive:
        return tuple(archive.files)


def read_npz(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Returns arrays of an archive; ValueError if one is missing, damaged or of Python objects."""
    with _opened_npz(path) as archive:
        return {name: archive[name] for name in names}


def read_list(path: Path) -> tuple[list[str], np.ndarray]:
    """Reads a text of lines `FILE LABEL`.

    Returns:
      The files, with / in their names, and their labels i64[N] as written.

    Raises:
      FileNotFoundError: the list is missing.
      ValueError: the list is not a text, or has other lines.
    """
    with corruption_named(path):
        rows = [line.rsplit(None, 1) for line in path.read_text("utf-8-sig").splitlines()]
        rows = [row for row in rows if row]
        if faults := [" ".join(row) for row in rows if len(row) != 2 or not row[1].isdecimal()]:
            raise ValueError(f"lines must be FILE LABEL, but these are not: {first_few(faults)}")
        names = [name.strip().replace("\\", "/") for name, _ in rows]
        return names, np.array([int(label) for _, label in rows], np.int64)


@contextmanager
def open_table(path: Path) -> Iterator[csv.DictReader]:
    """Opens a table whose first line has the names of its columns; ValueError if it is not one.

    A row with too few cells has None in the last ones.
    """
    # Unknown bytes are replaced, because tables have columns of free text in other encodings.
    with (
        corruption_named(path),
        path.open(encoding="utf-8-sig", errors="replace", newline="") as file,
    ):
        yield csv.DictReader(file)
