"""Opens the file of a mask as one byte for each pixel, as it is stored.

A mask is a number for each pixel in whatever form a program saves it: grey of 1, 8 or 16 bits,
equal red, green and blue, or a palette. Transparency is dropped. With a palette of greys a value is
its grey, else the index of its colour. JPEG changes values, so masks in it are black and white:
255 from 128 upwards.
"""

from typing import Any

import numpy as np

from fedjax_bn.data.pixels.raster import MEGAPIXELS, UPRIGHT, open_raster, turn_of

PLAIN, INDEX, LOSSY = range(3)  # forms of masks: values as stored, indices of colours, and JPEG
_SPREAD = 32  # by which JPEG may change the channels of a grey
_REMEDY = "save it as a PNG with a number for each class"


def open_mask(
    content: bytes, max_megapixels: float = MEGAPIXELS, orientation: str = UPRIGHT
) -> tuple[Any, int]:
    """Returns a mask as a Pillow image of mode L, its values as stored, and its form, see above.

    The orientation is that of `raster.open_image`. A GIF or TIFF gives its first frame.

    Raises:
      ValueError: the file is not an image, or has colours, floats or numbers above 255.
      OSError, and whatever else Pillow raises on a damaged file.
    """
    from PIL import Image

    image = open_raster(content, max_megapixels)
    turn, _ = turn_of(image, orientation)
    levels, form = _levels_of(image)
    mask = Image.fromarray(levels)
    return mask if turn is None else mask.transpose(turn), form


def _levels_of(image: Any) -> tuple[np.ndarray, int]:
    """Returns the values u8[H, W] of a Pillow image, and their form."""
    if image.format == "JPEG":
        colours = np.asarray(image.convert("RGB")).astype(np.int16)
        _refuse_colours(colours, _SPREAD)
        return np.where(colours[..., 1] >= 128, 255, 0).astype(np.uint8), LOSSY
    if image.mode in ("1", "L", "LA"):
        return np.asarray(image.convert("L")), PLAIN
    if image.mode == "P":
        palette, indices = np.array(image.getpalette("RGB"), np.uint8), np.asarray(image)
        palette = palette.reshape(-1, 3)
        if (palette == palette[:, :1]).all():
            return np.pad(palette[:, 0], (0, 256 - len(palette)))[indices], PLAIN
        return indices, INDEX
    if image.mode in ("RGB", "RGBA"):
        colours = np.asarray(image)[..., :3]
        _refuse_colours(colours.astype(np.int16), 0)
        return np.ascontiguousarray(colours[..., 0]), PLAIN
    if image.mode.startswith("I"):
        numbers = np.asarray(image).astype(np.int64)
        if not (numbers % 257).any():  # bytes stretched to 16 bits
            numbers //= 257
        if numbers.min() < 0 or numbers.max() > 255:
            raise ValueError(f"it has numbers up to {numbers.max()}, above 255: {_REMEDY}")
        return numbers.astype(np.uint8), PLAIN
    raise ValueError(f"its pixels are of Pillow's mode {image.mode!r}, not numbers: {_REMEDY}")


def _refuse_colours(colours: np.ndarray, spread: int) -> None:
    """Raises ValueError if the channels i16[H, W, 3] of a pixel differ by more than `spread`."""
    wrong = np.argwhere(np.ptp(colours, axis=2) > spread)
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"it has the colour {tuple(colours[row, column].tolist())} at row {row}, column "
            f"{column}, of which no class is known: {_REMEDY}"
        )
