"""Reads lists, tables and NumPy's archives; errors name the file, the reason and the remedy."""

import csv
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np


@contextmanager
def corruption_named(path: Path) -> Iterator[None]:
    """Turns errors of a parser into a ValueError with the file's path, but not a missing file."""
    try:
        yield
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:  # parsers raise zlib.error, struct.error, TypeError, KeyError, ...
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # some have several lines
        raise ValueError(f"{path} cannot be read ({reason}); fetch it again") from error


def names_in_npz(path: Path) -> tuple[str, ...]:
    """Returns the names of an archive's arrays; ValueError if it is not one."""
    # NumPy leaves a file that it has opened itself open if it is damaged.
    with corruption_named(path), path.open("rb") as file:
        return tuple(np.load(file, allow_pickle=False).files)


def read_npz(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Returns arrays of an archive; ValueError if one is missing, damaged or of Python objects."""
    with corruption_named(path), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        return {name: archive[name] for name in names}


def read_list(path: Path) -> tuple[list[str], np.ndarray]:
    """Returns the files, with / in their names, and labels i64[N] of lines `FILE LABEL`."""
    with corruption_named(path):
        rows = [line.rsplit(None, 1) for line in path.read_text("utf-8-sig").splitlines()]
        files = [name.strip().replace("\\", "/") for name, _ in filter(None, rows)]
        return files, np.array([int(label) for _, label in filter(None, rows)], np.int64)


@contextmanager
def open_table(path: Path) -> Iterator[csv.DictReader]:
    """Opens a table whose first line names its columns; missing last cells of a row are None."""
    # Unknown bytes are replaced, because tables have columns of free text in other encodings.
    how = {"encoding": "utf-8-sig", "errors": "replace", "newline": ""}
    with corruption_named(path), path.open(**how) as file:
        yield csv.DictReader(file)
