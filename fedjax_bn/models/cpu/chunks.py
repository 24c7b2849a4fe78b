"""Large batches in chunks: less memory at a time, and on CPU data that stay in the caches."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any
CHUNK_VALUES = 2**18  # values of images at a time: 21 of 64 x 64 x 3
MIN_CHUNK = 8  # images; fewer do not fill the matrix products


def in_chunks(function: Callable[[jax.Array], PyTree], x: jax.Array, size: int) -> PyTree:
    """`function(x)`, with at most `size` samples at a time, all chunks in one loop.

    Args:
      function: f[b, ...] -> arrays [b, ...], any b, each sample by itself.
      x: [B, ...]. Where B is not a multiple of the number of chunks, zeros fill the last one.
      size: samples at a time, positive.
    """
    count = -(-len(x) // size)
    if count <= 1:
        return function(x)
    each = -(-len(x) // count)
    filled = jnp.pad(x, [(0, count * each - len(x))] + [(0, 0)] * (x.ndim - 1))
    chunks = lax.map(function, filled.reshape(count, each, *x.shape[1:]))
    return jax.tree.map(lambda y: y.reshape(count * each, *y.shape[2:])[: len(x)], chunks)


def in_cache(function: Callable[[jax.Array], PyTree], images: jax.Array) -> PyTree:
    """`function(images)` in chunks whose maps stay in the caches of a CPU.

    ResNet-18 takes 0.7 to 0.9 of the time for 64 images of 64 x 64 pixels.

    Args:
      function: a network, f[b, H, W, C] -> arrays [b, ...], each sample by itself.
      images: f[B, H, W, C]; samples of another form, whose networks read more weights than data,
        are passed at once.
    """
    if images.ndim != 4:
        return function(images)
    return in_chunks(
        function, images, max(CHUNK_VALUES // max(prod(images.shape[1:]), 1), MIN_CHUNK)
    )
