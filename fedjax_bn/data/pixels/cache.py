"""Makes arrays of bytes once and keeps them in a folder, memory-mapped, or in memory.

A file of the final name is whole. A second process waits for the first and reads its file.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from mmap import mmap
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock

from fedjax_bn.arguments.text import file_name
from fedjax_bn.data.threads import in_threads

Write = Callable[..., None]
_Make = Callable[[Write], Sequence[str]]
_File = TypeVar("_File")


def cached_array(
    folder: str | Path | None, name: str, shape: Sequence[int], make: _Make
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the array u8[shape] `name` of the cache, made if it is not there, and notes on it.

    It is memory-mapped if it is in a folder, which is created if need be; with None it is in memory
    only. As names must differ, they include a digest of the array's origin. `make(write) -> notes`
    hands all rows to `write(u8[n, ...])` in blocks, in order, or to `write(u8[n, ...], start)` in
    any order and from any thread. OSError: the folder cannot be written to.
    """
    shape = tuple(shape)
    if folder is None:
        memory = mmap(-1, math.prod(shape))  # written as a file is
        notes = _write_rows(memory, shape, make, Path())
        return np.frombuffer(memory, np.uint8).reshape(shape), notes
    path = Path(folder, f"{file_name(name)}.npy")
    # Read before locking, so that a cache on a read-only disk serves too.
    if stored := _read(path, shape):
        return stored
    with _faults_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        locked = FileLock(path.with_suffix(".lock")).acquire()
    with locked:
        if not _read(path, shape):  # else another process made it meanwhile
            _write_whole(path, shape, make)
    return _read(path, shape)


def cached_numbers(
    folder: str | Path | None,
    name: str,
    files: Sequence[_File],
    read: Callable[[_File], np.ndarray | Sequence[int]],
    width: int,
    progress: bool = False,
) -> np.ndarray:
    """Returns i32[N, width], one row `read(file)` per file or pair of files; see `cached_array`."""

    def make(write: Write) -> tuple[str, ...]:
        rows = np.array([*in_threads(read, files, name.partition("-")[0], progress)], "<i4")
        write(rows.view(np.uint8).reshape(len(rows), -1))
        return ()

    rows = cached_array(folder, name, (len(files), 4 * width), make)[0]
    return np.ascontiguousarray(rows).view("<i4")


def _read(path: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """Returns a file's array and notes; None if there is no file, or not one of this shape."""
    try:
        array = np.load(path, mmap_mode="r")
        with open(path, "rb") as file:
            file.seek(array.offset + array.nbytes)
            notes = tuple(json.loads(file.read()))  # follow the array
    except (OSError, ValueError, EOFError):
        return None
    return (array, notes) if array.shape == shape else None


def _write_whole(path: Path, shape: tuple[int, ...], make: _Make) -> None:
    """Writes header, array and notes to the disk before the file gets its name."""
    partial = path.with_suffix(".partial")
    with _faults_named(path):
        if shutil.disk_usage(path.parent).free < math.prod(shape):  # before hours of decoding
            raise OSError("its disk is full")
        file = open(partial, "wb")  # noqa: SIM115, closed below whatever happens
    try:
        with _faults_named(path):
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        notes = _write_rows(file, shape, make, path)
        with _faults_named(path):
            file.write(json.dumps(notes).encode())
            file.flush()
            # Before the rename, so that even after a power cut a file of the final name is whole.
            os.fsync(file.fileno())
            file.close()
            os.replace(partial, path)
    finally:
        with suppress(OSError):  # it would hide the first error
            file.close()
        partial.unlink(missing_ok=True)


def _write_rows(file: Any, shape: tuple[int, ...], make: _Make, path: Path) -> tuple[str, ...]:
    """Lets `make` write the array from the file's present place on, and returns its notes."""
    begin, row, one_at_a_time = file.tell(), math.prod(shape[1:]), Lock()

    def write(rows: np.ndarray, start: int | None = None) -> None:
        with one_at_a_time, _faults_named(path):
            if start is not None:
                file.seek(begin + start * row)
            file.write(np.ascontiguousarray(rows))

    notes = tuple(make(write))
    file.seek(begin + math.prod(shape))
    return notes


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    """Replaces a system error on writing by an error that names the cache."""
    try:
        yield
    except OSError as error:
        reason = f"cannot keep decoded images in {path.parent} ({error.strerror or error})"
        raise OSError(f"{reason}: make room, or give another data.cache, or none") from error
