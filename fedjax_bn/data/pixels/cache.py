"""Makes arrays of bytes once and keeps them in a folder, memory-mapped, or in memory.

An array is written to a partial file and renamed when it is complete, so that a file of the final
name is whole. A lock for its name makes a second process wait for the first and read its file.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
from filelock import FileLock, Timeout

from fedjax_bn.arguments.text import file_name
from fedjax_bn.data.messages import in_threads

Write = Callable[..., None]
_Make = Callable[[Write], Sequence[str]]
_File = TypeVar("_File")


def cached_array(
    folder: str | Path | None, name: str, shape: Sequence[int], make: _Make
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the array `name` of the cache, which is made if it is not there.

    Args:
      folder: the cache, created if need be; None to keep the array in memory only.
      name: must differ from all other arrays' names, so it includes a digest of the array's origin.
      shape: of the whole array of bytes.
      make: `make(write) -> notes`, called only if the array is not there yet; hands all rows to
        `write(u8[n, ...])` in blocks, in order, or to `write(u8[n, ...], start)` in any order and
        from any thread. If it raises an error, no file is left.

    Returns:
      u8[shape], memory-mapped for reading if it is in a folder, and the notes that `make` returned.

    Raises:
      OSError: the disk is full, or the folder cannot be written to.
    """
    shape = tuple(shape)
    if folder is None:
        array = np.empty(shape, np.uint8)

        def put(rows: np.ndarray, start: int) -> None:
            array[start : start + len(rows)] = rows

        return array, tuple(make(_in_order(put)))
    path = Path(folder, f"{file_name(name)}.npy")
    # Read before locking, so that a cache on a read-only disk serves too.
    if stored := _read(path, shape):
        return stored
    with _locked(path, math.prod(shape)):
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
    """Returns i32[N, width], one row `read(file)` per file (or pair of files), read in threads.

    Folder, name and errors are as in `cached_array`; `progress` shows a bar on stderr.
    """

    def make(write: Write) -> tuple[str, ...]:
        rows = np.array([*in_threads(read, files, name.partition("-")[0], progress)], "<i4")
        write(rows.view(np.uint8).reshape(len(rows), -1))
        return ()

    rows = cached_array(folder, name, (len(files), 4 * width), make)[0]
    return np.ascontiguousarray(rows).view("<i4")


def _in_order(put: Callable[[np.ndarray, int], None]) -> Write:
    """Returns `put(rows, start)` whose `start` defaults to the end of the previous rows."""
    after = 0  # the row that follows those written

    def write(rows: np.ndarray, start: int | None = None) -> None:
        nonlocal after
        start = after if start is None else start
        after = start + len(rows)
        put(rows, start)

    return write


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


@contextmanager
def _locked(path: Path, size: int) -> Iterator[None]:
    """Lets one process at a time write a file."""
    with _faults_named(path, size):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        try:
            lock.acquire(blocking=False)
        except Timeout:
            print(f"waiting for another process that writes {path}", file=sys.stderr)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_whole(path: Path, shape: tuple[int, ...], make: _Make) -> None:
    """Writes header, array and notes, and flushes them to the disk before the file gets its name.

    A file that a killed process left half written is written again.
    """
    size, partial, one_at_a_time = math.prod(shape), path.with_suffix(".partial"), Lock()
    with _faults_named(path, size):
        if shutil.disk_usage(path.parent).free < size:  # fails before hours of decoding
            raise OSError("its disk is full")
        file = open(partial, "wb")  # noqa: SIM115, closed below whatever happens

    def put(rows: np.ndarray, start: int) -> None:
        with one_at_a_time, _faults_named(path, size):
            file.seek(begin + start * (size // shape[0]))
            file.write(np.ascontiguousarray(rows))

    try:
        with _faults_named(path, size):
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            begin = file.tell()
        notes = make(_in_order(put))
        with _faults_named(path, size):
            file.seek(begin + size)
            file.write(json.dumps(list(notes)).encode())
            file.flush()
            # Before the rename, so that even after a power cut a file of the final name is whole.
            os.fsync(file.fileno())
            file.close()
            os.replace(partial, path)
    finally:
        with suppress(OSError):  # it would hide the first error
            file.close()
        partial.unlink(missing_ok=True)


@contextmanager
def _faults_named(path: Path, size: int) -> Iterator[None]:
    """Replaces a system error on writing by an error that names the cache."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot keep {size / 1e6:.1f} MB of decoded images in {path.parent} "
            f"({error.strerror or error}): make room there, or give another data.cache (empty for "
            "none)"
        ) from error
