r"""Maximum mean discrepancy of two sets of vectors (Gretton et al., JMLR 2012), by several widths.

$MMD^2(x, y) = \sum_{ab} s_a s_b k(z_a, z_b)$ with $z = (x, y)$, $s = (w, -w)$, $\sum_a w_a = 1$

$k(z, z') = \sum_r \exp(-\Vert z - z' \Vert^2 / (r m))$

m is the mean squared distance, which passes no gradient.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def discrepancy(x: jax.Array, y: jax.Array, valid: jax.Array, ratios: Sequence[float]) -> jax.Array:
    """Returns MMD^2 f[] of the valid rows of x and y, of equal weights; 0 without valid rows.

    Args:
      x, y: f[B, D], whose rows b are of one sample.
      valid: bool[B].
      ratios: r, of the kernels' widths to the mean squared distance.
    """
    far = squared_distances(x, x), squared_distances(y, y), squared_distances(x, y)
    return by_distances(*far, valid, ratios)


def by_distances(
    within_x: jax.Array,
    within_y: jax.Array,
    between: jax.Array,
    valid: jax.Array,
    ratios: Sequence[float],
) -> jax.Array:
    """Returns the `discrepancy` of vectors with these squared distances, f[B, B] each."""
    shares = valid.astype(between.dtype) / jnp.maximum(valid.sum(dtype=between.dtype), 1)

    def mean(pairs: jax.Array) -> jax.Array:
        return jnp.einsum("a,ab,b->", shares, pairs, shares)

    parts = ((within_x, 1), (within_y, 1), (between, -2))
    width: Any = sum(abs(sign) / 4 * mean(far) for far, sign in parts)
    gaps = (sign * mean(kernel(far, width, ratios)) for far, sign in parts)
    return sum(gaps, jnp.zeros_like(width))


def kernel(far: jax.Array, width: jax.Array, ratios: Sequence[float]) -> jax.Array:
    """Returns k f[...] of pairs by their squared distances f[...].

    The width m passes no gradient: f[], or f[...] of pairs.
    """
    relative = far / jax.lax.stop_gradient(jnp.where(width > 0, width, 1))
    return sum((jnp.exp(-relative / ratio) for ratio in ratios), jnp.zeros_like(far))


def squared_distances(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns ||x_a - y_b||^2 f[N, M] of all pairs of rows f[N, D] and f[M, D]."""
    first, second = (jnp.square(z).sum(-1) for z in (x, y))
    # Not below 0, which rounding could make of equal rows.
    return jnp.maximum(first[:, None] + second[None] - 2 * x @ y.T, 0)
