"""Maximum mean discrepancy of two sets of vectors (Gretton et al., JMLR 2012), by several widths.

MMD^2(x, y) = sum_ab s_a s_b k(z_a, z_b),   z = (x, y),   s = (w, -w),   sum_a w_a = 1
k(z, z') = sum_r exp(-||z - z'||^2 / (r m)),   m the mean squared distance, without gradient
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def discrepancy(x: jax.Array, y: jax.Array, valid: jax.Array, ratios: Sequence[float]) -> jax.Array:
    """MMD^2 f[] of the valid rows of x and y, each of the same weight; 0 where there is none.

    Args:
      x, y: f[B, D], whose rows b are of one sample.
      valid: bool[B].
      ratios: r, of the kernels' widths to the mean squared distance.
    """
    signs = valid.astype(x.dtype) / jnp.maximum(valid.sum(dtype=x.dtype), 1)
    signs = jnp.concatenate([signs, -signs])
    values = kernel(jnp.concatenate([x, y]), jnp.abs(signs) / 2, ratios)
    return jnp.einsum("a,ab,b->", signs, values, signs)


def kernel(z: jax.Array, shares: jax.Array, ratios: Sequence[float]) -> jax.Array:
    """k(z_a, z_b) f[N, N] of all pairs.

    Args:
      z: f[N, D].
      shares: f[N], weights of the rows in the mean squared distance, of sum 1 (or all 0).
      ratios: r.
    """
    squares = jnp.square(z).sum(-1)
    # Not below 0, which rounding could make of equal rows.
    far = jnp.maximum(squares[:, None] + squares[None] - 2 * z @ z.T, 0)
    mean = jax.lax.stop_gradient(jnp.einsum("a,ab,b->", shares, far, shares))
    relative = far / jnp.where(mean > 0, mean, 1)
    return sum((jnp.exp(-relative / ratio) for ratio in ratios), jnp.zeros_like(far))
