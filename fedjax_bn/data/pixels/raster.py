"""Image files as RGB bytes: which formats are opened, how large they may be, what numbers mean.

Pillow opens some fifty formats, of which PostScript starts another program; here only raster
formats that datasets have are. It also has two limits of its own on pixels, one that warns and one
that refuses; here there is one, which the caller states.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_bn.data.pixels.orientation import (
    UPRIGHT,
    orientation_of,
    turn,
    turned_by_pillow,
)
from fedjax_bn.data.regular_files import read_regular

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
MEGAPIXELS = 100.0
_BYTES_OF_A_PIXEL = 16  # more than any of these formats takes
_BITS, _WHITE_IS_ZERO = 258, 262  # tags of TIFF: bits of a number, and which number is white


def open_raster(content: bytes, max_megapixels: float = MEGAPIXELS) -> Any:
    """An image file as Pillow has it, before its pixels are decoded.

    Raises:
      ValueError: it is none of `FORMATS`, or larger than `max_megapixels` million pixels.
      OSError, and whatever else Pillow raises on a damaged file.
    """
    from PIL import Image

    Image.init()
    for name in FORMATS:
        make, accepts = Image.OPEN.get(name, (None, lambda begin: False))  # WEBP may be left out
        if accepts(content[:16].ljust(16, b"\0")) is True:
            break
    else:
        raise ValueError(f"not an image of a known kind, {', '.join(FORMATS)}")
    image = make(io.BytesIO(content), "")  # `Image.open` but for its own limits on pixels
    width, height = image.size
    if width * height > max_megapixels * 1e6:
        raise ValueError(
            f"{width} x {height} pixels are more than the {max_megapixels:g} megapixels of "
            "data.max_megapixels"
        )
    if image.format == "PNG" and b"eXIf" in content:  # which may stand behind the pixels
        image.load()
    return image


def open_image(
    content: bytes, max_megapixels: float = MEGAPIXELS, orientation: str = UPRIGHT
) -> tuple[Any, str, int]:
    """Returns an RGB image of Pillow, its mode in the file, and the tag of its EXIF, 1 to 8.

    The tag is 1 where Pillow has turned an image that was to stay as stored.

    Args:
      content: of the file.
      max_megapixels: as in `open_raster`.
      orientation: "upright" turns the image by its tag, "stored" does not; Pillow itself turns
        TIFF, which is upright with both.

    Raises:
      ValueError, OSError: as `open_raster` and `to_rgb`.
    """
    image = open_raster(content, max_megapixels)
    mode, tag, is_upright = image.mode, orientation_of(image), turned_by_pillow(image)
    image = to_rgb(image)
    if orientation != UPRIGHT:
        return image, mode, 1 if is_upright else tag
    return image if is_upright else turn(image, tag), mode, tag


def read_image(path: Path, max_megapixels: float = MEGAPIXELS) -> bytes:
    """Returns the bytes of an image file, which must be a regular file of a credible size.

    Raises:
      ValueError: it is another kind of file, or larger than an image of these pixels.
      OSError: it cannot be opened.
    """
    check_file_size(path.stat().st_size, max_megapixels)
    return read_regular(path, int(_BYTES_OF_A_PIXEL * max_megapixels * 1e6))


def check_file_size(size: int, max_megapixels: float = MEGAPIXELS) -> None:
    """Raises ValueError if a file of so many bytes is more than an image of these pixels takes."""
    if size > _BYTES_OF_A_PIXEL * max_megapixels * 1e6:
        raise ValueError(
            f"{size:,} bytes are more than an image of the {max_megapixels:g} megapixels of "
            "data.max_megapixels takes"
        )


def to_rgb(image: Any) -> Any:
    """An image of Pillow in its mode RGB.

    Grey becomes three equal channels; transparency is dropped, as by `convert("RGB")` in
    DomainBed's code; of numbers of 9 to 16 bits the upper eight bits are kept, whichever of them is
    white.

    Raises:
      ValueError: the numbers have 32 bits, or a sign: nothing says which of them is white.
      OSError, and whatever else Pillow raises on a damaged file.
    """
    from PIL import Image

    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        image = Image.fromarray(_upper_eight_bits(image))
    elif mode in ("I", "F"):
        raise ValueError(
            f"its pixels are {'floats' if mode == 'F' else 'integers of 32 bits or with a sign'}, "
            "of which nothing says which is white; save it with 8 or 16 bits"
        )
    elif mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _upper_eight_bits(image: Any) -> np.ndarray:
    """u8[H, W] of an image of more bits; older versions of Pillow give those of PNG as 32."""
    tags = image.tag_v2 if image.format == "TIFF" else {}
    bits = tags.get(_BITS, (16,))[0]
    grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
    return 255 - grey if tags.get(_WHITE_IS_ZERO, 1) == 0 else grey
