"""Moments and normalization per channel, with derivatives that read the map as rarely as possible.

XLA's derivative of a batch norm reads the map once for each sum that it does not recognize as zero
or as a sum that it has already. An accelerator spends more time in these passes than in the
convolutions. Here the moments have a derivative without a sum, and the normalization has one with
two sums, which XLA computes in one pass.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_bn.engine.backend import computed_once
from fedjax_bn.normalization import cpu

Moments = tuple[jax.Array, jax.Array]


def _sums(term: Callable[..., jax.Array], *maps: jax.Array) -> jax.Array:
    """Returns the sum f[C] of the elementwise `term(*maps)` over all axes but the last."""
    if cpu.few_channels(maps[0]):
        return cpu.channel_sums(term, *maps)
    return term(*maps).sum(tuple(range(maps[0].ndim - 1)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def moments(
    x: jax.Array, keep: jax.Array | None, inverse: jax.Array, rounded: bool = False
) -> Moments:
    """Returns mean and biased variance f[C] over all axes but the last.

    Args:
      x: f[B, ..., C], in at least float32.
      keep: bool[B, 1, ...], the samples that count; None for all.
      inverse: f[], 1 / the number of values per channel that count.
      rounded: whether the values of x are 16-bit floats; they need one pass instead of two.
    """
    counted = x if keep is None else jnp.where(keep, x, 0)
    mean = computed_once(_sums(lambda part: part, counted) * inverse)
    if rounded:
        # XLA appends both sums to the convolution that computes x. If E[x^2] - E[x]^2 loses its
        # digits in float32, the rounding to 16 bits has already lost those of x - E[x].
        squares = _sums(jnp.square, counted) * inverse
        return mean, jnp.maximum(squares - jnp.square(mean), 0)
    near = x if keep is None else jnp.where(keep, x, mean)
    return mean, _sums(lambda part: jnp.square(part - mean), near) * inverse


@moments.defjvp
def _moments_jvp(rounded: bool, primals: tuple, tangents: tuple) -> tuple[Moments, Moments]:
    x, keep, inverse = primals
    dx, axes = tangents[0], tuple(range(x.ndim - 1))
    mean, var = moments(x, keep, inverse, rounded)
    dx = dx * inverse if keep is None else jnp.where(keep, dx * inverse, 0)
    # The change of the mean cancels in the change of the variance.
    return (mean, var), (dx.sum(axes), (2 * (x - mean) * dx).sum(axes))


@jax.custom_vjp
def scaled(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns (x - mean) * factor + bias of x f[B, ..., C] and three f[C]; reverse mode only."""
    return (x - mean) * factor + bias


def _scaled_backward(saved: tuple, g: jax.Array) -> tuple[jax.Array, ...]:
    x, mean, factor = saved
    # One sum serves mean and bias. Of two, XLA would compute a 16-bit bias's in a pass of its own.
    alone = _sums(lambda part: part, g)
    product = _sums(lambda part, given: given * (part - mean), x, g)
    return g * factor, -factor * alone, product, alone


scaled.defvjp(
    lambda x, mean, factor, bias: (scaled(x, mean, factor, bias), (x, mean, factor)),
    _scaled_backward,
)
