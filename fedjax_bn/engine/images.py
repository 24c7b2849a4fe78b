"""Normalizes pixels for a model, on the device."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.engine.inputs import check_image_dtype

Prepare = Callable[[jax.Array, Any], jax.Array]
_LEAST_STD, _MOST = 1e-6, 1e6  # in units of the pixel range; beyond them logits are noise


def impossible_samples(
    shape: Sequence[int], dtype: str, mean: Sequence[float], std: Sequence[float]
) -> str:
    """Returns which of one sample's "shape", "dtype", "mean or std" is impossible; "" if none."""
    channels = {len(mean), len(std)}
    right = channels <= {1, *shape[-1:]} and all(abs(x) <= _MOST for x in (*mean, *std))
    impossible = {
        "shape": not 1 <= len(shape) <= 4 or min(shape) < 1 or math.prod(shape) > 2**28,
        "dtype": dtype not in ("uint8", "float32"),
        "mean or std": not right or min(std) < _LEAST_STD,
    }
    return next((part for part, is_wrong in impossible.items() if is_wrong), "")


def standardize(mean: float | Sequence[float] = 0.5, std: float | Sequence[float] = 0.5) -> Prepare:
    """Returns `prepare(images, dtype)`: (u8 / 255 - mean) / std for bytes; floats are only cast.

    Mean and positive std are per channel or for all, in units of the pixel range [0, 1]. `prepare`
    raises ValueError for other images.
    """
    centre, spread = np.asarray(mean), np.asarray(std)

    def prepare(images: jax.Array, dtype: Any) -> jax.Array:
        check_image_dtype(images.dtype)
        if images.dtype != jnp.uint8:
            return images.astype(dtype)
        pixels = images.astype(dtype) / jnp.asarray(255, dtype)
        return (pixels - jnp.asarray(centre, dtype)) / jnp.asarray(spread, dtype)

    return prepare
