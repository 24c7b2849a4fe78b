"""IABN of NOTE (Gong et al., NeurIPS 2022): learned statistics, corrected where they surprise."""

import jax
import jax.numpy as jnp

from fedjax_bn.normalization.instance import instance_moments, positioned
from fedjax_bn.normalization.layer import Layer, Statistics, StatisticsRule, is_spatial


def _soft_shrinkage(x: jax.Array, threshold: jax.Array) -> jax.Array:
    """sign(x) max(|x| - threshold, 0), elementwise."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0)


def instance_aware_statistics(strength: float = 4.0) -> StatisticsRule:
    """mean + psi(mean_i - mean; k s_mean) and likewise the variance (NOTE, Section 3.1).

    psi is soft shrinkage; s_mean = sqrt(var / n) and s_var = var sqrt(2 / (n - 1)) are the standard
    errors of a sample's mean and unbiased variance over its n positions. A layer without spatial
    axes, or with one position, keeps the running statistics.

    Args:
      strength: k, how many standard errors are believed to be chance; at least 0.
    """

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        del valid
        mean, var = layer.mean, layer.var
        n = x[0, ..., 0].size
        if not is_spatial(x) or n == 1:
            return Statistics(mean, var)
        own_mean, own_var = instance_moments(x)
        own_var = own_var * (n / (n - 1))
        mean, var = mean.astype(own_mean.dtype), var.astype(own_var.dtype)
        floor = var + layer.epsilon
        mean = mean + _soft_shrinkage(own_mean - mean, strength * jnp.sqrt(floor / n))
        var = var + _soft_shrinkage(own_var - var, strength * floor * (2 / (n - 1)) ** 0.5)
        return Statistics(positioned(mean, x), positioned(jnp.maximum(var, 0), x))

    return rule
