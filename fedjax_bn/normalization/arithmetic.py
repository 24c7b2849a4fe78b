"""Moments and normalization of arrays, in forms that are fast on CPU and on accelerators.

XLA:CPU sums over positions slowly. In its sums per channel, few channels do not fill the
processor's vectors. Here long rows of the map are added to each other until few are left; this
takes 0.4 of the time with 16 channels, and has smaller rounding errors. XLA's sums per sample run
over a middle axis. Here neighbours are added to each other, and products with a row of ones sum the
rest, between two and ten times as fast.

XLA's derivative of a batch norm reads the map once for each sum that it does not know to be zero,
and an accelerator spends more time in these passes than in the convolutions. Of the derivatives
here that of the moments has no such sum, and that of the normalization two, in one pass.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.engine.backend import computed_once, on_cpu, on_gpu

_CHANNELS = 32  # largest number that counts as few; 64 would save only a tenth
_POSITIONS = 4096  # smallest number of positions of a large map, over all samples
_ROWS = 8  # most rows added to each other at a time
_FEWEST = 64  # at most so many positions are left to XLA
_AT_ONCE = 16  # at most so many positions of a sample are all added without a product
_UNDIVIDED = 1024  # most positions that a GPU sums in one stage
_GROUPS = 256  # most groups of rows in the first of two stages
_NEIGHBOURS = 4  # most neighbours added in larger maps, before the product
Moments = tuple[jax.Array, jax.Array]


def _few_channels(x: jax.Array) -> bool:
    """Whether x f[B, ..., C] is a large map with few channels, in a program traced for CPU."""
    channels = x.shape[-1]
    return 0 < channels <= _CHANNELS and x.size >= _POSITIONS * channels and on_cpu()


def channel_moments(
    x: jax.Array, keep: jax.Array | None, inverse: jax.Array, rounded: bool
) -> Moments:
    """Returns mean and biased variance f[C] over all axes but the last.

    Args:
      x: f[B, ..., C], in at least float32.
      keep: bool[B, 1, ...], the samples that count; None for all.
      inverse: f[], 1 / the number of values per channel that count.
      rounded: whether the values of x were rounded to bfloat16; they need one pass, not two.
    """
    if _few_channels(x) or not on_cpu():
        return _channel_moments(x, keep, inverse, rounded)
    axes = tuple(range(x.ndim - 1))
    # Two passes, because E[x^2] - E[x]^2 loses all digits of a channel whose mean is large.
    mean = jnp.sum(x, axes, where=keep) * inverse
    return mean, jnp.sum(jnp.square(x - mean), axes, where=keep) * inverse


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _channel_moments(
    x: jax.Array, keep: jax.Array | None, inverse: jax.Array, rounded: bool
) -> Moments:
    if _few_channels(x):
        return _channel_moments_on_cpu(x, keep, inverse)
    if rounded:
        # In one pass. XLA:TPU may append it to the convolution that computes x; on GPU that is a
        # call of cuDNN, which nothing joins. If E[x^2] - E[x]^2 loses digits in float32, the
        # variance is so small beside the mean that it is mostly that of rounding.
        mean, squares = _power_means(x, keep, inverse, 1, 2)
        return mean, jnp.maximum(squares - jnp.square(mean), 0)
    mean = _power_means(x, keep, inverse, 1)[0]
    return mean, _power_means(x - mean, keep, inverse, 2)[0]


def _power_means(
    x: jax.Array, keep: jax.Array | None, inverse: jax.Array, *powers: int
) -> list[jax.Array]:
    """The means f[C] of x, of x^2, or of both; arguments as in `channel_moments`."""
    maps = (x if power == 1 else jnp.square(x) for power in powers)
    shape = _in_groups(x)
    if not shape:
        return [part.sum(tuple(range(x.ndim - 1)), where=keep) * inverse for part in maps]
    axes, kept = tuple(range(2, len(shape) - 1)), None if keep is None else keep[:, None]
    parts = [part.reshape(shape).sum(axes, where=kept) for part in maps]
    # Without the barrier XLA would make one stage of the two.
    together = jnp.concatenate(lax.optimization_barrier(parts), -1).sum((0, 1))
    return [total * inverse for total in jnp.split(together, len(powers))]


def _spread_in_groups(x: jax.Array, *values: jax.Array) -> list[jax.Array]:
    """Repeats each f[C] at all positions of x f[B, ..., C]; transposed: sums by groups."""
    shape = _in_groups(x)
    if not shape:
        return list(values)
    together = jnp.broadcast_to(jnp.concatenate(values), (*shape[:2], len(values) * shape[-1]))
    parts = lax.optimization_barrier(jnp.split(together, len(values), -1))
    parts = [part.reshape(*shape[:2], *(1,) * (len(shape) - 3), shape[-1]) for part in parts]
    return [jnp.broadcast_to(part, shape).reshape(x.shape) for part in parts]


def _in_groups(x: jax.Array) -> tuple[int, ...] | None:
    """The shape in which a GPU sums a map f[B, H, ..., C] over groups of rows; else None."""
    # Of fewer than 4,096 positions XLA:GPU makes one stage, on a few multiprocessors, and of more
    # a second stage for each sum.
    if not on_gpu() or x.ndim < 3 or x.size <= _UNDIVIDED * x.shape[-1]:
        return None
    batch, height = x.shape[:2]
    divisors = [n for n in range(1, height + 1) if height % n == 0]
    count = max(n for n in divisors if n == 1 or n * batch <= _GROUPS)
    return batch, count, height // count, *x.shape[2:]


@_channel_moments.defjvp
def _channel_moments_jvp(rounded: bool, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    x, keep, inverse = primals
    dx, axes = tangents[0], tuple(range(x.ndim - 1))
    mean, var = _channel_moments(x, keep, inverse, rounded)
    dx = dx * inverse if keep is None else jnp.where(keep, dx * inverse, 0)
    # The change of the mean cancels in the change of the variance.
    return (mean, var), (dx.sum(axes), (2 * (x - mean) * dx).sum(axes))


def _channel_sums(term: Callable[..., jax.Array], *maps: jax.Array) -> jax.Array:
    """Sum f[C] of the elementwise function `term(*maps)` over all axes but the last."""
    channels = maps[0].shape[-1]
    parts = [array.reshape(1, -1, channels) for array in maps]
    while (rows := parts[0].shape[1]) > _FEWEST:
        count = next((n for n in range(_ROWS, 1, -1) if rows % n == 0), 1)
        if count == 1:
            break
        parts = [part.reshape(count, -1, channels) for part in parts]
        added = sum(term(*(part[i] for part in parts)) for i in range(count))
        # Otherwise XLA would merge all levels into one loop and read the map at every level.
        parts, term = [computed_once(added)[None]], lambda part: part
    return term(*(part[0] for part in parts)).sum(0)


def _channel_moments_on_cpu(x: jax.Array, keep: jax.Array | None, inverse: jax.Array) -> Moments:
    """`channel_moments` of a large map with few channels."""
    mean = _channel_sums(lambda part: part, x if keep is None else jnp.where(keep, x, 0)) * inverse
    mean = computed_once(mean)
    near = x if keep is None else jnp.where(keep, x, mean)
    return mean, _channel_sums(lambda part: jnp.square(part - mean), near) * inverse


def scaled(
    x: jax.Array, mean: jax.Array, factor: jax.Array, offset: jax.Array, shifted: bool
) -> jax.Array:
    """Returns (x - mean) * factor, plus the offset if it is `shifted`."""
    if mean.ndim == factor.ndim == 1 and _few_channels(x):
        return _channel_scaled(x, mean, factor, offset)
    if mean.shape == factor.shape == x.shape[-1:] and not on_cpu():
        return _scaled_in_one_pass(x, mean, factor, offset)
    if _one_each(x, mean, factor):
        return _sample_scaled(x, mean, factor, offset)
    y = (x - mean) * factor
    return y + offset if shifted else y


@jax.custom_jvp
def _scaled_in_one_pass(
    x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array
) -> jax.Array:
    return (x - mean) * factor + bias


@_scaled_in_one_pass.defjvp
def _scaled_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    x, mean, factor, _ = primals
    dx, dmean, dfactor, dbias = tangents
    # One sum serves mean and bias in reverse mode. Of two, XLA would compute that of a bias in
    # bfloat16 in a pass of its own.
    dfactor, shift = _spread_in_groups(x, dfactor, dbias - dmean * factor)
    return _scaled_in_one_pass(*primals), dx * factor + ((x - mean) * dfactor + shift)


@jax.custom_vjp
def _channel_scaled(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns (x - mean) * factor + bias of x f[B, ..., C] and three f[C]; reverse mode only."""
    return (x - mean) * factor + bias


def _channel_scaled_backward(saved: tuple, g: jax.Array) -> tuple[jax.Array, ...]:
    x, mean, factor = saved
    alone = _channel_sums(lambda part: part, g)
    product = _channel_sums(lambda part, gradient: gradient * (part - mean), x, g)
    return g * factor, -factor * alone, product, alone


_channel_scaled.defvjp(
    lambda x, mean, factor, bias: (_channel_scaled(x, mean, factor, bias), (x, mean, factor)),
    _channel_scaled_backward,
)


def _one_each(x: jax.Array, *statistics: jax.Array) -> bool:
    """Whether each statistic is f[B, 1, ..., C], one per sample of x, in a program for CPU."""
    shape = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])
    return x.ndim > 2 and on_cpu() and all(statistic.shape == shape for statistic in statistics)


@jax.custom_jvp
def sample_moments(x: jax.Array) -> Moments:
    """Returns mean and biased variance over the positions, f[B, P, C] -> f[B, C] each."""
    if on_cpu():
        return computed_once(sample_moments_on_cpu(x))
    mean = x.mean(1)
    return mean, jnp.square(x - mean[:, None]).mean(1)


def sample_moments_on_cpu(x: jax.Array) -> Moments:
    """`sample_moments` from sums of the distances to one position, and of their squares."""
    samples, positions, channels = x.shape
    # One position is within sqrt(P) deviations of the mean, so E[d^2] - E[d]^2 loses little.
    middle = x[:, positions // 2][:, None]
    group = _group(positions)
    grouped = x.reshape(samples, -1, group, channels)
    distances = [grouped[:, :, i] - middle for i in range(group)]
    terms = distances, [jnp.square(distance) for distance in distances]
    added = [sum(parts[1:], parts[0]) for parts in terms]
    if group == positions:
        # Otherwise each position that reads the sums would compute them again.
        mean, square = computed_once(tuple(part[:, 0] for part in added))
    else:
        row = jnp.ones((samples, 1, positions // group), x.dtype)
        mean, square = (lax.batch_matmul(row, part)[:, 0] for part in added)
    mean, square = mean / positions, square / positions
    return mean + middle[:, 0], jnp.maximum(square - jnp.square(mean), 0)


@sample_moments.defjvp
def _sample_moments_jvp(x: tuple[jax.Array], dx: tuple[jax.Array]) -> tuple[Moments, Moments]:
    mean, var = sample_moments(*x)
    change = 2 * (x[0] - mean[:, None]) * dx[0]  # the change of the mean cancels
    # For the backward pass, where each position would otherwise compute its share again.
    return (mean, var), computed_once((dx[0].mean(1), change.mean(1)))


def _group(positions: int) -> int:
    """The number of neighbours added to each other, a divisor of the number of positions."""
    if positions <= _AT_ONCE:
        return positions
    return max(n for n in range(1, _NEIGHBOURS + 1) if positions % n == 0)


@jax.custom_jvp
def _sample_scaled(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """(x - mean) * factor + bias of x f[B, ..., C]; mean, factor f[B, 1, ..., C], bias f[C]."""
    return (x - mean) * factor + bias


@_sample_scaled.defjvp
def _sample_scaled_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    x, mean, factor, _ = primals
    dx, dmean, dfactor, dbias = tangents
    dmean, dfactor = (_spread(d, x) for d in (dmean, dfactor))
    return _sample_scaled(*primals), (dx - dmean) * factor + (x - mean) * dfactor + dbias


def _spread(values: jax.Array, x: jax.Array) -> jax.Array:
    """Repeats f[B, 1, ..., C] at all positions of x f[B, ..., C]."""
    # Reverse mode runs its transpose, which is the fast sum of `sample_moments_on_cpu`.
    samples, channels = x.shape[0], x.shape[-1]
    positions = x.size // max(1, samples * channels)
    group = _group(positions)
    row = jnp.ones((samples, positions // group, 1), values.dtype)
    rows = lax.batch_matmul(row, computed_once(values.reshape(samples, 1, channels)))
    return jnp.stack([rows] * group, axis=2).reshape(x.shape)
