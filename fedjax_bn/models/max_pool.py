"""Max-pooling by shifted maps, and its form for GPUs.

XLA:GPU makes maps of indices and a scatter of atomic additions of the gradient of `reduce_window`.
Here the forward pass also stores the place of each maximum, a byte, from which the backward pass is
one loop over the map.
"""

from collections.abc import Iterator
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

Pair = tuple[int, int]
Padding = tuple[Pair, Pair]


def elements(
    x: jax.Array, window: Pair, strides: Pair, padding: Padding, fill: float = -jnp.inf
) -> Iterator[jax.Array]:
    """Yields the first element of every window, then the second, ..., each f[B, H', W', C]."""
    if any(map(any, padding)):
        x = jnp.pad(x, ((0, 0), *padding, (0, 0)), constant_values=fill)
    high, wide = ((n - t) // d + 1 for n, t, d in zip(x.shape[1:3], window, strides, strict=True))
    for i in range(window[0]):
        for j in range(window[1]):
            rows = x[:, i : i + (high - 1) * strides[0] + 1 : strides[0]]
            yield rows[:, :, j : j + (wide - 1) * strides[1] + 1 : strides[1]]


def max_and_place(
    x: jax.Array, window: Pair, strides: Pair, padding: Padding, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum over windows and its place in reading order, f, i[B, H', W', C]."""
    best, *more_elements = elements(x, window, strides, padding)
    place = jnp.zeros(best.shape, dtype)
    for k, value in enumerate(more_elements, 1):
        wins = (value > best) | jnp.isnan(value)  # NaN propagates, as in `jnp.maximum`
        best = jnp.where(wins, value, best)
        # The first of equal values keeps the place, as in PyTorch.
        place = jnp.where(wins, k, place)
    return best, place


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def max_pool_with_places(x: jax.Array, window: Pair, strides: Pair, padding: Padding) -> jax.Array:
    """Returns the maximum over windows; arguments and result as in `models.cpu.max_pool`."""
    return nn.max_pool(x, window, strides, padding)


@max_pool_with_places.defjvp
def _max_pool_jvp(
    window: Pair, strides: Pair, padding: Padding, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    smallest = np.min_scalar_type(window[0] * window[1])
    with jax.named_scope("max_pool"):
        best, place = max_and_place(x, window, strides, padding, smallest)
        # Reverse mode transposes this to a sum of maps with gaps, which XLA computes in one loop.
        changes = elements(dx, window, strides, padding, 0)
        chosen = [jnp.where(place == k, change, 0) for k, change in enumerate(changes)]
        return best, sum(chosen[1:], chosen[0])
