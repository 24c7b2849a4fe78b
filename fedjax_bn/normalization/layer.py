"""The arrays of a batch norm that statistics rules receive, independent of any framework.

A *statistics rule* is a function `rule(layer, x, valid) -> Statistics`. This module has two rules,
for batch and running statistics; the rule of each paper is in its own file. A rule is pure: it
returns the values that it moves or records, and the module that applies the rule stores them. So
the same rule works for our `BatchNorm`, flax's `nn.BatchNorm` and `nnx.BatchNorm` (see `calls`). A
rule that neither moves nor records may return a plain pair.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.engine.backend import computed_once, on_cpu
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.packed_columns import pack, repeated, unpack, unpacked_moments
from fedjax_bn.normalization.arithmetic import channel_moments, scaled

RECORDED = "recorded"  # the collection of the values that rules record


class Layer(NamedTuple):
    """One batch norm in one pass.

    Attributes:
      path: the names of the modules that lead to the layer, such as ("layer1_0", "norm1").
      mean: running mean f[C].
      var: running variance f[C].
      epsilon, momentum, unbiased, columns: as in `BatchNorm`.
      training: whether this pass may move the running statistics.
      gate: f[C], the gate of batch-instance normalization, or None.
    """

    path: tuple[str, ...]
    mean: jax.Array
    var: jax.Array
    epsilon: float
    momentum: float
    training: bool
    unbiased: bool = True
    gate: jax.Array | None = None
    columns: int = 1

    @property
    def name(self) -> str:
        """The path as one string, such as `layer1_0/norm1`."""
        return "/".join(self.path)

    def key(self, key: jax.Array) -> jax.Array:
        """Returns a random key for this layer, which depends on its name, not on other calls."""
        return jax.random.fold_in(key, zlib.crc32(self.name.encode()))


class Statistics(NamedTuple):
    """The result of a statistics rule.

    Attributes:
      mean: f[C], or an array that broadcasts against x f[B, ..., C].
      var: likewise.
      moved: the new running mean and variance f[C], stored in a pass that may move them; None to
        leave them unchanged.
      recorded: name -> array, returned to callers that request the collection `recorded`; or None.
    """

    mean: jax.Array
    var: jax.Array
    moved: tuple[jax.Array, jax.Array] | None = None
    recorded: Mapping[str, jax.Array] | None = None

    def by_channel(self, x: jax.Array) -> bool:
        """Whether each channel of x f[..., C], or of a sample of it, has a mean and a variance."""
        pair = (self.mean.shape, self.var.shape)
        return all(form[-1:] == x.shape[-1:] and set(form[1:-1]) <= {1} for form in pair)


StatisticsRule = Callable[[Layer, jax.Array, jax.Array | None], Statistics]


def running_statistics(layer: Layer, x: jax.Array, valid: jax.Array | None = None) -> Statistics:
    """Returns the layer's running mean and variance, f[C] each; this is the usual rule at test."""
    return Statistics(layer.mean, layer.var)


def batch_statistics(layer: Layer, x: jax.Array, valid: jax.Array | None = None) -> Statistics:
    """Returns mean and biased variance of the batch, f[C] each; moves the running statistics."""
    return moving(layer, *moments(x, valid, layer.columns))


def moving(layer: Layer, mean: jax.Array, var: jax.Array, count: jax.Array) -> Statistics:
    """Returns the result of `batch_statistics` for a batch with these `moments`."""
    # As in PyTorch: the biased variance normalizes, but the running variance is unbiased. Of one
    # value the factor would be 1 / 0; its variance is 0.
    spread = var * (count / jnp.maximum(count - 1, 1)) if layer.unbiased else var

    def moved(tracked: jax.Array, of_batch: jax.Array) -> jax.Array:
        return layer.momentum * tracked + (1 - layer.momentum) * of_batch.astype(tracked.dtype)

    pair = (moved(layer.mean, mean), moved(layer.var, spread))
    return Statistics(mean, var, pair if layer.training else None)


def statistics_of(
    rule: StatisticsRule | None, layer: Layer, x: jax.Array, valid: jax.Array | None
) -> Statistics:
    """Applies a rule; None means `batch_statistics` in training, else `running_statistics`."""
    if rule is None:
        rule = batch_statistics if layer.training else running_statistics
    return Statistics(*rule(layer, x, valid))


def normalize(
    x: jax.Array,
    statistics: Statistics,
    epsilon: float,
    scale: jax.Array | None,
    bias: jax.Array | None,
    columns: int = 1,
) -> jax.Array:
    """Returns scale * (x - mean) / sqrt(var + epsilon) + bias, in the common dtype of x and mean.

    x is f[B, ..., C]; scale and bias are f[C] or None; `columns` as in `BatchNorm`.
    """
    mean, var = statistics.mean, statistics.var
    dtype = promote(x.dtype, mean.dtype)
    factor = jax.lax.rsqrt(var.astype(dtype) + jnp.asarray(epsilon, dtype))
    if scale is not None:
        factor = factor * scale.astype(dtype)
    mean, factor = computed_once((mean.astype(dtype), factor))
    offset = jnp.zeros(x.shape[-1], dtype) if bias is None else bias.astype(dtype)
    if not statistics.by_channel(x):
        columns = 1  # statistics of positions
    mean, factor, offset = (repeated(statistic, columns) for statistic in (mean, factor, offset))
    x = pack(x, columns).astype(dtype)
    return unpack(scaled(x, mean, factor, offset, bias is not None), columns)


def moments(
    x: jax.Array, valid: jax.Array | None = None, columns: int = 1
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns mean, biased variance and count over all axes but the last.

    Args:
      x: f[B, ..., C].
      valid: bool[B], the samples that count; None for all.
      columns: as in `BatchNorm`.

    Returns:
      f[C], f[C] and n f[], the values per channel that count, in at least float32. Without a valid
      sample mean and variance are 0.
    """
    rounded, positions = x.dtype == jnp.bfloat16, x[0, ..., 0].size
    x = pack(x, columns).astype(promote(x.dtype, jnp.float32))
    if valid is None:
        keep, count = None, jnp.asarray(x.shape[0] * positions, x.dtype)
    else:
        keep = valid.reshape(-1, *[1] * (x.ndim - 1))
        count = valid.sum(dtype=x.dtype) * positions
    inverse = 1 / jnp.maximum(count, 1)
    if on_cpu():
        return *channel_moments(x, keep, inverse, rounded), count
    # A packed column has a part of the positions.
    packed = channel_moments(x, keep, inverse * columns, rounded)
    return *unpacked_moments(*packed, columns), count


def is_spatial(x: jax.Array) -> bool:
    """Whether `x` f[B, ..., C] has axes between the samples and the channels."""
    return x.ndim > 2
