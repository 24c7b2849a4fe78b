"""The rules of FedIG's second pass: MixIG (Eq. 3), or MixStyle instead (Table 3b).

MixIG mixes every sample's statistics with the received global ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.choices import read_choice
from fedjax_bn.arguments.ranges import Above0, UpTo1, bounded
from fedjax_bn.arguments.text import brief
from fedjax_bn.engine.backend import computed_once
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.normalization.instance import (
    Pair,
    deviations,
    handed_over,
    instance_moments,
    moments_of_all,
)
from fedjax_bn.normalization.layer import Layer, Statistics, StatisticsRule, is_spatial, moments

# draw(key, shape, dtype) -> u of this shape
Draw = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
# mixing(key) -> the rule for one pass
Mixing = Callable[[jax.Array], StatisticsRule]


def mix_statistics(instance: Pair, global_: Pair, u: jax.Array) -> Pair:
    """Returns u mean_i + (1 - u) mean_G and u std_i + (1 - u) std_G (FedIG, Eq. 3 and 7).

    Args:
      instance: mean and standard deviation of each sample, f[B, C].
      global_: mean and standard deviation of the global model, f[C].
      u: weight of the instance, f[C], or f[B, 1] for one weight per sample.
    """
    dtype = promote(*(array.dtype for array in (*instance, *global_)))
    u = jnp.asarray(u, dtype)

    def mixed(own: jax.Array, received: jax.Array) -> jax.Array:
        return u * own.astype(dtype) + (1 - u) * received.astype(dtype)

    return mixed(instance[0], global_[0]), mixed(instance[1], global_[1])


def _uniform(low: float = 0.0, high: float = 1.0) -> Draw:
    """Draws u ~ U(low, high) for each channel; outside [0, 1] u extrapolates (FedIG, Table 6)."""
    if low > high:
        raise ValueError(f"uniform: low={low:g} must be at most high={high:g}")

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, low, high)

    return draw


def _constant(u: float) -> Draw:
    """Uses one u for all channels (FedIG, Table 1): 0 is global, 1 instance, 0.5 their mean."""
    return lambda key, shape, dtype: jnp.full(shape, u, dtype)


def mixed_statistics(key: jax.Array, draw: Draw | None = None) -> StatisticsRule:
    """Returns the rule of the augmented pass: Eq. 3 with one vector u f[C] per layer and batch.

    The layer's running statistics serve as the global ones, so the model must be applied with the
    received `batch_stats`. A layer without spatial axes normalizes by the batch's own statistics,
    as in the local pass. Running statistics do not move. `draw` is uniform in [0, 1] by default.
    """
    draw = draw or _uniform()

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if not is_spatial(x):
            return Statistics(*moments(x, valid)[:2])
        instance, received = deviations(layer, x)
        # Otherwise XLA:CPU would draw again in each loop that reads u.
        u = computed_once(draw(layer.key(key), x.shape[-1:], instance[0].dtype))
        mean, std = mix_statistics(instance, received, u)
        return handed_over(mean, std, layer, x)

    return rule


@bounded
def _mixstyle_statistics(
    key: jax.Array, *, concentration: Above0 = 0.1, probability: UpTo1 = 0.5
) -> StatisticsRule:
    """Returns the rule that normalizes MixStyle(x) with the batch statistics of MixStyle(x).

    MixStyle(x) = std_mix (x - mean_i) / std_i + mean_mix (see `contrib.mixstyle`). It acts before
    every spatial batch norm, instead of MixIG (FedIG, Table 3b), not after selected blocks.
    `concentration` is that of the weights, and `probability` that of a layer to mix.
    """

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if not is_spatial(x):
            return Statistics(*moments(x, valid)[:2])
        own_mean, own_var = instance_moments(x, layer.columns)
        style = jax.lax.stop_gradient((own_mean, jnp.sqrt(own_var + layer.epsilon)))
        # By the layer's name, so that a layer draws the same wherever it is called.
        keys = jax.random.split(layer.key(key), 3)
        partner = jax.random.permutation(keys[0], x.shape[0])
        if valid is not None:  # a sample whose partner is padding keeps its own style
            partner = jnp.where(valid[partner], partner, jnp.arange(x.shape[0]))
        shape = (x.shape[0], 1)
        weight = jax.random.beta(keys[1], concentration, concentration, shape, own_mean.dtype)
        # Weight 1 keeps the sample's own style.
        weight = jnp.where(jax.random.bernoulli(keys[2], probability), weight, 1)
        mean, std = mix_statistics(style, (style[0][partner], style[1][partner]), weight)

        # The moments of the restyled batch follow from the moments of its samples.
        shrink = style[1] / std
        restyled = (own_mean - style[0]) / shrink + mean, own_var / jnp.square(shrink)
        batch_mean, batch_var, _ = moments_of_all(*restyled, valid=valid)
        batch_std = jnp.sqrt(batch_var + layer.epsilon)
        return handed_over(style[0] - (mean - batch_mean) * shrink, batch_std * shrink, layer, x)

    return rule


def choose_mixing(choice: str) -> Mixing:
    """Builds the rule that a text such as `uniform:low=0:high=0.5` or `mixstyle` names.

    `uniform` is MixIG with u ~ U(low, high), and `constant` is MixIG with a fixed u (FedIG, Tables
    6 and 1). `mixstyle` is MixStyle instead (Table 3b). `package.module:function` is the user's own
    function `(key, *, ...) -> StatisticsRule`. Another text raises ValueError.
    """
    draws: dict[str, Callable[..., Any]] = {"uniform": _uniform, "constant": _constant}
    makers = draws | {"mixstyle": _mixstyle_statistics}
    make, options = read_choice(f"mixing {brief(choice)}", choice, makers)
    if make in draws.values():
        return partial(mixed_statistics, draw=make(**options))
    return partial(make, **options)
