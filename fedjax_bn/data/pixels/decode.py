"""Decodes image files in parallel to one size, and caches their pixels.

Images are stretched, or letterboxed: an image of w x h pixels is scaled by min(S/w, S/h) and put
into the middle of a grey square of S pixels a side, as for YOLO's detectors. Training and testing
use the same stored images, so small ones are enlarged for both.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.domain import Rows, blocks
from fedjax_bn.data.messages import first_few, in_threads
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.raster import (
    MEGAPIXELS,
    UPRIGHT,
    open_image,
    orientation_notes,
)
from fedjax_bn.data.pixels.tiles import cut

GREY = 114  # the bytes around a letterboxed image
_FORM = 2  # raise it when the same files would give other pixels
_MEMORY = 2**19  # files whose digests are kept while the process runs, some 100 MB
_MODES = {  # Pillow's modes in plain words
    "1": "black and white",
    "L": "grey",
    "LA": "grey with transparency",
    **dict.fromkeys(("I", "I;16", "I;16B"), "16-bit grey"),
    "P": "a palette",
    "RGBA": "RGB with transparency",
}


def decode(
    files: Sequence[Path],
    size: int,
    *,
    root: Path,
    cache: str | Path | None = None,
    progress: bool = True,
    max_megapixels: float = MEGAPIXELS,
    letterbox: bool = False,
    orientation: str = UPRIGHT,
    tiles: np.ndarray | None = None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns images as RGB bytes, turned upright and stretched to squares, bilinear as in Pillow.

    This equals `Resize((size, size))` in DomainBed's and FedBN's code: the filter averages when it
    shrinks, and an image of that size is unchanged. Threads decode, because Pillow releases
    Python's lock.

    Args:
      files: N files in or below `root`.
      size: pixels a side, at least 1.
      root: files are named relative to it, so a dataset may move without being decoded again.
      cache: folder that keeps the pixels; they are decoded again when a file's name or content, or
        `size`, differs. None to keep them in memory only.
      progress: show a bar on stderr.
      max_megapixels: millions of pixels that an image may have; a larger one is not read.
      letterbox: whether images keep their shape, in the middle of a grey square.
      orientation: "upright", turned by EXIF as every viewer does, or "stored", with the rows of the
        file, as torchvision's readers return them.
      tiles: i64[N], the number of each image's tiles, which then follow each other instead of the
        stretched image, see `tiles.cut`; None to stretch.

    Returns:
      u8[N, size, size, 3], or that of all tiles (memory-mapped and read-only, if it comes from a
      cache), and notes: how many images were converted from grey, palettes, CMYK or transparency,
      and how many have an EXIF orientation.

    Raises:
      ValueError: there are no files, or some cannot be read; the first ten are named.
      OSError: the cache cannot be written, see `cache.cached_array`.
    """
    if not files or size < 1:
        raise ValueError(
            f"cannot decode {len(files)} files at size {size}; give at least 1 of each"
        )
    counts = np.ones(len(files), int) if tiles is None else tiles
    ends = np.cumsum(counts)

    def make(write: Write) -> tuple[str, ...]:
        def convert(k: int) -> tuple[str, int, str]:
            """Hands an image to `write`; returns its mode, its EXIF orientation, and its fault."""
            try:
                # Reads the whole file: many small reads would pass Python's lock back and forth.
                content = files[k].read_bytes()
                if tiles is None:
                    options = max_megapixels, letterbox, orientation
                    image, mode, tag = decode_image(content, size, *options)
                    squares = image[None]
                else:
                    image, mode, tag = open_image(content, max_megapixels, orientation)
                    squares = cut(np.asarray(image), size)[0]
            except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                return "", 1, f"{files[k]} ({' '.join(reason.split())})"
            # Threads finish in any order, so each gives its place.
            write(squares, int(ends[k] - counts[k]))
            return mode, tag, ""

        converted = list(in_threads(convert, range(len(files)), "decoding", progress))
        if faults := [fault for *_, fault in converted if fault]:
            raise ValueError(
                f"{len(faults)} of {len(files)} images cannot be read: {first_few(faults)}; fetch "
                "or unpack them again, or delete them"
            )
        modes = Counter(mode for mode, *_ in converted if mode != "RGB")
        about = [f"{count} from {_MODES.get(mode, mode)}" for mode, count in sorted(modes.items())]
        notes = (f"images converted to RGB: {', '.join(about)}",) if about else ()
        tagged = sum(tag != 1 for _, tag, _ in converted)
        return (*notes, *orientation_notes(tagged, orientation))

    name = ""
    if cache is not None:
        form = "-letterbox" * letterbox + "-tiles" * (tiles is not None)
        form += f"-{orientation}" * (orientation != UPRIGHT)
        name = f"{root.resolve().name or 'images'}-{size}{form}-{hash_of_files(files, root, size)}"
    return cached_array(cache, name, (int(ends[-1]), size, size, 3), make)


def hash_of_files(files: Sequence[Path], root: Path, size: int) -> str:
    """Returns hexadecimal digits that change with any file's name or bytes, and with `size`.

    They are the same on any machine that has the same files. Every file is read, once in a process
    while it does not change, some 2 GB per second and core if the disk is as fast.
    """
    state = hashlib.sha256(f"{_FORM} {size}\n".encode())
    digests = in_threads(_digest_of, files, "", progress=False)  # hashing releases Python's lock
    for name, digest in zip(relative_names(files, root), digests, strict=True):
        state.update(os.fsencode(f"{name}\0{digest}\n"))
    return state.hexdigest()[:20]


def _digest_of(file: Path) -> str:
    """Returns the SHA-256 of a file's bytes; "unread" for one that a reader will name."""
    try:
        stat = os.stat(file)
        # The system's own time of the last change, `ctime`, moves with every change, unlike
        # `mtime`, which programs set.
        return _digest_once(os.fspath(file), stat.st_ino, stat.st_size, stat.st_ctime_ns)
    except OSError:
        return "unread"


@lru_cache(_MEMORY)
def _digest_once(path: str, inode: int, size: int, changed: int) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def relative_names(files: Sequence[Path], root: Path) -> list[str]:
    """Returns the files' names relative to `root`, with / on every system."""
    prefix = os.path.join(root, "")
    names = map(os.fspath, files)
    inside = (  # there may be half a million files, and relpath is slow
        name[len(prefix) :] if name.startswith(prefix) else os.path.relpath(name, root)
        for name in names
    )
    return [name.replace(os.sep, "/") for name in inside]


def decode_image(
    content: bytes,
    size: int,
    max_megapixels: float = MEGAPIXELS,
    boxed: bool = False,
    orientation: str = UPRIGHT,
) -> tuple[np.ndarray, str, int]:
    """Returns one image as u8[size, size, 3], its mode in Pillow and its EXIF orientation.

    The image is turned upright unless `orientation` is "stored", and stretched, or letterboxed if
    `boxed`. A GIF or TIFF gives its first frame. TIFF is always upright, because Pillow itself
    turns it.

    Raises:
      ValueError: the file is not an image, or `raster` does not accept it.
      OSError, and whatever else Pillow raises on a damaged file.
    """
    from PIL import Image

    image, mode, tag = open_image(content, max_megapixels, orientation)
    if boxed:
        image = _letterboxed(image, size)
    elif image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image), mode, tag


def _fitted(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Returns the place of an image in its square: left, top, width and height."""
    scale = min(size / width, size / height)
    wide, high = (max(1, min(size, round(side * scale))) for side in (width, height))
    return (size - wide) // 2, (size - high) // 2, wide, high


def _letterboxed(image: Any, size: int) -> Any:
    """Returns an RGB image of Pillow in a grey square of `size` pixels a side, bilinear."""
    from PIL import Image

    left, top, wide, high = _fitted(*image.size, size)
    if image.size != (wide, high):
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
    if (wide, high) == (size, size):
        return image
    square = Image.new("RGB", (size, size), (GREY,) * 3)
    square.paste(image, (left, top))
    return square


def to_square(corners: np.ndarray, width: int, height: int, size: int) -> np.ndarray:
    """Returns boxes f64[n, 4] in shares of an image as shares of its letterboxed square."""
    # Uses the rounded sides that the pixels have, so that a box stays on its object.
    left, top, wide, high = _fitted(width, height, size)
    return (corners * (wide, high, wide, high) + (left, top, left, top)) / size


def resized(images: np.ndarray | Rows, shape: Sequence[int]) -> np.ndarray | Rows:
    """Returns bytes u8[N, h, w, C] as u8[N, H, W, C] by Pillow's bilinear filter, as `decode`.

    Args:
      images: bytes; returned unchanged if they have the shape.
      shape: (H, W, C).

    Raises:
      ValueError: `images` are not bytes [N, h, w, C], or have another number of channels.
    """
    from PIL import Image

    if tuple(images.shape[1:]) == tuple(shape):
        return images
    fits = len(shape) == 3 and images.ndim == 4 and images.shape[3] == shape[2]
    if not fits or images.dtype != np.uint8 or shape[2] not in (1, 3):
        raise ValueError(
            f"samples {images.dtype} {list(images.shape[1:])} cannot be stretched to "
            f"{list(shape)}: only bytes [H, W, C] with as many channels, 1 or 3, can"
        )
    height, width, _ = shape

    def stretch(image: np.ndarray) -> np.ndarray:
        small = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
        return np.asarray(small.resize((width, height), Image.Resampling.BILINEAR))

    stretched = [stretch(image) for block in blocks(images) for image in block]
    return np.stack(stretched).reshape(-1, *shape)


def resized_masks(masks: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns masks u8[N, h, w] as u8[N, H, W] of a shape (H, W, ...), to the nearest pixel."""
    from PIL import Image

    size, nearest = (shape[1], shape[0]), Image.Resampling.NEAREST
    return np.stack([np.asarray(Image.fromarray(mask).resize(size, nearest)) for mask in masks])
