"""Arrays of bytes that are made once: kept in a folder and memory-mapped, or in memory.

An array is written to a partial file in a folder of ours and renamed when it is whole, under a lock
of its name: a second process waits for the first and reads what it made. A killed process leaves a
partial file, which whoever comes next removes.

Behind the array stand checksums of the blocks in which it was written. They are compared whenever
the array is opened; a file that has changed since is made again. CRC-32 is for accidents, and reads
some 3 GB a second and core, four times as many as BLAKE2b.
"""

import io
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from fedjax_bn.arguments.text import file_name

Write = Callable[..., None]
_PARTIAL = "fedjax_bn-partial"  # the folder of our partial files and locks, in the cache's
_LARGE = 2e9  # bytes, of whose check the user is told


def cached_array(
    folder: Path | None, name: str, shape: Sequence[int], make: Callable[[Write], Sequence[str]]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The array of that name in the cache, made first if it is not there.

    Args:
      folder: the cache, created if need be; None to keep the array in memory only.
      name: tells the array from all others, so a digest of what it was made from belongs in it.
      shape: of the whole array of bytes.
      make: `make(write) -> notes`, called only if the array is not there yet; hands all rows to
        `write(u8[n, ...])` in blocks, in order, or to `write(u8[n, ...], start)` in any order and
        from any thread. Whatever it raises leaves nothing behind.

    Returns:
      u8[shape], memory-mapped for reading if it is in a folder, and the notes that `make` gave when
      it was made.

    Raises:
      OSError: the disk is full, or the folder cannot be written to.
    """
    if folder is None:
        array = np.empty(shape, np.uint8)

        def put(rows: np.ndarray, start: int) -> None:
            array[start : start + len(rows)] = rows

        return array, tuple(make(_in_order(put)))
    path = folder / f"{file_name(name)}.npy"
    found = _read(path, shape)
    if found is None:
        if path.exists():
            print(f"{path} is damaged or of an earlier version: it is made again", file=sys.stderr)
        _make(path, tuple(shape), make)
        found = _read(path, shape)
    if found is None:
        raise OSError(f"{path} vanished or changed while it was opened; run again")
    return found


def _in_order(put: Callable[[np.ndarray, int], None]) -> Write:
    """`put(rows, start)` with a start that, if not given, is where the last rows ended."""
    after = 0

    def write(rows: np.ndarray, start: int | None = None) -> None:
        nonlocal after
        start = after if start is None else start
        after = start + len(rows)
        put(rows, start)

    return write


def _read(path: Path, shape: Sequence[int]) -> tuple[np.memmap, tuple[str, ...]] | None:
    """The array and its notes, which stand behind it in the file; None if it is not sound."""
    header, size = _header(shape), _size(shape)
    try:
        with open(path, "rb") as file:
            sound = file.read(len(header)) == header
            file.seek(len(header) + size)
            checksum, footer = file.read(4), file.read()
    except OSError:
        return None
    if not sound or zlib.crc32(footer).to_bytes(4, "big") != checksum:
        return None
    about = json.loads(footer)
    array = np.memmap(path, np.uint8, "r", len(header), tuple(shape))
    if not _unchanged(array.reshape(-1), about["blocks"]):
        return None
    return array, tuple(about["notes"])


def _header(shape: Sequence[int]) -> bytes:
    """What an array's file begins with, as NumPy writes it."""
    header = io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, about)
    return header.getvalue()


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _unchanged(array: np.ndarray, blocks: Sequence[Sequence[int]]) -> bool:
    """Whether blocks [start, stop, checksum] make up all of u8[n], and its bytes are as written."""
    starts, stops, checksums = zip(*sorted(blocks), strict=True)
    if (*starts, len(array)) != (0, *stops):
        return False
    if len(array) > _LARGE:
        print(f"checking {len(array) / 1e9:.1f} GB of decoded images", file=sys.stderr)

    def checksum(start: int, stop: int) -> int:
        return zlib.crc32(array[start:stop])  # outside Python's lock

    with ThreadPoolExecutor() as threads:
        return checksums == tuple(threads.map(checksum, starts, stops))


def _make(path: Path, shape: tuple[int, ...], make: Callable[[Write], Sequence[str]]) -> None:
    """Writes the array unless another process has done so in the meantime."""
    folder, size = path.parent / _PARTIAL, _size(shape)
    partial = folder / f"{path.stem}.partial"
    with _faults_named(folder, size):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left_over(folder)
        lock = _locked(partial)
    try:
        if _read(path, shape) is None:
            _write_whole(partial, shape, make)
            with _faults_named(folder, size):
                os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        lock.release()


def _write_whole(
    partial: Path, shape: tuple[int, ...], make: Callable[[Write], Sequence[str]]
) -> None:
    """Writes header, array, checksums and notes to a new file, and waits until the disk has it."""
    header, size, blocks = _header(shape), _size(shape), []
    folder, row = partial.parent, size // shape[0]
    with _faults_named(folder, size):
        _check_space(folder, size)
        file = open(partial, "wb")  # noqa: SIM115, closed below whatever happens
    put = _putter(file, folder, size)

    def put_rows(rows: np.ndarray, start: int) -> None:
        data, first = np.ascontiguousarray(rows), start * row
        blocks.append((first, first + data.nbytes, zlib.crc32(data)))
        put(data, len(header) + first)

    try:
        put(header, 0)
        notes = make(_in_order(put_rows))
        footer = json.dumps({"notes": list(notes), "blocks": blocks}).encode()
        put(zlib.crc32(footer).to_bytes(4, "big") + footer, len(header) + size)
        with _faults_named(folder, size):
            file.flush()
            os.fsync(file.fileno())
    finally:
        with suppress(OSError):  # a fault has been raised already, and is to be seen
            file.close()


def _putter(file: BinaryIO, folder: Path, size: int) -> Callable[[np.ndarray | bytes, int], None]:
    """Returns `put(data, place)`, which any thread may call."""
    one_at_a_time = Lock()

    def put(data: np.ndarray | bytes, place: int) -> None:
        with one_at_a_time, _faults_named(folder, size):
            file.seek(place)
            file.write(data)

    return put


@contextmanager
def _faults_named(folder: Path, size: int) -> Iterator[None]:
    """Turns the system's error on writing into a sentence for the user, which names the cache."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot keep {size / 1e6:.1f} MB of decoded images in {folder.parent} "
            f"({error.strerror or error}): make room there, or give another data.cache (empty for "
            "none)"
        ) from error


def _check_space(folder: Path, size: int) -> None:
    """Raises OSError before hours of decoding, where the disk is too full from the start."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < size:
        raise OSError(f"its disk is full, with {usage.free / 1e6:.1f} MB left")


def _lock_of(partial: Path) -> FileLock:
    return FileLock(partial.with_suffix(".lock"))


def _locked(partial: Path) -> FileLock:
    """The lock of an array, held; waits for another process that writes it."""
    lock = _lock_of(partial)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for another process that writes {partial}", file=sys.stderr)
        lock.acquire()
    return lock


def _remove_left_over(folder: Path) -> None:
    """Removes partial files that no living process writes to from the folder that has only ours."""
    for partial in folder.glob("*.partial"):
        # one that another process holds raises Timeout, which is an OSError
        with suppress(OSError), _lock_of(partial).acquire(blocking=False):
            partial.unlink(missing_ok=True)
