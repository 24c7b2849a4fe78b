"""Max-pooling that is fast on CPU, in a training step and inside loops."""

from collections.abc import Sequence

import flax.linen as nn
import jax

def max_pool(x: jax.Array, window: Sequence[int], strides: Sequence[int], padding: Sequence[tuple[int, int]]) -> jax.Array:
    """stub"""
    return nn.max_pool(x, window, strides, padding)
