"""Makes the small pictures of samples that a run's folder keeps."""

import numpy as np
from PIL import Image


def small_picture(stored: np.ndarray, side: int) -> np.ndarray:
    """Returns a picture u8[h, w, 1 or 3] with sides of at most `side` pixels of a stored image.

    Args:
      stored: u8[H, W, C] or f32[H, W, C], whose own range is shown because floats have no fixed
        one; with other than 3 channels the first is shown. f32[F] is returned as it is.
      side: the greatest height and width.
    """
    if stored.ndim < 3:
        return stored.astype(np.float32).reshape(-1)
    if stored.dtype != np.uint8:
        low, high = float(stored.min()), float(stored.max())
        stored = ((stored - low) / ((high - low) or 1) * 255).astype(np.uint8)
    picture = Image.fromarray(stored if stored.shape[-1] == 3 else stored[..., 0])
    picture.thumbnail((side, side))
    return np.asarray(picture).reshape(picture.height, picture.width, -1)


def small_mask(mask: np.ndarray, side: int) -> np.ndarray:
    """Returns a mask u8[H, W] in the size of `small_picture`, u8[h, w], by the nearest pixel."""
    picture = Image.fromarray(mask)
    picture.thumbnail((side, side), Image.Resampling.NEAREST)
    return np.asarray(picture)
