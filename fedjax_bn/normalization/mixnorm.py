"""MixNorm (Hu et al. 2021): a sample's statistics estimated over augmented views of it."""

import jax
import jax.numpy as jnp

from fedjax_bn.normalization.instance import positioned
from fedjax_bn.normalization.layer import (
    Layer,
    Statistics,
    StatisticsRule,
    is_spatial,
    moments,
)


def view_statistics(views: int, weight: float = 0.05) -> StatisticsRule:
    """m of the views' own statistics plus 1 - m of the running ones, mean and variance.

    The batch holds all first views, then all second ones, and so on; every sample is normalized
    with the moments over the positions of all its views.

    Differs from the paper: the running statistics do not move with the stream, so that samples are
    independent of each other, as FedIG's comparison (Table 3c) needs.

    Args:
      views: number V of views of each sample, the original among them; B is a multiple of it.
      weight: m, weight of the sample's own statistics, in [0, 1].
    """

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        del valid
        mean, var = layer.mean, layer.var
        if not is_spatial(x):
            return Statistics(mean, var)
        samples = x.reshape(views, -1, *x.shape[1:]).swapaxes(0, 1)
        own_mean, own_var, _ = jax.vmap(moments)(samples)
        mean = weight * own_mean + (1 - weight) * mean.astype(own_mean.dtype)
        var = weight * own_var + (1 - weight) * var.astype(own_var.dtype)
        mean, var = (positioned(jnp.tile(value, (views, 1)), x) for value in (mean, var))
        return Statistics(mean, var)

    return rule
