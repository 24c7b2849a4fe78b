"""Statistics of single samples, and standard deviations in place of variances."""

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.normalization import per_sample
from fedjax_bn.normalization.layer import Layer, Statistics, moments

Pair = tuple[jax.Array, jax.Array]  # mean and variance, or mean and standard deviation


def instance_moments(x: jax.Array) -> Pair:
    """Mean and biased variance of every sample and channel over its positions.

    Args:
      x: f[B, ..., C].

    Returns:
      mean and variance, f[B, C] each, in at least float32.
    """
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    return per_sample.moments(x.astype(promote(x.dtype, jnp.float32)))


def moments_of_all(
    mean: jax.Array, var: jax.Array, positions: int = 1, valid: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`moments` of a batch from those of its samples, whose maps are not read again.

    Args:
      mean: f[B, C], of each sample.
      var: f[B, C], biased.
      positions: number of values behind each.
      valid: bool[B], the samples that count; None for all.
    """
    mean, between, count = moments(mean, valid)
    return mean, moments(var, valid)[0] + between, count * positions


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
