"""Decodes image files in parallel to squares of one size, and caches their pixels.

Images are stretched, letterboxed or cut into tiles. Letterboxed, an image of w x h pixels is scaled
by min(S/w, S/h) and put into the middle of a grey square of S pixels a side, as for YOLO's
detectors. Small images are enlarged, for training and testing.

Only the raster formats of datasets are opened, because Pillow starts another program for some.

A camera writes into EXIF how it was held, and every viewer turns the picture accordingly;
torchvision's readers do not. The tag is one of eight: 1 as stored, 2 to 4 mirrored or upside down,
5 to 8 with width and height exchanged. The orientation "upright" turns images by their tags,
"stored" keeps the rows of the file.
"""

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.arguments.text import first_few
from fedjax_bn.data.domain import Rows, blocks
from fedjax_bn.data.pixels.cache import Write, cached_array
from fedjax_bn.data.threads import in_threads

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
UPRIGHT, STORED = "upright", "stored"
GREY = 114  # the bytes around a letterboxed image
_FORM = 2  # raise it when the same files would give other pixels
_MEMORY = 2**19  # files whose digests are kept while the process runs, some 100 MB
_ORIENTATION = 274  # EXIF's number of the tag
# Pillow's names of the operations that turn images with tags 1 to 8 upright.
_TURNS = ("", "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM")
_TURNS += ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
_BITS, _WHITE_IS_ZERO = 258, 262  # tags of TIFF: bits of a number, and which number is white


def decode(
    files: Sequence[Path],
    size: int,
    *,
    root: Path,
    cache: str | Path | None = None,
    progress: bool = True,
    letterbox: bool = False,
    orientation: str = UPRIGHT,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns images as u8[N, size, size, 3] in RGB, and a note on those with an EXIF orientation.

    They are stretched to squares, bilinear as in Pillow, which equals `Resize((size, size))` in
    DomainBed's and FedBN's code: the filter averages when it shrinks. With `letterbox` they keep
    their shape; for the orientation see above. Names of the files, at least one, are relative to
    `root`, so a dataset may move without being decoded again; of `cache` see `cached_array`. With
    `progress` there is a bar on stderr. A ValueError names the first ten files that cannot be read.
    """

    def make(write: Write) -> tuple[str, ...]:
        def convert(k: int) -> tuple[int, str]:
            """Hands an image to `write`; returns its EXIF orientation, and its fault."""
            try:
                # Reads the whole file: many small reads would pass Python's lock back and forth.
                image, tag = decode_image(files[k].read_bytes(), size, letterbox, orientation)
            except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                return 1, f"{files[k]} ({' '.join(reason.split())})"
            # Threads finish in any order, so each gives its place.
            write(image[None], k)
            return tag, ""

        converted = list(in_threads(convert, range(len(files)), "decoding", progress))
        if faults := [fault for _, fault in converted if fault]:
            count = f"{len(faults)} of {len(files)} images cannot be read"
            raise ValueError(f"{count}: {first_few(faults)}; fetch them again or delete them")
        return orientation_notes((tag for tag, _ in converted), orientation)

    form = "-letterbox" * letterbox + f"-{orientation}" * (orientation != UPRIGHT)
    digest = "" if cache is None else hash_of_files(files, root, size)  # reads all files
    name = f"{root.resolve().name or 'images'}-{size}{form}-{digest}"
    return cached_array(cache, name, (len(files), size, size, 3), make)


def hash_of_files(files: Sequence[Path], root: Path, size: int) -> str:
    """Returns hexadecimal digits, on any machine, of `size` and the files' names and bytes."""
    state = hashlib.sha256(f"{_FORM} {size}\n".encode())
    digests = in_threads(_digest_of, files, "", progress=False)  # hashing releases Python's lock
    for name, digest in zip(relative_names(files, root), digests, strict=True):
        state.update(os.fsencode(f"{name}\0{digest}\n"))
    return state.hexdigest()[:20]


def _digest_of(file: Path) -> str:
    try:
        stat = os.stat(file)
        # The system's own time of the last change, `ctime`, moves with every change, unlike
        # `mtime`, which programs set.
        return _digest_once(os.fspath(file), stat.st_ino, stat.st_size, stat.st_ctime_ns)
    except OSError:
        return "unread"  # `decode` names such files together


@lru_cache(_MEMORY)
def _digest_once(path: str, inode: int, size: int, changed: int) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def relative_names(files: Sequence[Path], root: Path) -> list[str]:
    """Returns the files' names relative to `root`, with / on every system."""
    return [file.relative_to(root).as_posix() for file in files]


def open_raster(content: bytes) -> Any:
    """Opens an image file with Pillow, usually without its pixels; ValueError for other formats."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:  # which would name an object in memory
        raise ValueError(f"not an image of a known kind, {', '.join(FORMATS)}") from error
    if image.format == "PNG" and b"eXIf" in content:  # EXIF may follow the pixels
        image.load()
    return image


def open_image(content: bytes, orientation: str = UPRIGHT) -> tuple[Any, int]:
    """Returns a Pillow image in RGB, and its EXIF orientation, 1 to 8; raises as `open_raster`.

    Transparency is dropped, as in DomainBed's code; numbers of 9 to 16 bits keep their upper eight
    bits, inverted if 0 is white. A ValueError names numbers whose white is unknown.
    """
    image = open_raster(content)
    turn, tag = turn_of(image, orientation)
    image = _to_rgb(image)
    return image if turn is None else image.transpose(turn), tag


def turn_of(image: Any, orientation: str) -> tuple[Any, int]:
    """Returns how to transpose a Pillow image that is not decoded yet, or None, and its tag."""
    from PIL import Image

    tag = orientation_of(image)
    if image.format == "TIFF":  # which Pillow itself turns
        return None, tag if orientation == UPRIGHT else 1
    turned = tag > 1 and orientation == UPRIGHT
    return Image.Transpose[_TURNS[tag - 1]] if turned else None, tag


def orientation_of(image: Any) -> int:
    """Returns the EXIF orientation, 1 to 8, of a Pillow image that is not decoded yet."""
    from PIL import Image

    try:
        # not PNG's own `getexif`, which decodes all pixels first
        tag = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception:  # Pillow raises SyntaxError, struct.error, ... on damaged EXIF
        return 1  # because viewers show such images as stored
    return tag if isinstance(tag, int) and 1 <= tag <= 8 else 1


def orientation_notes(tags: Iterable[int], orientation: str) -> tuple[str, ...]:
    """Returns a note on how many images have a tag other than 1; no note if no image has one."""
    count = sum(tag != 1 for tag in tags)
    turned = "left as stored, against" if orientation == STORED else "turned upright by"
    return (f"images {turned} their EXIF orientation: {count}",) if count else ()


def _to_rgb(image: Any) -> Any:
    from PIL import Image

    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        # Older versions of Pillow give the 16 bits of PNG as 32.
        tags = image.tag_v2 if image.format == "TIFF" else {}
        grey = (np.asarray(image) >> (tags.get(_BITS, (16,))[0] - 8)).astype(np.uint8)
        image = Image.fromarray(255 - grey if tags.get(_WHITE_IS_ZERO, 1) == 0 else grey)
    elif mode in ("I", "F"):
        raise ValueError(f"its pixels, {mode} of Pillow, have no known white: save it with 8 bits")
    elif mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # directly to RGB, Pillow would warn
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_image(
    content: bytes, size: int, letterbox: bool = False, orientation: str = UPRIGHT
) -> tuple[np.ndarray, int]:
    """Returns an image, or its first frame, as u8[size, size, 3], and its EXIF orientation."""
    from PIL import Image

    image, tag = open_image(content, orientation)
    left, top, *sides = _fitted(*image.size, size) if letterbox else (0, 0, size, size)
    if image.size != tuple(sides):
        image = image.resize(sides, Image.Resampling.BILINEAR)
    if letterbox:
        square = Image.new("RGB", (size, size), (GREY,) * 3)
        square.paste(image, (left, top))
        image = square
    return np.asarray(image), tag


def _fitted(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Returns the place of an image in its square: left, top, width and height."""
    scale = min(size / width, size / height)
    wide, high = (max(1, min(size, round(side * scale))) for side in (width, height))
    return (size - wide) // 2, (size - high) // 2, wide, high


def to_square(corners: np.ndarray, width: int, height: int, size: int) -> np.ndarray:
    """Returns boxes f64[n, 4] in shares of an image as shares of its letterboxed square."""
    # Uses the rounded sides that the pixels have, so that a box stays on its object.
    left, top, wide, high = _fitted(width, height, size)
    return (corners * (wide, high, wide, high) + (left, top, left, top)) / size


def resized(
    images: np.ndarray | Rows, shape: Sequence[int], nearest: bool = False
) -> np.ndarray | Rows:
    """Returns u8[N, h, w, C] of a shape (h, w, C) by Pillow's bilinear or nearest filter.

    Images of that shape are returned as they are. A ValueError names other dtypes or channels.
    """
    from PIL import Image

    if tuple(images.shape[1:]) == tuple(shape):
        return images
    fits = len(shape) == 3 and images.ndim == 4 and images.shape[3] == shape[2]
    if not fits or images.dtype != np.uint8 or shape[2] not in (1, 3):
        raise ValueError(
            f"samples {images.dtype}{list(images.shape[1:])} cannot be resized to {list(shape)}: "
            "only u8[H, W, C] with as many channels, 1 or 3, can"
        )
    height, width, _ = shape
    resampling = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR

    def stretch(image: np.ndarray) -> np.ndarray:
        small = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
        return np.asarray(small.resize((width, height), resampling))

    stretched = [stretch(image) for block in blocks(images) for image in block]
    return np.stack(stretched).reshape(-1, *shape)


def tile_places(height: int, width: int, size: int) -> list[tuple[int, int]]:
    """Returns the row and column of the first pixel of each square tile of an image, row by row.

    The last of a row or column is shifted so that it ends with the image, and shows some pixels
    again.
    """
    rows, columns = (
        [min(start, max(side - size, 0)) for start in range(0, side, size)]
        for side in (height, width)
    )
    return [(row, column) for row in rows for column in columns]


def cut(image: np.ndarray, size: int, fill: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tiles [n, size, size, ...] of [H, W, ...], and their `tile_places` i64[n, 2].

    An image smaller than a tile is padded at its right and lower edge. `fill` is the value of
    padding and of pixels that an earlier tile shows, such as `UNLABELLED` for a mask; None repeats
    the edge and shows pixels again.
    """
    height, width = image.shape[:2]
    places = tile_places(height, width, size)
    around = [(0, max(size - side, 0)) for side in (height, width)] + [(0, 0)] * (image.ndim - 2)
    padding = {"mode": "edge"} if fill is None else {"constant_values": fill}
    image = np.pad(image, around, **padding)
    tiles = np.stack([image[y : y + size, x : x + size] for y, x in places])
    if fill is not None:
        # Tiles overlap at the last row and column; each pixel counts in its first tile alone.
        shown = np.zeros(image.shape[:2], bool)
        for tile, (y, x) in zip(tiles, places, strict=True):
            again = shown[y : y + size, x : x + size]
            tile[again] = fill
            again[:] = True
    return tiles, np.array(places)


def put_together(tiles: np.ndarray, places: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the image [*shape, ...] of a shape (H, W) from tiles; a pixel is its first tile's."""
    image, size = np.empty((*shape, *tiles.shape[3:]), tiles.dtype), tiles.shape[1]
    # Backwards, so that the first tile of a pixel is written last.
    for tile, (y, x) in zip(tiles[::-1], places[::-1], strict=True):
        region = image[y : y + size, x : x + size]  # ends where the image does
        region[:] = tile[: region.shape[0], : region.shape[1]]
    return image
