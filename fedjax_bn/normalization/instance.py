"""Computes statistics of single samples, and converts between deviations and variances."""

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.packed_columns import pack, unpacked_moments
from fedjax_bn.normalization.arithmetic import sample_moments
from fedjax_bn.normalization.layer import Layer, Statistics, moments

Pair = tuple[jax.Array, jax.Array]  # mean and variance, or mean and standard deviation


def instance_moments(x: jax.Array, columns: int = 1) -> Pair:
    """Returns mean and biased variance over the positions of each sample of x f[B, ..., C].

    They are f[B, C] in at least float32; `columns` as in `BatchNorm`.
    """
    x = pack(x, columns)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    return unpacked_moments(*sample_moments(x.astype(promote(x.dtype, jnp.float32))), columns)


def deviations(layer: Layer, x: jax.Array) -> tuple[Pair, Pair]:
    """Returns mean and deviation sqrt(var + epsilon) of every sample of x, and the running ones.

    Each is a pair, f[B, C] for the samples and f[C] for the layer, in at least float32.
    """
    own_mean, own_var = instance_moments(x, layer.columns)
    running = layer.mean, layer.var
    mean, var = (leaf.astype(promote(leaf.dtype, jnp.float32)) for leaf in running)
    return (own_mean, jnp.sqrt(own_var + layer.epsilon)), (mean, jnp.sqrt(var + layer.epsilon))


def moments_of_all(
    mean: jax.Array, var: jax.Array, positions: int = 1, valid: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the `moments` of a batch from those of its samples f[B, C], without its maps.

    `positions` is the number of values per sample and channel.
    """
    mean, between, count = moments(mean, valid)
    return mean, moments(var, valid)[0] + between, count * positions


def handed_over(mean: jax.Array, std: jax.Array, layer: Layer, x: jax.Array) -> Statistics:
    """Returns the statistics f[B, 1, ..., C] with which `layer` computes (x - mean) / std.

    Mean and std are f[B, C]; a std below sqrt(epsilon) counts as sqrt(epsilon).
    """
    # Extrapolated deviations may be negative, and a square would hide the sign.
    var = jnp.maximum(jnp.square(jnp.maximum(std, 0)) - layer.epsilon, 0)
    return Statistics(positioned(mean, x), positioned(var, x))


def positioned(statistic: jax.Array, x: jax.Array) -> jax.Array:
    """Reshapes f[B, C] to f[B, 1, ..., C], which broadcasts against `x` f[B, ..., C]."""
    return statistic.reshape(x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])
