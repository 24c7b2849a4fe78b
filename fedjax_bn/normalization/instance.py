"""Statistics of single samples, and standard deviations instead of variances."""

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.normalization.cpu import sample_moments
from fedjax_bn.normalization.layer import Layer, Statistics, moments

Pair = tuple[jax.Array, jax.Array]  # mean and variance, or mean and standard deviation


def instance_moments(x: jax.Array) -> Pair:
    """Returns mean and biased variance of every sample and channel over its positions.

    Args:
      x: f[B, ..., C].

    Returns:
      mean and variance, f[B, C] each, in at least float32.
    """
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    return sample_moments(x.astype(promote(x.dtype, jnp.float32)))


def deviations(layer: Layer, x: jax.Array) -> tuple[Pair, Pair]:
    """Returns mean and deviation sqrt(var + epsilon) of every sample of `x`, and the running ones.

    Args:
      layer: its running statistics and epsilon count.
      x: f[B, ..., C].

    Returns:
      two pairs, of f[B, C] each and of f[C] each, in at least float32.
    """
    (own_mean, own_var), running = instance_moments(x), (layer.mean, layer.var)
    mean, var = (leaf.astype(promote(leaf.dtype, jnp.float32)) for leaf in running)
    return (own_mean, jnp.sqrt(own_var + layer.epsilon)), (mean, jnp.sqrt(var + layer.epsilon))


def moments_of_all(
    mean: jax.Array, var: jax.Array, positions: int = 1, valid: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `moments` of a batch from those of its samples, whose maps are not read again.

    Args:
      mean: f[B, C], of each sample.
      var: f[B, C], biased.
      positions: how many values of a sample and channel they are taken over.
      valid: bool[B], the samples that count; None for all.
    """
    mean, between, count = moments(mean, valid)
    return mean, moments(var, valid)[0] + between, count * positions


def handed_over(mean: jax.Array, std: jax.Array, layer: Layer, x: jax.Array) -> Statistics:
    """Returns the statistics by which `layer` computes (x - mean) / std.

    Args:
      mean: f[B, C], one of each sample.
      std: f[B, C]; below sqrt(epsilon), which no variance gives, it is taken as sqrt(epsilon).
      layer: the layer, whose epsilon counts.
      x: f[B, ..., C], what it normalizes.

    Returns:
      mean and variance f[B, 1, ..., C].
    """
    # Extrapolated deviations may be negative, and their squares would be positive again.
    var = jnp.maximum(jnp.square(jnp.maximum(std, 0)) - layer.epsilon, 0)
    return Statistics(positioned(mean, x), positioned(var, x))


def positioned(statistic: jax.Array, x: jax.Array) -> jax.Array:
    """Returns f[B, C] as f[B, 1, ..., C], which broadcasts against `x` f[B, ..., C]."""
    return statistic.reshape(x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])
