"""MixIG (FedIG, Eq. 3): every sample's statistics, mixed with the received global ones."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.engine.backend import computed_once
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.normalization.instance import Pair, deviations, handed_over
from fedjax_bn.normalization.layer import (
    Layer,
    Statistics,
    StatisticsRule,
    is_spatial,
    key_for,
    moments,
)

# draw(key, shape, dtype) -> u of that shape
Draw = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


def mix_statistics(instance: Pair, global_: Pair, u: jax.Array) -> Pair:
    """Returns u mean_i + (1 - u) mean_G and u std_i + (1 - u) std_G (FedIG, Eq. 3 and 7).

    Args:
      instance: mean and standard deviation of each sample, f[B, C].
      global_: mean and standard deviation of the global model, f[C].
      u: weight of the instance, f[C], or f[B, 1] for one of each sample.

    Returns:
      mean and standard deviation, f[B, C].
    """
    dtype = promote(*(array.dtype for array in (*instance, *global_)))
    u = jnp.asarray(u, dtype)
    pairs = zip(instance, global_, strict=True)
    mean, std = (u * one.astype(dtype) + (1 - u) * all_.astype(dtype) for one, all_ in pairs)
    return mean, std


def uniform(low: float = 0.0, high: float = 1.0) -> Draw:
    """Draws u ~ U(low, high) for each channel; beyond [0, 1] it extrapolates (FedIG, Table 6).

    Raises:
      ValueError: low is above high.
    """
    if low > high:
        raise ValueError(f"uniform: low={low:g} must be at most high={high:g}")

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, low, high)

    return draw


def constant(u: float) -> Draw:
    """Takes one u for all channels (FedIG, Table 1): 0 global, 1 instance, 0.5 both."""

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del key
        return jnp.full(shape, u, dtype)

    return draw


def mixed_statistics(key: jax.Array, draw: Draw | None = None) -> StatisticsRule:
    """Returns the rule of the augmented pass: Eq. 3 with one vector u f[C] a layer and batch.

    The layer's running statistics are taken as the global ones, so the model must be applied with
    the received `batch_stats`. A layer without spatial axes normalizes with the batch's own
    statistics, as in the local pass. Running statistics are not moved.

    Args:
      key: random key of this pass.
      draw: distribution of u, U(0, 1) by default.
    """
    draw = draw or uniform()

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if not is_spatial(x):
            return Statistics(*moments(x, valid)[:2])
        instance, received = deviations(layer, x)
        u = computed_once(draw(key_for(layer, key), x.shape[-1:], instance[0].dtype))
        mean, std = mix_statistics(instance, received, u)
        return handed_over(mean, std, layer, x)

    return rule
