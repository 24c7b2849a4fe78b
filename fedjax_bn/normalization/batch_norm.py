"""Our batch-norm module for linen, which normalizes by the statistics that a rule returns.

`calls.normalize_with` applies a rule to all batch norms of a model, at any depth, so that the
model's `__call__` needs no argument except the images:

    class Net(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = nn.relu(BatchNorm()(nn.Conv(32, (3, 3))(images)))
            return nn.Dense(10)(x.mean((1, 2)))
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.normalization.layer import (
    RECORDED,
    Layer,
    Statistics,
    StatisticsRule,
    normalize,
    statistics_of,
)


class BatchNorm(nn.Module):
    """Batch normalization over all axes but the last (Ioffe & Szegedy 2015).

    y = scale * (x - mean) / sqrt(var + epsilon) + bias, with (mean, var) from a statistics rule.
    By default the rule is `batch_statistics` in a pass that may move `batch_stats`
    (`mutable=["batch_stats"]`), and `running_statistics` in any other pass.

    Variables: `params` scale, bias f[C]; `batch_stats` mean, var f[C].

    Attributes:
      momentum: weight of the old value in the running statistics, in [0, 1]; PyTorch's momentum is
        1 minus this value.
      epsilon: added to the variance, at least 0.
      use_scale: whether there is a learned scale.
      use_bias: whether there is a learned bias.
      unbiased: whether the running variance averages the batches' unbiased variance, as in PyTorch,
        or the biased one, as in flax.
      param_dtype: dtype in which the variables are created.
      columns: number of columns of a map f[B, H, W, C] that XLA stores as one, see
        `engine.packed_columns`; the results are the same.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True
    unbiased: bool = True
    param_dtype: Any = jnp.float32
    columns: int = 1

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        statistics: StatisticsRule | None = None,
        valid: jax.Array | None = None,
        pool: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """Normalizes x f[B, ..., C] by a rule; returns the same shape and dtype.

        `valid` bool[B] marks the samples that count in the batch's statistics. `pool`, the maximum
        over windows of positions, is applied to the normalized map (in effect: it is computed
        before, because the normalization of a channel is monotone).
        """
        shape = (x.shape[-1],)
        self.variable("batch_stats", "mean", jnp.zeros, shape, self.param_dtype)
        self.variable("batch_stats", "var", jnp.ones, shape, self.param_dtype)
        layer = _layer_of(self, unbiased=self.unbiased)._replace(columns=self.columns)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", nn.initializers.ones, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, shape, self.param_dtype)
        turned, sign = x, jnp.ones((), x.dtype)
        if pool is not None and scale is not None:
            # Where the scale is negative, the largest value comes from the smallest x. The sign
            # belongs to x from here on: XLA makes it a part of the convolution that computes x.
            sign = jnp.where(scale < 0, -1, 1).astype(x.dtype)
            turned = x * sign
            x = turned * sign
        layer_statistics = statistics_of(statistics, layer, x, valid)
        _store(self, layer, layer_statistics)
        given_for = (layer_statistics, self.epsilon, scale, bias, self.columns)
        if pool is None:
            return normalize(x, *given_for).astype(x.dtype)
        # Normalizing is monotonic for each channel then, so pooling may come first.
        if layer_statistics.by_channel(x):
            return normalize(pool(turned) * sign, *given_for).astype(x.dtype)
        return pool(normalize(x, *given_for).astype(x.dtype))


def _layer_of(module: nn.Module, *, unbiased: bool) -> Layer:
    """The `Layer` of a linen module, with its epsilon, momentum and variables."""
    return Layer(
        path=module.path,
        mean=module.get_variable("batch_stats", "mean"),
        var=module.get_variable("batch_stats", "var"),
        epsilon=module.epsilon,
        momentum=module.momentum,
        training=module.is_mutable_collection("batch_stats") and not module.is_initializing(),
        unbiased=unbiased,
        gate=module.get_variable("params", "gate"),
    )


def _store(module: nn.Module, layer: Layer, statistics: Statistics) -> None:
    """Stores a rule's recorded values in a linen module, and its moved ones if the pass may."""
    if statistics.moved is not None and layer.training:
        for name, value in zip(("mean", "var"), statistics.moved, strict=True):
            module.put_variable("batch_stats", name, value)
    # A layer that is called several times in a pass keeps the last recorded value.
    replace = {"reduce_fn": lambda before, after: after, "init_fn": lambda: None}
    for name, value in (statistics.recorded or {}).items():
        module.sow(RECORDED, name, value, **replace)


def linen_normalizer(module: nn.Module) -> Callable[..., jax.Array] | None:
    """Returns `Call.normalize` of a linen module; None unless statistics rules reach it."""
    if isinstance(module, BatchNorm):
        return _give_rule
    # A derived class with its own `__call__` is left alone: a rule would bypass that code.
    if isinstance(module, nn.BatchNorm) and type(module).__call__ is nn.BatchNorm.__call__:
        return partial(_normalize_linen, module)
    return None


def _give_rule(function: Callable, args: tuple, kwargs: dict, rule: Any, valid: Any) -> jax.Array:
    """Calls our batch norm, which applies the rule itself."""
    return function(*args, **{"statistics": rule, "valid": valid} | kwargs)


def _normalize_linen(
    module: nn.BatchNorm, function: Callable, args: tuple, kwargs: dict, rule: Any, valid: Any
) -> jax.Array:
    if module.is_initializing():
        x = args[0] if args else kwargs["x"]
        # This call only creates the variables; its output is not used.
        function(jnp.zeros_like(x), use_running_average=True)
    layer = _layer_of(module, unbiased=False)
    affine = tuple[Any, ...](module.get_variable("params", name) for name in ("scale", "bias"))
    y, statistics = flax_batch_norm(module, layer, args, kwargs, rule, valid, affine)
    _store(module, layer, statistics)
    return y


def flax_batch_norm(
    module: Any, layer: Layer, args: tuple, kwargs: dict, rule: Any, valid: Any, affine: tuple
) -> tuple[jax.Array, Statistics]:
    """Applies a rule to one of flax's batch norms; returns the output and the rule's statistics.

    `affine` is scale and bias, each f[C] or None; `args` and `kwargs` are those of the call. An
    option that statistics rules do not handle raises ValueError.
    """
    options = dict(zip(("x", "use_running_average"), args, strict=False)) | kwargs
    x = options["x"]
    is_last = module.axis in (-1, x.ndim - 1)
    if not is_last or module.axis_name is not None or options.get("mask") is not None:
        fields = f"axis={module.axis}, axis_name={module.axis_name!r} or a mask"
        raise ValueError(f"batch norm {layer.name!r} with {fields} serves no rule: leave them out")
    statistics = statistics_of(rule, layer, x, valid)
    y = normalize(x, statistics, layer.epsilon, *affine)
    leaves = [leaf.dtype for leaf in affine if leaf is not None]
    return y.astype(module.dtype or promote(x.dtype, *leaves)), statistics
