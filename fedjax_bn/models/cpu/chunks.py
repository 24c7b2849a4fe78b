"""Computes large batches in chunks, which need less memory and stay in a CPU's caches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def in_chunks(function: Callable[[jax.Array], Any], x: jax.Array, size: int) -> Any:
    """Returns `function(x)`, computed in one loop over chunks of at most `size` samples.

    Args:
      function: f[b, ...] -> arrays [b, ...] for any b, in which samples are independent.
      x: [B, ...]. Where B is not a multiple of the number of chunks, zeros fill the last one.
      size: largest number of samples in a chunk, positive.
    """
    count = -(-len(x) // size)
    if count <= 1:
        return function(x)
    rows = -(-len(x) // count)
    filled = jnp.pad(x, [(0, count * rows - len(x))] + [(0, 0)] * (x.ndim - 1))
    chunks = lax.map(function, filled.reshape(count, rows, *x.shape[1:]))
    return jax.tree.map(lambda y: y.reshape(count * rows, *y.shape[2:])[: len(x)], chunks)
