"""Batch norm of large maps with few channels on CPU, where XLA's sums over positions are slow.

XLA:CPU sums a map for each of its channels with steps as wide as all of them, which few channels do
not fill. Here long rows of the map are added to each other until few are left, which takes 0.4 of
the time with 16 channels and 0.6 with 32, and loses less to rounding.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_bn.engine.backend import computed_once, on_cpu

_CHANNELS = 32  # at most; with 64 a tenth would be gained
_POSITIONS = 4096  # at least, in all samples together
_AT_ONCE = 8  # rows that are added to each other
_FEWEST = 64  # positions that are left to XLA


def suits(x: jax.Array) -> bool:
    """Whether x f[B, ..., C] is such a map, and this program is traced for CPU."""
    channels = x.shape[-1]
    return 0 < channels <= _CHANNELS and x.size >= _POSITIONS * channels and on_cpu()


def sums(term: Callable[..., jax.Array], *maps: jax.Array) -> jax.Array:
    """Sum f[C] of `term(*maps)` over all axes but the last.

    Args:
      term: of parts of the maps, f[n, C] each, to f[n, C], each value by itself.
      *maps: f[B, ..., C] each.
    """
    channels = maps[0].shape[-1]
    parts = [one.reshape(1, -1, channels) for one in maps]
    while (rows := parts[0].shape[1]) > _FEWEST:
        count = next((n for n in range(_AT_ONCE, 1, -1) if rows % n == 0), 1)
        if count == 1:
            break
        parts = [one.reshape(count, -1, channels) for one in parts]
        added = sum(term(*(one[i] for one in parts)) for i in range(count))
        parts, term = [computed_once(added)[None]], lambda part: part
    return term(*(one[0] for one in parts)).sum(0)


@jax.custom_jvp
def moments(
    x: jax.Array, keep: jax.Array | None, inverse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance f[C] over all axes but the last.

    Args:
      x: f[B, ..., C].
      keep: bool[B, 1, ...], the samples that count; None for all.
      inverse: f[], 1 over the number of values behind each.
    """
    mean = sums(lambda part: part, x if keep is None else jnp.where(keep, x, 0)) * inverse
    mean = computed_once(mean)
    near = x if keep is None else jnp.where(keep, x, mean)
    return mean, sums(lambda part: jnp.square(part - mean), near) * inverse


@moments.defjvp
def _moments_jvp(primals: tuple, tangents: tuple) -> tuple:
    x, keep, inverse = primals
    dx, axes = tangents[0], tuple(range(x.ndim - 1))
    mean, var = moments(x, keep, inverse)
    dx = dx * inverse if keep is None else jnp.where(keep, dx * inverse, 0)
    # The mean's own change adds up to 0 in the variance's.
    return (mean, var), (dx.sum(axes), (2 * (x - mean) * dx).sum(axes))


@jax.custom_vjp
def scaled(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """(x - mean) * factor + bias of x f[B, ..., C] and three f[C]; reverse-mode derivatives."""
    return (x - mean) * factor + bias


def _scaled_forward(
    x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return scaled(x, mean, factor, bias), (x, mean, factor)


def _scaled_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    x, mean, factor = saved
    alone = sums(lambda part: part, g)
    product = sums(lambda part, given: given * (part - mean), x, g)
    return g * factor, -factor * alone, product, alone


scaled.defvjp(_scaled_forward, _scaled_backward)
