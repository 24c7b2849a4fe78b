"""Pixels as a model sees them, computed on the device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.inputs import check_image_dtype

Prepare = Callable[[jax.Array, Any], jax.Array]


def standardize(mean: float | Sequence[float] = 0.5, std: float | Sequence[float] = 0.5) -> Prepare:
    """Returns `prepare(images, dtype)`: (u8 / 255 - mean) / std for bytes; floats are only cast.

    Args:
      mean: per channel or one for all, in units of the pixel range [0, 1].
      std: likewise, positive.

    Raises:
      ValueError: at the call, where images are neither uint8 nor floats.
    """
    centre, spread = np.asarray(mean), np.asarray(std)

    def prepare(images: jax.Array, dtype: Any) -> jax.Array:
        check_image_dtype(images.dtype)
        if images.dtype != jnp.uint8:
            return images.astype(dtype)
        pixels = images.astype(dtype) / jnp.asarray(255, dtype)
        return (pixels - jnp.asarray(centre, dtype)) / jnp.asarray(spread, dtype)

    return prepare
