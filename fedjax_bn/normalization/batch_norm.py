"""The batch-norm module: it normalizes with whatever statistics it is handed.

A *statistics rule* is a function `(layer, x, valid) -> (mean, var)`. Two are here, the batch's own
and the running ones; every paper's idea is one more function, never a subclass. A rule reaches all
batch norms of a model, however deep, through `normalize_with`, so a model's `__call__` takes its
images and nothing else:

    class Net(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = nn.relu(BatchNorm()(nn.Conv(32, (3, 3))(images)))
            return nn.Dense(10)(x.mean((1, 2)))
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.dtypes import promote

StatisticsRule = Callable[["BatchNorm", jax.Array, jax.Array | None], tuple[jax.Array, jax.Array]]


class BatchNorm(nn.Module):
    """Batch normalization over all axes but the last (Ioffe & Szegedy 2015).

    y = scale * (x - mean) / sqrt(var + epsilon) + bias, with (mean, var) from a statistics rule.
    By default a pass that may move `batch_stats` (`mutable=["batch_stats"]`) takes
    `batch_statistics`, any other pass `running_statistics`.

    Variables: `params` scale, bias f[C]; `batch_stats` mean, var f[C].

    Attributes:
      momentum: weight of the old value in the running statistics, in [0, 1]; PyTorch's is 1 minus
        this one.
      epsilon: added to the variance.
      use_scale: whether there is a learned scale.
      use_bias: whether there is a learned bias.
      param_dtype: dtype in which the variables are created.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        statistics: StatisticsRule | None = None,
        valid: jax.Array | None = None,
    ) -> jax.Array:
        """Normalizes `x`.

        Args:
          x: f[B, ..., C].
          statistics: rule that gives mean and variance, each f[C] or broadcastable against `x`.
          valid: bool[B], the samples that count in the batch's statistics; None for all.

        Returns:
          f[B, ..., C] in the dtype of `x`.
        """
        shape = (x.shape[-1],)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, self.param_dtype)
        var = self.variable("batch_stats", "var", jnp.ones, shape, self.param_dtype)
        if statistics is None:
            training = self.is_mutable_collection("batch_stats") and not self.is_initializing()
            statistics = batch_statistics if training else running_statistics
        del mean, var  # declared here, read by the rule through `running`

        mean, var = statistics(self, x, valid)
        dtype = promote(x.dtype, mean.dtype)
        scale = jax.lax.rsqrt(var.astype(dtype) + jnp.asarray(self.epsilon, dtype))
        if self.use_scale:
            gamma = self.param("scale", nn.initializers.ones, shape, self.param_dtype)
            scale = scale * gamma.astype(dtype)
        y = (x.astype(dtype) - mean.astype(dtype)) * scale
        if self.use_bias:
            beta = self.param("bias", nn.initializers.zeros, shape, self.param_dtype)
            y = y + beta.astype(dtype)
        return y.astype(x.dtype)

    def running(self) -> tuple[jax.Array, jax.Array]:
        """The running mean and variance, f[C] each."""
        return (
            self.get_variable("batch_stats", "mean"),
            self.get_variable("batch_stats", "var"),
        )

    def move_running(self, mean: jax.Array, var: jax.Array) -> None:
        """Moves the running statistics towards `mean`, `var` f[C], where the pass may do so."""
        if not self.is_mutable_collection("batch_stats") or self.is_initializing():
            return
        for name, value in (("mean", mean), ("var", var)):
            old = self.get_variable("batch_stats", name)
            new = self.momentum * old + (1 - self.momentum) * value.astype(old.dtype)
            self.put_variable("batch_stats", name, new)


def running_statistics(
    layer: BatchNorm, x: jax.Array, valid: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The layer's running mean and variance, f[C] each: the usual rule at test time."""
    del x, valid
    return layer.running()


def batch_statistics(
    layer: BatchNorm, x: jax.Array, valid: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of the batch, f[C] each; moves the running statistics.

    The running variance takes the unbiased variance, n / (n - 1) times the biased one, as PyTorch
    does; with n = 1 it takes the biased one, which is 0.
    """
    mean, var, count = moments(x, valid)
    layer.move_running(mean, var * (count / jnp.maximum(count - 1, 1)))
    return mean, var


def moments(x: jax.Array, valid: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, biased variance and count over all axes but the last, in two passes.

    Args:
      x: f[B, ..., C].
      valid: bool[B], the samples that count; None for all.

    Returns:
      mean f[C], variance f[C] and the number n f[] of values behind each, in at least float32.
      Without any valid sample mean and variance are 0.
    """
    x = x.astype(promote(x.dtype, jnp.float32))
    axes = tuple(range(x.ndim - 1))
    per_sample = x[0, ..., 0].size
    if valid is None:
        keep, count = None, jnp.asarray(x.shape[0] * per_sample, x.dtype)
    else:
        keep = valid.reshape(-1, *(1,) * (x.ndim - 1))
        count = valid.sum(dtype=x.dtype) * per_sample
    inverse = 1 / jnp.maximum(count, 1)
    mean = jnp.sum(x, axes, where=keep) * inverse
    var = jnp.sum(jnp.square(x - mean), axes, where=keep) * inverse
    return mean, var, count


def normalize_with(
    statistics: StatisticsRule | None = None, valid: jax.Array | None = None
) -> AbstractContextManager:
    """Hands a statistics rule and a mask of valid samples to every `BatchNorm` applied inside.

        with normalize_with(running_statistics):
            logits = model.apply(variables, images)

    It acts while a model is traced, so it works under `jit`, `vmap`, `scan` and `shard_map` and
    costs nothing at run time.

    Args:
      statistics: the rule; None for the module's default.
      valid: bool[B], the samples that count; None for all.
    """

    def hand_over(
        call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
    ) -> Any:
        if isinstance(context.module, BatchNorm) and context.method_name == "__call__":
            kwargs = {"statistics": statistics, "valid": valid} | kwargs
        return call(*args, **kwargs)

    return nn.intercept_methods(hand_over)
