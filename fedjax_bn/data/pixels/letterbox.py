"""Images of any shape as squares, and boxes in them.

An image of w x h pixels is scaled by min(S/w, S/h) and put into the middle of a grey square of S
pixels a side, as YOLO's detectors have it, so that its shape stays. Stored images serve training
and testing alike: small ones are enlarged for both.
"""

from typing import Any

import numpy as np

GREY = 114


def fitted(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Where an image lies in its square of `size` pixels: left, top, width and height there."""
    scale = min(size / width, size / height)
    wide, high = (max(1, min(size, round(side * scale))) for side in (width, height))
    return (size - wide) // 2, (size - high) // 2, wide, high


def letterboxed(image: Any, size: int) -> Any:
    """An RGB image of Pillow, in a grey square of `size` pixels a side, see `fitted`.

    It is resized by the bilinear filter.
    """
    from PIL import Image

    left, top, wide, high = fitted(*image.size, size)
    if image.size != (wide, high):
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
    if (wide, high) == (size, size):
        return image
    square = Image.new("RGB", (size, size), (GREY,) * 3)
    square.paste(image, (left, top))
    return square


def to_square(corners: np.ndarray, width: int, height: int, size: int) -> np.ndarray:
    """Boxes f64[n, 4] in shares of an image as shares of its square."""
    left, top, wide, high = fitted(width, height, size)
    return (corners * (wide, high, wide, high) + (left, top, left, top)) / size
