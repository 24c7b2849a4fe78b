"""MixStyle (Zhou et al., ICLR 2021): every sample's style mixed with another's of its batch."""

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Above0, UpTo1, bounded
from fedjax_bn.normalization.instance import (
    deviation,
    handed_over,
    instance_moments,
    moments_of_all,
)
from fedjax_bn.normalization.layer import (
    Layer,
    Statistics,
    StatisticsRule,
    is_spatial,
    key_for,
    moments,
)
from fedjax_bn.normalization.mixig import mix_statistics


@bounded
def mixstyle_statistics(
    key: jax.Array, *, concentration: Above0 = 0.1, probability: UpTo1 = 0.5
) -> StatisticsRule:
    """The rule that normalizes MixStyle(x) with the batch statistics of MixStyle(x).

    MixStyle(x) = std_mix (x - mean_i) / std_i + mean_mix, where mean_mix and std_mix are lambda of
    sample i plus 1 - lambda of another one, lambda ~ Beta(a, a) a sample; no gradient passes
    through them. Normalizing it with mean m and deviation s is normalizing x with
    mean_i - (mean_mix - m) std_i / std_mix and s std_i / std_mix.

    Differs from the paper: it stands before every spatial batch norm, in the place of MixIG
    (FedIG, Table 3b), not after chosen blocks. Running statistics are not moved.

    Args:
      key: random key of this pass.
      concentration: a, above 0.
      probability: chance that a layer mixes, in [0, 1].
    """

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if not is_spatial(x):
            return Statistics(*moments(x, valid)[:2])
        own_mean, own_var = instance_moments(x)
        own = jax.lax.stop_gradient((own_mean, deviation(own_var, layer.epsilon)))
        keys = jax.random.split(key_for(layer, key), 3)
        other = _partners(keys[0], x.shape[0], valid)
        shape = (x.shape[0], 1)
        weight = jax.random.beta(keys[1], concentration, concentration, shape, own_mean.dtype)
        weight = jnp.where(jax.random.bernoulli(keys[2], probability), weight, 1)
        mean, std = mix_statistics(own, (own[0][other], own[1][other]), weight)

        # Moments of the whole restyled batch, from those of its samples.
        shrink = own[1] / std
        restyled = (own_mean - own[0]) / shrink + mean, own_var / jnp.square(shrink)
        batch_mean, batch_var, _ = moments_of_all(*restyled, valid=valid)
        batch_std = deviation(batch_var, layer.epsilon)
        return handed_over(own[0] - (mean - batch_mean) * shrink, batch_std * shrink, layer, x)

    return rule


def _partners(key: jax.Array, size: int, valid: jax.Array | None) -> jax.Array:
    """Another sample for each, i32[size], by a permutation; itself where that one is padding."""
    other = jax.random.permutation(key, size)
    return other if valid is None else jnp.where(valid[other], other, jnp.arange(size))
