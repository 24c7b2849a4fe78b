"""Statistics of single samples, and standard deviations in place of variances."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.backend import on_cpu
from fedjax_bn.dtypes import promote
from fedjax_bn.normalization.layer import Layer, Statistics

Pair = tuple[jax.Array, jax.Array]  # mean and variance, or mean and standard deviation


def instance_moments(x: jax.Array) -> Pair:
    """Mean and biased variance of every sample and channel over its positions.

    Args:
      x: f[B, ..., C].

    Returns:
      mean and variance, f[B, C] each, in at least float32.
    """
    return _moments(x.reshape(x.shape[0], -1, x.shape[-1]).astype(promote(x.dtype, jnp.float32)))


@jax.custom_jvp
def _moments(x: jax.Array) -> Pair:
    """Mean and biased variance over the positions, f[B, P, C] -> f[B, C] each."""
    if on_cpu():
        return _moments_on_cpu(x)
    mean = x.mean(1)
    return mean, jnp.square(x - mean[:, None]).mean(1)


def _moments_on_cpu(x: jax.Array) -> Pair:
    """The same; XLA:CPU is slow at sums over a middle axis.

    Neighbours are added up first: distances to one of the values, which is within sqrt(positions)
    deviations of the mean, so that E[d^2] - E[d]^2 loses little, and their squares. Products with a
    constant row sum what is left.
    """
    samples, positions, _ = x.shape
    middle = x[:, positions // 2 :][:, :1]
    group = positions if positions <= 16 else max(n for n in range(1, 9) if positions % n == 0)
    grouped = x.reshape(samples, positions // group, group, -1)
    distances = [grouped[:, :, i] - middle for i in range(group)]
    sums: Any = sum(distances), sum(map(jnp.square, distances))
    first, second = sums
    if group == positions:
        # Else they would be summed anew for every position that the mean normalizes.
        first, second = lax.optimization_barrier((first[:, 0], second[:, 0]))
    else:
        row = jnp.ones((samples, 1, positions // group), x.dtype)
        first, second = (lax.batch_matmul(row, part)[:, 0] for part in (first, second))
    first, second = first / positions, second / positions
    return first + middle[:, 0], jnp.maximum(second - jnp.square(first), 0)


@_moments.defjvp
def _moments_jvp(x: tuple[jax.Array], dx: tuple[jax.Array]) -> tuple[Pair, Pair]:
    mean, var = _moments(*x)
    change = 2 * (x[0] - mean[:, None]) * dx[0]  # the mean's own change adds up to 0
    return (mean, var), (dx[0].mean(1), change.mean(1))


def deviation(var: jax.Array, epsilon: float) -> jax.Array:
    """sqrt(var + epsilon), what a batch norm divides by."""
    return jnp.sqrt(var + epsilon)


def handed_over(mean: jax.Array, std: jax.Array, layer: Layer, x: jax.Array) -> Statistics:
    """What a rule returns so that `layer` computes (x - mean) / std.

    Args:
      mean: f[B, C], one of each sample.
      std: f[B, C]; below sqrt(epsilon), where no variance leads, it is sqrt(epsilon).
      layer: the layer, whose epsilon counts.
      x: f[B, ..., C], what it normalizes.

    Returns:
      mean and variance f[B, 1, ..., C].
    """
    var = jnp.maximum(jnp.square(jnp.maximum(std, 0)) - layer.epsilon, 0)
    return Statistics(positioned(mean, x), positioned(var, x))


def positioned(statistic: jax.Array, x: jax.Array) -> jax.Array:
    """f[B, C] -> f[B, 1, ..., C], which broadcasts against `x` f[B, ..., C]."""
    return statistic.reshape(x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])


def running_deviation(layer: Layer) -> Pair:
    """The layer's running mean and standard deviation, f[C] each, in at least float32."""
    mean, var = (leaf.astype(promote(leaf.dtype, jnp.float32)) for leaf in (layer.mean, layer.var))
    return mean, deviation(var, layer.epsilon)


def instance_deviation(layer: Layer, x: jax.Array) -> Pair:
    """Mean and standard deviation of every sample of `x`, f[B, C] each."""
    mean, var = instance_moments(x)
    return mean, deviation(var, layer.epsilon)
