"""Reads NumPy's archives and compressed files after checking the sizes that they claim.

A header can claim any shape, and a compressed file can unpack to any size. Both are checked before
memory is taken.
"""

import io
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, is_zipfile

import numpy as np

from fedjax_bn.arguments.text import short
from fedjax_bn.data.regular_files import open_regular
from fedjax_bn.data.sets.files import corruption_named

_HEADER = 12 + 10_000  # bytes; NumPy refuses to parse longer ones
_PACKED = 200  # arrays may unpack to so many times the file's size
_SMALL = 2**28  # bytes; arrays may always unpack to so many


@contextmanager
def _opened(path: Path) -> Iterator[ZipFile]:
    """Opens an archive; any error raised while it is open becomes a ValueError that names it."""
    with open_regular(path, math.inf) as file:
        if not is_zipfile(file):
            raise ValueError(
                f"{path} is not a .npz archive, or is cut short; fetch or write it again"
            )
        with corruption_named(path), ZipFile(file) as archive:
            yield archive


def names_in_npz(path: Path) -> tuple[str, ...]:
    """Returns the names of an archive's arrays; ValueError if it is not one or repeats a name."""
    with _opened(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path} has two arrays {short(twice)!r}; write it again")
    return tuple(names)


def read_npz(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Reads the arrays `names` of an archive, all of which it must have.

    Raises:
      ValueError: the archive is corrupt, an array holds Python objects, a header claims another
        size than the array has, or `check_unpacked` refuses the sizes.
    """
    forms_in_npz(path, names)
    arrays = {}
    with _opened(path) as archive:
        for name in names:
            with archive.open(f"{name}.npy") as file:
                arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    return arrays


def forms_in_npz(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Returns stand-ins for some arrays with their shapes and dtypes, reading only the headers.

    All entries of a stand-in share one number in memory, so it takes no space. Errors are those of
    `read_npz`.
    """
    forms = {}
    with _opened(path) as archive:
        for name in names:
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise ValueError(f"{name} is compressed in a way that NumPy does not write")
            with archive.open(member) as whole:
                file = io.BytesIO(whole.read(_HEADER))
            first = np.lib.format.read_magic(file) == (1, 0)
            read_header = "read_array_header_1_0" if first else "read_array_header_2_0"
            shape, _, dtype = getattr(np.lib.format, read_header)(file)
            if dtype.hasobject:
                raise ValueError(f"{name} holds Python objects, which are never loaded")
            claimed, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
            if min(shape, default=0) < 0 or claimed != there or not dtype.itemsize:
                raise ValueError(
                    f"the header of {name} claims {dtype} {shape}, {claimed:,} bytes, but it has "
                    f"{there:,}"
                )
            forms[name] = np.broadcast_to(np.zeros((), dtype), shape)
        check_unpacked(sum(form.size * form.itemsize for form in forms.values()), path)
    return forms


def read_bounded(file: BinaryIO, most: int) -> bytes:
    """Reads the rest of a file, compressed or not; ValueError above `most` bytes."""
    parts, size = [], 0
    while part := file.read(2**20):  # `read()` without a size would allocate everything
        parts.append(part)
        size += len(part)
        if size > most:
            raise ValueError(f"it unpacks to more than the {most:,} bytes that it may have")
    return b"".join(parts)


def check_unpacked(size: int, path: Path) -> None:
    """Raises ValueError if a file's arrays would unpack to too many bytes, `size`.

    Too many are more than the machine's memory; or more than 256 MiB and more than 200 times the
    file's size, a ratio that measured numbers do not reach.
    """
    check_memory(size)
    there = path.stat().st_size
    if size > max(_SMALL, _PACKED * there):
        raise ValueError(
            f"its {there:,} bytes unpack to {size:,}, more than {_PACKED} times as many; if that "
            "is right, write it again without compression"
        )


def check_memory(size: int) -> None:
    """Raises ValueError if `size` bytes exceed the machine's memory, if this is known."""
    memory = math.inf
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise ValueError(
            f"it claims {size / 1e9:,.1f} GB, more than this machine's {memory / 1e9:,.1f} GB"
        )
