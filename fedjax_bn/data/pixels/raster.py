"""Opens image files with Pillow: allowed formats and sizes, orientation, and deep greys.

Pillow opens some fifty formats, and starts another program for PostScript; here only the raster
formats of datasets are opened. Pillow also has two limits on pixels, one that warns and one that
refuses; here there is one, which the caller sets.

A camera stores the rows of its sensor and writes into EXIF how it was held. Every viewer turns the
picture accordingly; `Image.open` and torchvision's readers, which use it, do not. The tag is one of
eight: 1 as stored, 2 to 4 mirrored or upside down, 5 to 8 with width and height exchanged.
"""

import io
from collections.abc import Iterable
from typing import Any

import numpy as np

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
MEGAPIXELS = 100.0
UPRIGHT, STORED = "upright", "stored"
ORIENTATIONS = (UPRIGHT, STORED)
ORIENTATION = 274  # EXIF's number of the tag
# Pillow's names of the operations that turn images with tags 2 to 8 upright.
_TURNS = dict(
    enumerate(
        ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM")
        + ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"),
        start=2,
    )
)
_BITS, _WHITE_IS_ZERO = 258, 262  # tags of TIFF: bits of a number, and which number is white


def open_raster(content: bytes, max_megapixels: float = MEGAPIXELS) -> Any:
    """Opens an image file with Pillow, usually without decoding its pixels.

    Raises:
      ValueError: the format is not in `FORMATS`, or the image exceeds `max_megapixels`.
      OSError, and whatever else Pillow raises on a damaged file.
    """
    from PIL import Image

    Image.init()
    # `Image.open` has its own limits on pixels, which cannot be lifted for one thread alone.
    for name in FORMATS:
        make, accepts = Image.OPEN.get(name, (None, lambda begin: False))  # Pillow may lack WEBP
        # Some of Pillow's return a text if a decoder is missing, so a true value is not enough.
        if accepts(content[:16].ljust(16, b"\0")) is True:
            break
    else:
        raise ValueError(f"not an image of a known kind, {', '.join(FORMATS)}")
    image = make(io.BytesIO(content), "")
    width, height = image.size
    if width * height > max_megapixels * 1e6:
        raise ValueError(
            f"{width} x {height} pixels are more than the {max_megapixels:g} megapixels of "
            "max_megapixels"
        )
    if image.format == "PNG" and b"eXIf" in content:  # EXIF may follow the pixels
        image.load()
    return image


def open_image(
    content: bytes, max_megapixels: float = MEGAPIXELS, orientation: str = UPRIGHT
) -> tuple[Any, int]:
    """Returns a Pillow image in RGB, and its EXIF orientation, 1 to 8.

    The orientation "upright" turns the image by its tag, "stored" does not. Pillow itself turns
    TIFF, which is upright in both cases; with "stored", its tag is returned as 1. Grey becomes
    three equal channels; transparency is dropped, as by `convert("RGB")` in DomainBed's code;
    numbers of 9 to 16 bits keep their upper eight bits, inverted if 0 is white.

    Raises:
      ValueError: as in `open_raster`; or pixels are floats, or integers of 32 bits or with a sign,
        so white is unknown.
      OSError, and whatever else Pillow raises on a damaged file.
    """
    image = open_raster(content, max_megapixels)
    turn, tag = turn_of(image, orientation)
    image = _to_rgb(image)
    return image if turn is None else image.transpose(turn), tag


def size_as_used(content: bytes, max_megapixels: float, orientation: str) -> tuple[int, int]:
    """Returns width and height of the image that `open_image` makes, without decoding it."""
    image = open_raster(content, max_megapixels)
    turn, tag = turn_of(image, orientation)
    # Tags above 4 exchange width and height.
    return image.size[::-1] if turn is not None and tag > 4 else image.size


def turn_of(image: Any, orientation: str) -> tuple[Any, int]:
    """Returns how to transpose a Pillow image, or None, and its EXIF orientation as `open_image`.

    Call it before decoding the pixels.
    """
    from PIL import Image

    tag = orientation_of(image)
    if turned_by_pillow(image):
        return None, tag if orientation == UPRIGHT else 1
    turned = tag > 1 and orientation == UPRIGHT
    return Image.Transpose[_TURNS[tag]] if turned else None, tag


def orientation_of(image: Any) -> int:
    """Returns the EXIF orientation of a Pillow image, 1 to 8; call it before decoding the pixels.

    It is 1 if there is no tag or EXIF is damaged, because viewers show such images as stored.
    """
    from PIL import Image

    try:
        # not PNG's own `getexif`, which decodes all pixels first
        tag = Image.Image.getexif(image).get(ORIENTATION, 1)
    except Exception:  # Pillow raises SyntaxError, struct.error, ... on damaged EXIF
        return 1
    return tag if isinstance(tag, int) and tag in _TURNS else 1


def turned_by_pillow(image: Any) -> bool:
    """Returns whether Pillow itself turns the image while it decodes, as it does for TIFF."""
    return image.format == "TIFF"


def orientation_notes(tags: Iterable[int], orientation: str) -> tuple[str, ...]:
    """Returns a note on how many images have a tag other than 1; no note if no image has one."""
    count = sum(tag != 1 for tag in tags)
    turned = "left as stored, against" if orientation == STORED else "turned upright by"
    return (f"images {turned} their EXIF orientation: {count}",) if count else ()


def _to_rgb(image: Any) -> Any:
    """Returns a Pillow image in mode RGB, see `open_image`."""
    from PIL import Image

    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        # Older versions of Pillow give the 16 bits of PNG as 32.
        tags = image.tag_v2 if image.format == "TIFF" else {}
        grey = (np.asarray(image) >> (tags.get(_BITS, (16,))[0] - 8)).astype(np.uint8)
        image = Image.fromarray(255 - grey if tags.get(_WHITE_IS_ZERO, 1) == 0 else grey)
    elif mode in ("I", "F"):
        raise ValueError(
            f"its pixels, {mode} of Pillow, have no known value for white; save it with 8 or 16 "
            "bits"
        )
    elif mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # directly to RGB, Pillow would warn
    return image if image.mode == "RGB" else image.convert("RGB")
