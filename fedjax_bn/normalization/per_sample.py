"""Normalization by statistics of each sample on CPU, where XLA's sums over positions are slow.

XLA:CPU sums over a middle axis at a fraction of the memory's rate. Here neighbours are added to
each other, and products with a constant row sum what is left: between two and ten times as fast.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.engine.backend import computed_once, on_cpu

_AT_ONCE = 16  # positions that are added to each other without a product
_NEIGHBOURS = 4  # those of larger maps, before the product
Moments = tuple[jax.Array, jax.Array]
Sums = tuple[jax.Array, ...]


def sums(terms: Callable[[jax.Array], tuple[jax.Array, ...]], x: jax.Array) -> Sums:
    """Sums f[B, C] of `terms(x)` over the positions of x f[B, P, C].

    Args:
      terms: of a part of x, f[B, n, C], to some f[B, n, C], each value by itself.
      x: the map.
    """
    samples, positions, channels = x.shape
    group = _group(positions)
    grouped = x.reshape(samples, -1, group, channels)
    each = [terms(grouped[:, :, i]) for i in range(group)]
    added = [sum(parts[1:], parts[0]) for parts in zip(*each, strict=True)]
    if group == positions:
        # Else they would be summed anew for every position that reads them.
        return computed_once(tuple(part[:, 0] for part in added))
    row = jnp.ones((samples, 1, positions // group), x.dtype)
    return tuple(lax.batch_matmul(row, part)[:, 0] for part in added)


@jax.custom_jvp
def moments(x: jax.Array) -> Moments:
    """Mean and biased variance over the positions, f[B, P, C] -> f[B, C] each."""
    if on_cpu():
        return computed_once(_moments_on_cpu(x))
    mean = x.mean(1)
    return mean, jnp.square(x - mean[:, None]).mean(1)


def _moments_on_cpu(x: jax.Array) -> Moments:
    """The same from sums of distances to one of the positions, and of their squares.

    That one is within sqrt(P) deviations of the mean, so that E[d^2] - E[d]^2 loses little.
    """
    positions = x.shape[1]
    middle = x[:, positions // 2][:, None]
    first, second = sums(lambda part: (part - middle, jnp.square(part - middle)), x)
    first, second = first / positions, second / positions
    return first + middle[:, 0], jnp.maximum(second - jnp.square(first), 0)


@moments.defjvp
def _moments_jvp(x: tuple[jax.Array], dx: tuple[jax.Array]) -> tuple[Moments, Moments]:
    mean, var = moments(*x)
    change = 2 * (x[0] - mean[:, None]) * dx[0]  # the mean's own change adds up to 0
    # Once also backwards: what reaches a position would else be made anew for each.
    return (mean, var), computed_once((dx[0].mean(1), change.mean(1)))


def _group(positions: int) -> int:
    """How many neighbours are added to each other: a divisor of the number of positions."""
    if positions <= _AT_ONCE:
        return positions
    return max(n for n in range(1, _NEIGHBOURS + 1) if positions % n == 0)


def suits(x: jax.Array, *statistics: jax.Array) -> bool:
    """Whether there is one of each statistic for every sample of x f[B, ..., C], and all on CPU."""
    shape = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])
    return x.ndim > 2 and on_cpu() and all(one.shape == shape for one in statistics)


@jax.custom_jvp
def scaled(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """(x - mean) * factor + bias of x f[B, ..., C], f[B, 1, ..., C] twice and f[C]."""
    return (x - mean) * factor + bias


@scaled.defjvp
def _scaled_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    x, mean, factor, _ = primals
    dx, dmean, dfactor, dbias = tangents
    dmean, dfactor = (_spread(d, x) for d in (dmean, dfactor))
    return scaled(*primals), (dx - dmean) * factor + (x - mean) * dfactor + dbias


def _spread(one: jax.Array, x: jax.Array) -> jax.Array:
    """f[B, 1, ..., C] at all positions of x, in operations whose transposes are those of `sums`."""
    samples, channels = x.shape[0], x.shape[-1]
    positions = x.size // max(1, samples * channels)
    group = _group(positions)
    row = jnp.ones((samples, positions // group, 1), one.dtype)
    rows = lax.batch_matmul(row, computed_once(one.reshape(samples, 1, channels)))
    return jnp.stack([rows] * group, axis=2).reshape(x.shape)
