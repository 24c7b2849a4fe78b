"""Arrays kept on disk, made once: memory-mapped, never seen half-written.

An array is written to NAME.partial, which its process holds locked, and renamed when it is whole.
A second process waits for the first and reads what it made. A killed process leaves its partial
file unlocked: whoever comes next removes it. In network folders without file locks every process
writes a file of its own, and the last one stays.
"""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_Write = Callable[..., None]


def cached_array(
    folder: Path, name: str, shape: Sequence[int], make: Callable[[_Write], Sequence[str]]
) -> tuple[np.memmap, tuple[str, ...]]:
    """The array of that name in the cache, made first if it is not there.

    Args:
      folder: the cache; it is created if need be.
      name: tells the array from all others, so a digest of what it was made from belongs in it.
      shape: of the whole array of bytes.
      make: `make(write) -> notes`, called only if the array is not there yet; hands all rows to
        `write(u8[n, ...])` in blocks, in order, or to `write(u8[n, ...], start)` in any order and
        from any thread. Whatever it raises leaves nothing behind.

    Returns:
      u8[shape], memory-mapped for reading, and the notes that `make` gave when it was made.

    Raises:
      OSError: the disk is full, the folder cannot be written to, or the system (Windows) has no
        file locks of this kind.
    """
    if fcntl is None:
        raise OSError(
            "a cache needs file locks as Linux and macOS have them: leave data.cache empty"
        )
    path = folder / f"{name}.npy"
    found = _read(path, shape)
    if found is None:
        _make(path, tuple(shape), make)
        found = _read(path, shape)
    if found is None:
        raise OSError(f"{path} vanished or changed while it was opened; run again")
    return found


def _read(path: Path, shape: Sequence[int]) -> tuple[np.memmap, tuple[str, ...]] | None:
    """The array and its notes, which stand behind it in the file; None if it is not whole."""
    try:
        with open(path, "rb") as file:
            np.lib.format.read_magic(file)
            found, _, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
            file.seek(offset + int(np.prod(found, dtype=np.int64)))
            notes = tuple(json.loads(file.read()))
    except (OSError, ValueError):
        return None
    if found != tuple(shape) or dtype != np.uint8:
        return None
    return np.memmap(path, np.uint8, "r", offset, found), notes


def _make(path: Path, shape: tuple[int, ...], make: Callable[[_Write], Sequence[str]]) -> None:
    """Writes the array unless another process has done so in the meantime."""
    folder, size = path.parent, int(np.prod(shape, dtype=np.int64))
    with _writing(folder, size):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        partial, handle = _claim(path.with_suffix(".partial"))
    try:
        if _read(path, shape) is None:
            _fill(handle, folder, shape, size, make)
            with _writing(folder, size):
                os.replace(partial, path)
    finally:
        if _is_at(partial, handle):  # else it is renamed, and a file of that name another's
            partial.unlink()
        os.close(handle)


def _fill(
    handle: int,
    folder: Path,
    shape: tuple[int, ...],
    size: int,
    make: Callable[[_Write], Sequence[str]],
) -> None:
    """Writes header, array and notes to an empty file."""
    header = io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    first, row = header.tell(), size // shape[0]
    after = 0

    def write(rows: np.ndarray, start: int | None = None) -> None:
        nonlocal after
        start = after if start is None else start
        after = start + len(rows)
        with _writing(folder, size):
            _put(handle, first + start * row, np.ascontiguousarray(rows))

    with _writing(folder, size):
        _check_space(folder, size)
        _put(handle, 0, header.getvalue())
    notes = make(write)
    with _writing(folder, size):
        _put(handle, first + size, json.dumps(list(notes)).encode())


@contextmanager
def _writing(folder: Path, size: int) -> Iterator[None]:
    """Turns the system's error on writing into a sentence for the user."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot keep {size / 1e6:.1f} MB of decoded images in {folder} "
            f"({error.strerror or error}): make room there, or give another data.cache (empty for "
            "none)"
        ) from error


def _check_space(folder: Path, size: int) -> None:
    """Raises OSError before hours of decoding, where the disk is too full from the start."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < size:
        raise OSError(f"its disk is full, with {usage.free / 1e6:.1f} MB left")


def _put(handle: int, place: int, data: np.ndarray | bytes) -> None:
    """Puts bytes at a place of the file; other threads may write elsewhere at the same time."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(handle, view, place)
        view, place = view[written:], place + written


def _claim(partial: Path) -> tuple[Path, int]:
    """An empty file that no other process writes to, and its handle; waits for one that does."""
    while True:
        handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
        locked = _lock(handle, wait=False)
        if locked is None:  # no locks here: a file of our own
            partial.unlink(missing_ok=True)
            os.close(handle)
            own = partial.with_suffix(f".{os.getpid()}.partial")
            return own, os.open(own, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        if not locked:
            print(f"waiting for another process that writes {partial}", file=sys.stderr)
            _lock(handle, wait=True)
        if _is_at(partial, handle):
            if os.fstat(handle).st_size:  # ext4 flushes on closing what was ever truncated
                os.ftruncate(handle, 0)
            return partial, handle
        os.close(handle)  # the other process has renamed or removed it


def _lock(handle: int, wait: bool) -> bool | None:
    """Whether the file is ours now; None where its folder has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _sweep(folder: Path) -> None:
    """Removes partial files that no living process writes to."""
    for partial in folder.glob("*.partial"):
        with suppress(OSError):
            handle = os.open(partial, os.O_RDWR)
            try:
                if _lock(handle, wait=False) and _is_at(partial, handle):
                    partial.unlink()
            finally:
                os.close(handle)
