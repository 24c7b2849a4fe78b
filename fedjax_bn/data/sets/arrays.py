"""NumPy's archives and compressed files, believed only as far as the file reaches.

A header may tell of any shape and a compressed file may unpack to any size, so both are looked at
before memory is taken.
"""

import io
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, is_zipfile

import numpy as np

from fedjax_bn.data.sets.files import corruption_named

_HEADER = 12 + 10_000  # bytes; NumPy refuses to parse longer ones


def names_in_npz(path: Path) -> tuple[str, ...]:
    """The names of an archive's arrays.

    Raises:
      ValueError: it is no archive, or has two arrays of one name.
    """
    if not is_zipfile(path):
        raise ValueError(f"{path} is no .npz archive, or is cut short; fetch or write it again")
    with corruption_named(path), ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
    twice = [name for name in names if names.count(name) > 1] if len({*names}) < len(names) else []
    if twice:
        raise ValueError(f"{path} has two arrays {twice[0]!r}; write it again")
    return tuple(names)


def read_npz(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Some arrays of an archive, which has them.

    Raises:
      ValueError: the archive is corrupt, an array holds Python objects, a header tells of another
        size than the array has, or all together are larger than the machine's memory.
    """
    with corruption_named(path), ZipFile(path) as archive:
        members = {name: archive.getinfo(f"{name}.npy") for name in names}
        check_memory(sum(member.file_size for member in members.values()))
        arrays = {}
        for name, member in members.items():
            if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise ValueError(f"{name} is compressed in a way that NumPy does not write")
            with archive.open(member) as file:
                _check_header(file.read(_HEADER), member.file_size, name)
            with archive.open(member) as file:
                arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    return arrays


def _check_header(begin: bytes, size: int, name: str) -> None:
    """Raises ValueError unless an array of `size` bytes is as large as its header tells."""
    file = io.BytesIO(begin)
    version = np.lib.format.read_magic(file)
    parse = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        parse = np.lib.format.read_array_header_2_0
    shape, _, dtype = parse(file)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are never loaded")
    told, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or told != there or not dtype.itemsize:
        raise ValueError(
            f"the header of {name} tells of {dtype} {shape}, {told:,} bytes, and {there:,} are "
            "there"
        )


def read_bounded(file: BinaryIO, most: int) -> bytes:
    """All that a file, compressed or not, has left.

    Raises:
      ValueError: it is more than `most` bytes.
    """
    parts, size = [], 0
    while part := file.read(2**20):  # a request for all would take memory before it is needed
        parts.append(part)
        size += len(part)
        if size > most:
            raise ValueError(f"it unpacks to more than the {most:,} bytes that it may have")
    return b"".join(parts)


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file; a pipe or a device, which may never end, is not opened.

    Raises:
      ValueError: it is no regular file, or larger than `most` bytes.
      OSError: it is not there, or cannot be read.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode) or about.st_size > most:
        raise ValueError(f"{path.name} is no regular file of at most {most:,} bytes")
    with open(path, "rb") as file:
        return read_bounded(file, most)


def check_memory(size: int) -> None:
    """Raises ValueError if so many bytes are more than the machine's memory, where it is known."""
    memory = math.inf
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise ValueError(
            f"it tells of {size / 1e9:,.1f} GB, more than this machine's {memory / 1e9:,.1f} GB"
        )
