"""Arrays of images of another size, stretched as image files are when they are decoded."""

from collections.abc import Sequence

import numpy as np

from fedjax_bn.data.rows import Rows, blocks


def resized(images: np.ndarray | Rows, shape: Sequence[int]) -> np.ndarray | Rows:
    """Bytes u8[N, h, w, C] as u8[N, H, W, C] by Pillow's bilinear filter, as `decode` has it.

    Args:
      images: bytes; those that have the shape are returned as they are.
      shape: (H, W, C).

    Raises:
      ValueError: they are no bytes of images, or have other channels.
    """
    if tuple(images.shape[1:]) == tuple(shape):
        return images
    fits = len(shape) == 3 and images.ndim == 4 and images.shape[3] == shape[2]
    if not fits or images.dtype != np.uint8 or shape[2] not in (1, 3):
        raise ValueError(
            f"samples {images.dtype} {list(images.shape[1:])} cannot be stretched to "
            f"{list(shape)}: only bytes [H, W, C] with as many channels, 1 or 3, can"
        )
    return np.concatenate([_stretched(block, shape) for block in blocks(images)])


def _stretched(images: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    from PIL import Image

    height, width, _ = shape

    def stretch(image: np.ndarray) -> np.ndarray:
        small = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
        return np.asarray(small.resize((width, height), Image.Resampling.BILINEAR))

    return np.stack([stretch(image) for image in images]).reshape(-1, *shape)
