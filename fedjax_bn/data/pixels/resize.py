"""Images brought to one size: stretched, or letterboxed with their boxes.

A letterboxed image of w x h pixels is scaled by min(S/w, S/h) and put into the middle of a grey
square of S pixels a side, as YOLO's detectors have it, so that its shape stays. Stored images serve
training and testing alike: small ones are enlarged for both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_bn.data.domain import Rows, blocks

GREY = 114


def _fitted(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Returns the place of an image in its square: left, top, width and height there."""
    scale = min(size / width, size / height)
    wide, high = (max(1, min(size, round(side * scale))) for side in (width, height))
    return (size - wide) // 2, (size - high) // 2, wide, high


def letterboxed(image: Any, size: int) -> Any:
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
    # Rounded sides, as of the pixels, so that a box stays on its object.
    left, top, wide, high = _fitted(width, height, size)
    return (corners * (wide, high, wide, high) + (left, top, left, top)) / size


def resized(images: np.ndarray | Rows, shape: Sequence[int]) -> np.ndarray | Rows:
    """Returns bytes u8[N, h, w, C] as u8[N, H, W, C] by Pillow's bilinear filter, as `decode`.

    Args:
      images: bytes; those that have the shape are returned as they are.
      shape: (H, W, C).

    Raises:
      ValueError: they are not bytes of images, or have other channels.
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
