"""Large batches in chunks: less memory at a time, and on CPU data that stay in the caches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def in_chunks(function: Callable[[jax.Array], Any], x: jax.Array, size: int) -> Any:
    """Returns `function(x)`, with at most `size` samples at a time, all chunks in one loop.

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
