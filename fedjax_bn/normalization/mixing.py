"""The rules of FedIG's second pass, by the text of a configuration; MixStyle is one of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.choices import read_choice
from fedjax_bn.arguments.ranges import Above0, UpTo1, bounded
from fedjax_bn.arguments.text import brief
from fedjax_bn.normalization.instance import handed_over, instance_moments, moments_of_all
from fedjax_bn.normalization.layer import (
    Layer,
    Statistics,
    StatisticsRule,
    is_spatial,
    key_for,
    moments,
)
from fedjax_bn.normalization.mixig import constant, mix_statistics, mixed_statistics, uniform

# mixing(key) -> the rule of one pass
Mixing = Callable[[jax.Array], StatisticsRule]


@bounded
def mixstyle_statistics(
    key: jax.Array, *, concentration: Above0 = 0.1, probability: UpTo1 = 0.5
) -> StatisticsRule:
    """Returns the rule that normalizes MixStyle(x) with the batch statistics of MixStyle(x).

    MixStyle(x) = std_mix (x - mean_i) / std_i + mean_mix (Zhou et al., ICLR 2021), where mean_mix
    and std_mix are lambda of sample i plus 1 - lambda of another one, lambda ~ Beta(a, a) a sample;
    no gradient passes through them. To normalize it with mean m and deviation s is to normalize x
    with mean_i - (mean_mix - m) std_i / std_mix and s std_i / std_mix.

    Differs from the paper: it is used before every spatial batch norm, instead of MixIG (FedIG,
    Table 3b), not after chosen blocks. Running statistics are not moved.

    Args:
      key: random key of this pass.
      concentration: a, above 0.
      probability: chance that a layer mixes, in [0, 1].
    """

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if not is_spatial(x):
            return Statistics(*moments(x, valid)[:2])
        own_mean, own_var = instance_moments(x)
        own = jax.lax.stop_gradient((own_mean, jnp.sqrt(own_var + layer.epsilon)))
        keys = jax.random.split(key_for(layer, key), 3)
        other = jax.random.permutation(keys[0], x.shape[0])
        if valid is not None:  # a sample whose partner is padding keeps its own style
            other = jnp.where(valid[other], other, jnp.arange(x.shape[0]))
        shape = (x.shape[0], 1)
        weight = jax.random.beta(keys[1], concentration, concentration, shape, own_mean.dtype)
        weight = jnp.where(jax.random.bernoulli(keys[2], probability), weight, 1)
        mean, std = mix_statistics(own, (own[0][other], own[1][other]), weight)

        # Moments of the whole restyled batch, from those of its samples.
        shrink = own[1] / std
        restyled = (own_mean - own[0]) / shrink + mean, own_var / jnp.square(shrink)
        batch_mean, batch_var, _ = moments_of_all(*restyled, valid=valid)
        batch_std = jnp.sqrt(batch_var + layer.epsilon)
        return handed_over(own[0] - (mean - batch_mean) * shrink, batch_std * shrink, layer, x)

    return rule


_DRAWS: dict[str, Callable[..., Any]] = {"uniform": uniform, "constant": constant}


def choose_mixing(text: str) -> Mixing:
    """Builds the rule that a text such as `uniform:low=0:high=0.5` or `mixstyle` names.

    `uniform` and `constant` are MixIG with u ~ U(low, high) and with one u (FedIG, Tables 1 and 6),
    `mixstyle` is MixStyle instead (Table 3b), `package.module:function` is a function
    `(key, *, ...) -> StatisticsRule` of one's own.

    Raises:
      ValueError: an unknown name or key, or a value of the wrong type; it lists the valid ones.
    """
    known = _DRAWS | {"mixstyle": mixstyle_statistics}
    make, options = read_choice(f"mixing {brief(text)}", text, known)
    if make in _DRAWS.values():
        return partial(mixed_statistics, draw=make(**options))
    return partial(make, **options)
