"""Image files to pixels: in parallel, with progress, and kept for the next time."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_bn.data.messages import first_few, progress_bar
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.letterbox import letterboxed
from fedjax_bn.data.pixels.raster import MEGAPIXELS, check_file_size, open_raster, to_rgb

_BLOCK = 64  # images that a thread decodes at a time
_FORM = 1  # to be raised when the same files would give other pixels
_MODES = {  # Pillow's words in ours
    "1": "black and white",
    "L": "grey",
    "LA": "grey with transparency",
    "I": "16-bit grey",
    "I;16": "16-bit grey",
    "I;16B": "16-bit grey",
    "P": "a palette",
    "RGBA": "RGB with transparency",
}

_Read = Callable[[Path], tuple[np.ndarray, str]]  # an image, and its mode


class _Report(NamedTuple):
    """What a thread says of the files that it decoded.

    count: how many they were.
    modes: of Pillow -> images that had to be converted from it.
    faults: files that cannot be read, each with the reason.
    """

    count: int
    modes: Counter
    faults: list[str]


def decode(
    files: Sequence[Path],
    size: int,
    *,
    root: Path,
    cache: str | Path | None = None,
    progress: bool = True,
    max_megapixels: float = MEGAPIXELS,
    letterbox: bool = False,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Images as RGB bytes, stretched to squares by Pillow's bilinear filter.

    That is what `Resize((size, size))` of DomainBed's and FedBN's code does: the filter averages
    where it shrinks, and an image of that size stays as it is. Threads decode, since Pillow works
    outside Python's lock.

    Args:
      files: N of them, in or below `root`.
      size: pixels a side, at least 1.
      root: names of files count from here, so that a dataset may move without being decoded again.
      cache: folder that keeps the pixels; they are decoded again when a file's name, size or time
        of change, or `size`, differs. None to keep them in memory only.
      progress: show a bar on stderr.
      max_megapixels: millions of pixels that an image may have; a larger one is not read.
      letterbox: whether images keep their shape, in the middle of a grey square.

    Returns:
      u8[N, size, size, 3] (memory-mapped and read-only, if it comes from a cache), and notes: how
      many images had to be converted from grey, palettes, CMYK or transparency.

    Raises:
      ValueError: there are no files, or some cannot be read; the first ten are named.
      OSError: the cache cannot be written, see `cache.cached_array`.
    """
    if not files or size < 1:
        raise ValueError(
            f"cannot decode {len(files)} files at size {size}; give at least 1 of each"
        )
    shape = (len(files), size, size, 3)
    folder, name = None, ""
    if cache is not None:
        form = "-letterbox" * letterbox
        name = f"{root.resolve().name or 'images'}-{size}{form}-{hash_of_files(files, root, size)}"
        folder = Path(cache)
    read = partial(_read_image, size=size, max_megapixels=max_megapixels, boxed=letterbox)
    make = partial(_decode_all, files, shape[1:], read, root, progress)
    return cached_array(folder, name, shape, make)


def hash_of_files(files: Sequence[Path], root: Path, size: int, times: bool = True) -> str:
    """Hexadecimal digits that change with any file's name or length, and with `size`.

    With `times` they change with the times of change too; without, they are the same on any machine
    that has the same files.
    """
    state = hashlib.sha256(f"{_FORM} {size}\n".encode())
    for name, file in zip(relative_names(files, root), files, strict=True):
        try:
            stat = os.stat(file)
            about = f"{stat.st_size} {stat.st_mtime_ns if times else ''}"
        except OSError:
            about = "missing"  # decoding will name it, with all others
        state.update(os.fsencode(f"{name}\0{about}\n"))
    return state.hexdigest()[:20]


def relative_names(files: Sequence[Path], root: Path) -> list[str]:
    """The files' names as seen from `root`, with / on every system."""
    prefix = os.path.join(root, "")
    names = map(os.fspath, files)
    inside = (  # there may be half a million files, and relpath is slow
        name[len(prefix) :] if name.startswith(prefix) else os.path.relpath(name, root)
        for name in names
    )
    return [name.replace(os.sep, "/") for name in inside]


def _decode_all(
    files: Sequence[Path],
    form: tuple[int, ...],
    read: _Read,
    root: Path,
    progress: bool,
    write: Write,
) -> tuple[str, ...]:
    """Hands all images to `write(rows, start)` in blocks; returns the notes."""
    modes, faults = Counter(), []

    def work(start: int) -> _Report:
        block = files[start : start + _BLOCK]
        images = np.empty((len(block), *form), np.uint8)
        report = _read_block(block, read, root, images)
        write(images, start)
        return report

    starts = range(0, len(files), _BLOCK)
    with (
        progress_bar(len(files), "decoding", progress) as bar,
        ThreadPoolExecutor(_cores()) as threads,
        closing(threads.map(work, starts)) as reports,  # on an error, what is not begun never is
    ):
        for report in reports:
            modes += report.modes
            faults += report.faults
            bar.update(report.count)
    if faults:
        raise ValueError(_unreadable(faults, len(files), root))
    counts = [f"{count} from {_MODES.get(mode, mode)}" for mode, count in sorted(modes.items())]
    return (f"images converted to RGB: {', '.join(counts)}",) if counts else ()


def _unreadable(faults: list[str], total: int, root: Path) -> str:
    return (
        f"{len(faults)} of {total} images in {root} cannot be read: {first_few(faults)}; fetch or "
        "unpack them again, or delete them"
    )


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_block(files: Sequence[Path], read: _Read, root: Path, images: np.ndarray) -> _Report:
    """Fills u8[n, size, size, 3], but where a file cannot be read; returns what to report."""
    report = _Report(len(files), Counter(), [])
    for k, file in enumerate(files):
        try:
            images[k], mode = read(file)
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            reason = " ".join(reason.split())
            report.faults.append(f"{relative_names([file], root)[0]} ({reason})")
            continue
        if mode != "RGB":
            report.modes[mode] += 1
    return report


def _read_image(
    file: Path, size: int, max_megapixels: float, boxed: bool
) -> tuple[np.ndarray, str]:
    """`decode_image` of a file.

    It is read as a whole: Pillow's many small reads would hand Python's lock to and fro.
    """
    check_file_size(file.stat().st_size, max_megapixels)
    return decode_image(file.read_bytes(), size, max_megapixels, boxed)


def decode_image(
    content: bytes, size: int, max_megapixels: float = MEGAPIXELS, boxed: bool = False
) -> tuple[np.ndarray, str]:
    """One image as u8[size, size, 3], and the mode (Pillow's word) that it had in its file.

    It is stretched, or with `boxed` letterboxed.

    Raises:
      ValueError: the file is no image, or one that `raster` does not take.
      OSError, and whatever else Pillow raises on a damaged file.
    """
    from PIL import Image

    image = open_raster(content, max_megapixels)
    mode, image = image.mode, to_rgb(image)
    if boxed:
        image = letterboxed(image, size)
    elif image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image), mode
