"""Reads NumPy's archives, without objects of Python, with errors that name the file."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedjax_bn.data.sets.files import corruption_named


@contextmanager
def _opened(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    # NumPy leaves a file that it has opened itself open if it is damaged.
    with (
        corruption_named(path),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        yield archive


def names_in_npz(path: Path) -> tuple[str, ...]:
    """Returns the names of an archive's arrays; ValueError if it is not one."""
    with _opened(path) as archive:
        return tuple(archive.files)


def read_npz(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Reads the arrays `names` of an archive, all of which it must have.

    Raises:
      ValueError: the archive is damaged, or an array is missing or holds Python objects.
    """
    with _opened(path) as archive:
        return {name: archive[name] for name in names}
