"""Moments and normalization per channel on accelerators, which read a map as rarely as possible.

XLA's derivative of a batch norm reads the map once for each sum that it does not recognize as zero
or as a sum that it has already. An accelerator spends more time in these passes than in the
convolutions. Here the derivative of the moments has no sum, and the derivative of the normalization
has two, which XLA computes in one pass.
"""

import functools

import jax
import jax.numpy as jnp

Moments = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def accelerator_moments(
    x: jax.Array, keep: jax.Array | None, inverse: jax.Array, rounded: bool = False
) -> Moments:
    """Returns mean and biased variance f[C] over all axes but the last.

    Args:
      x: f[B, ..., C], in at least float32.
      keep: bool[B, 1, ...], the samples that count; None for all.
      inverse: f[], 1 / the number of values per channel that count.
      rounded: whether the values of x were rounded to bfloat16; they need one pass, not two.
    """
    axes = tuple(range(x.ndim - 1))
    mean = x.sum(axes, where=keep) * inverse
    if rounded:
        # XLA appends both sums to the convolution that computes x. If E[x^2] - E[x]^2 loses digits
        # in float32, the variance is so small beside the mean that it is mostly that of rounding.
        squares = jnp.square(x).sum(axes, where=keep) * inverse
        return mean, jnp.maximum(squares - jnp.square(mean), 0)
    return mean, jnp.square(x - mean).sum(axes, where=keep) * inverse


@accelerator_moments.defjvp
def _moments_jvp(rounded: bool, primals: tuple, tangents: tuple) -> tuple[Moments, Moments]:
    x, keep, inverse = primals
    dx, axes = tangents[0], tuple(range(x.ndim - 1))
    mean, var = accelerator_moments(x, keep, inverse, rounded)
    dx = dx * inverse if keep is None else jnp.where(keep, dx * inverse, 0)
    # The change of the mean cancels in the change of the variance.
    return (mean, var), (dx.sum(axes), (2 * (x - mean) * dx).sum(axes))


@jax.custom_jvp
def scaled(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns (x - mean) * factor + bias of x f[B, ..., C] and three f[C]."""
    return (x - mean) * factor + bias


@scaled.defjvp
def _scaled_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    x, mean, factor, _ = primals
    dx, dmean, dfactor, dbias = tangents
    # One sum serves mean and bias in reverse mode. Of two, XLA would compute that of a bias in
    # bfloat16 in a pass of its own.
    shift = dbias - dmean * factor
    return scaled(*primals), dx * factor + ((x - mean) * dfactor + shift)
