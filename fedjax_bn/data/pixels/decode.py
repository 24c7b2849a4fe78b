"""Decodes image files in parallel to squares of one size, and caches their pixels.

Images are stretched, letterboxed or cut into tiles. Letterboxed, an image of w x h pixels is scaled
by min(S/w, S/h) and put into the middle of a grey square of S pixels a side, as for YOLO's
detectors. Training and testing use the same stored images, so small ones are enlarged for both.
"""

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.domain import Rows, blocks
from fedjax_bn.data.messages import first_few, in_threads
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.pixels.raster import MEGAPIXELS, UPRIGHT, open_image, orientation_notes

GREY = 114  # the bytes around a letterboxed image
_FORM = 2  # raise it when the same files would give other pixels
_MEMORY = 2**19  # files whose digests are kept while the process runs, some 100 MB


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
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns images as RGB bytes, turned upright and stretched to squares, bilinear as in Pillow.

    This equals `Resize((size, size))` in DomainBed's and FedBN's code: the filter averages when it
    shrinks, and an image of that size is unchanged. Threads decode, because Pillow releases
    Python's lock.

    Args:
      files: N files in or below `root`, at least one.
      size: pixels a side, at least 1.
      root: files are named relative to it, so a dataset may move without being decoded again.
      cache: folder that keeps the pixels; they are decoded again when a file's name or content, or
        `size`, differs. None to keep them in memory only.
      progress: show a bar on stderr.
      max_megapixels: millions of pixels that an image may have; a larger one is not read.
      letterbox: whether images keep their shape, in the middle of a grey square.
      orientation: "upright", turned by EXIF as every viewer does, or "stored", with the rows of the
        file, as torchvision's readers return them.

    Returns:
      u8[N, size, size, 3] (memory-mapped and read-only, if it comes from a cache), and a note on
      how many images have an EXIF orientation.

    Raises:
      ValueError: some files cannot be read; the first ten are named.
      OSError: the cache cannot be written, see `cache.cached_array`.
    """

    def make(write: Write) -> tuple[str, ...]:
        def convert(k: int) -> tuple[int, str]:
            """Hands an image to `write`; returns its EXIF orientation, and its fault."""
            try:
                # Reads the whole file: many small reads would pass Python's lock back and forth.
                content = files[k].read_bytes()
                image, tag = decode_image(content, size, max_megapixels, letterbox, orientation)
            except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                return 1, f"{files[k]} ({' '.join(reason.split())})"
            # Threads finish in any order, so each gives its place.
            write(image[None], k)
            return tag, ""

        converted = list(in_threads(convert, range(len(files)), "decoding", progress))
        if faults := [fault for _, fault in converted if fault]:
            raise ValueError(
                f"{len(faults)} of {len(files)} images cannot be read: {first_few(faults)}; fetch "
                "or unpack them again, or delete them"
            )
        return orientation_notes((tag for tag, _ in converted), orientation)

    name = ""
    if cache is not None:
        form = "-letterbox" * letterbox + f"-{orientation}" * (orientation != UPRIGHT)
        name = f"{root.resolve().name or 'images'}-{size}{form}-{hash_of_files(files, root, size)}"
    return cached_array(cache, name, (len(files), size, size, 3), make)


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
    letterbox: bool = False,
    orientation: str = UPRIGHT,
) -> tuple[np.ndarray, int]:
    """Returns one image as u8[size, size, 3], and its EXIF orientation.

    A GIF or TIFF gives its first frame. Arguments are those of `decode`; it raises as
    `raster.open_image`.
    """
    from PIL import Image

    image, tag = open_image(content, max_megapixels, orientation)
    if letterbox:
        image = _letterboxed(image, size)
    elif image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image), tag


def _fitted(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Returns the place of an image in its square: left, top, width and height."""
    scale = min(size / width, size / height)
    wide, high = (max(1, min(size, round(side * scale))) for side in (width, height))
    return (size - wide) // 2, (size - high) // 2, wide, high


def _letterboxed(image: Any, size: int) -> Any:
    """Returns an RGB image of Pillow in a grey square of `size` pixels a side, bilinear."""
    from PIL import Image

    left, top, wide, high = _fitted(*image.size, size)
    square = Image.new("RGB", (size, size), (GREY,) * 3)
    square.paste(image.resize((wide, high), Image.Resampling.BILINEAR), (left, top))
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


def number_of_tiles(height: int, width: int, size: int) -> int:
    """Returns how many tiles `cut` makes of an image."""
    return -(-height // size) * -(-width // size)


def cut(image: np.ndarray, size: int, fill: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns an image's square tiles, row by row, and their places.

    The tiles follow each other without a gap; the last of a row or column is shifted so that it
    ends with the image, and shows some pixels again. An image smaller than a tile is padded at its
    right and lower edge.

    Args:
      image: [H, W, ...], such as an image, a mask or logits.
      size: pixels a side of a tile, at least 1.
      fill: the value of padding and of pixels that an earlier tile shows, such as
        `engine.inputs.UNLABELLED` for a mask; None to repeat the edge and to show pixels again.

    Returns:
      [n, size, size, ...] and i64[n, 2], the row and column of each tile's first pixel.
    """
    height, width = image.shape[:2]
    no_padding = ((0, 0),) * (image.ndim - 2)
    around = ((0, max(size - height, 0)), (0, max(size - width, 0)), *no_padding)
    padding = {"mode": "edge"} if fill is None else {"constant_values": fill}
    image = np.pad(image, around, **padding)
    rows, columns = (  # the last one is shifted inside
        [min(start, max(side - size, 0)) for start in range(0, side, size)]
        for side in (height, width)
    )
    places = [(row, column) for row in rows for column in columns]
    tiles = np.stack([image[y : y + size, x : x + size] for y, x in places])
    if fill is not None:
        # Tiles overlap at the last row and column; each pixel counts in its first tile alone.
        shown = np.zeros(image.shape[:2], bool)
        for tile, (y, x) in zip(tiles, places, strict=True):
            again = shown[y : y + size, x : x + size]
            tile[again] = fill
            again[:] = True
    return tiles, np.array(places, np.int64)


def put_together(tiles: np.ndarray, places: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the image [H, W, ...] of a shape (H, W) whose tiles `cut` made.

    `tiles` [n, size, size, ...] are what became of them, such as predictions, at `places`
    i64[n, 2]; a pixel is its first tile's.
    """
    height, width = shape
    image = np.empty((height, width, *tiles.shape[3:]), tiles.dtype)
    # Backwards, so that the first tile of a pixel is written last.
    for tile, (y, x) in zip(tiles[::-1], places[::-1].tolist(), strict=True):
        region = image[y : y + tile.shape[0], x : x + tile.shape[1]]  # ends where the image does
        region[:] = tile[: region.shape[0], : region.shape[1]]
    return image
