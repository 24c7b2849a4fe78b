"""Takes running statistics anew for the weights with which a client is tested (PreciseBN).

Running statistics belong to the weights before aggregation. Precise ones (Wu & Johnson 2021,
*Rethinking "Batch" in BatchNorm*, Section 3.1) are of one moving pass over the client's samples, in
which each batch is normalized by itself: the exact mean and variance of all inputs of a batch norm.
If one batch holds all samples, the result is that of a pass for each layer.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Samples, bounded
from fedjax_bn.models.forward import forward
from fedjax_bn.models.hooks import predicting
from fedjax_bn.normalization import Layer, Statistics, StatisticsRule
from fedjax_bn.normalization.layer import moments, statistics_of
from fedjax_bn.sharing import FROZEN, STATISTICS, Variables, batch_norm_paths, complete


class Pooled(NamedTuple):
    """Moments of the samples so far."""

    statistics: Variables  # as `batch_stats`, of biased variances; None for frozen leaves
    samples: jax.Array  # f[], their number


def no_samples(variables: Variables) -> Pooled:
    """Returns the moments of no samples: zeros for each running statistic that is not frozen."""
    zeros = jax.tree.map(jnp.zeros_like, predicting(variables)[STATISTICS])
    return Pooled(zeros, jnp.zeros((), jnp.result_type(float)))


def pool(
    model: Any,
    variables: Variables,
    pooled: Pooled,
    images: jax.Array,
    valid: jax.Array | None = None,
    *,
    statistics: StatisticsRule | None = None,
) -> Pooled:
    """Adds a batch f[B, ...] to the moments, of which bool[B] `valid` count (None for all).

    `statistics` is the rule of the method's clients, which here reads the batch's moments.
    """
    variables = predicting(variables)
    fixed = batch_norm_paths(variables.get(FROZEN) or {})
    batch_count = jnp.asarray(len(images) if valid is None else valid.sum(), pooled.samples.dtype)
    count = pooled.samples + batch_count
    share = batch_count / jnp.maximum(count, 1)
    of_batch = batch_rule(statistics)

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if layer.path in fixed:
            return statistics_of(statistics, layer._replace(training=False), x, valid)
        mean, var, _ = moments(x, valid, layer.columns)
        gap = mean - layer.mean
        pooled_mean = layer.mean + share * gap
        # The variance within both parts, and between their means (Chan, Golub & LeVeque 1979).
        pooled_var = layer.var + share * (var - layer.var + (1 - share) * jnp.square(gap))
        moved = pooled_mean.astype(layer.mean.dtype), pooled_var.astype(layer.var.dtype)
        return of_batch(layer, x, valid)._replace(moved=moved)

    # Running statistics hold the pooled ones here, and the pass moves them.
    pooling = {**variables, STATISTICS: pooled.statistics}
    output = forward(model, pooling, images, statistics=rule, valid=valid, wanted=["moved"])
    return Pooled(output.moved[STATISTICS], count)


_pool = jax.jit(pool, static_argnames=("model", "statistics"))


@cache  # one object for each rule, because compiled programs are found by it
def batch_rule(statistics: StatisticsRule | None) -> StatisticsRule:
    """Returns a rule of prediction that reads the moments of the batch instead of running ones."""

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        mean, var, _ = moments(x, valid, layer.columns)
        layer = layer._replace(mean=mean, var=var, training=False)
        return statistics_of(statistics, layer, x, valid)._replace(moved=None)

    return rule


@bounded
def precise_statistics(
    model: Any,
    variables: Variables,
    images: jax.Array,
    *,
    batch_size: Samples = 500,
    statistics: StatisticsRule | None = None,
) -> Variables:
    """Returns precise `batch_stats` of a client's model, `client_variables(state, k)`.

    Args:
      images: f[N, ...], the client's samples, prepared as the model expects and in random order.
      batch_size: samples of a batch; the last one may have fewer.
      statistics: the method's rule, `FederatedMethod.statistics`.

    Raises:
      ValueError: the model has no batch norm, or one that no rule reaches.
    """
    pooled = no_samples(variables)
    for i in range(0, len(images), batch_size):
        batch = images[i : i + batch_size]
        pooled = _pool(model, variables, pooled, batch, statistics=statistics)
    frozen = {FROZEN: variables.get(FROZEN) or ()}
    return complete({STATISTICS: pooled.statistics} | frozen)[STATISTICS]
