"""Batch-instance normalization, BIN (Nam & Kim, NeurIPS 2018): one learned gate per channel."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_bn.engine.optimizers import check_optimizer
from fedjax_bn.normalization.instance import handed_over, instance_moments, moments_of_all
from fedjax_bn.normalization.layer import Layer, Statistics, is_spatial, moving, statistics_of

PyTree = Any
GATE = "gate"


def gated_statistics(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
    """Normalizes to rho x_B + (1 - rho) x_I with the gate rho f[C] in [0, 1] (BIN, Section 3).

    x_B is normalized by the batch's statistics in a pass that may move `batch_stats`, and by the
    running ones in any other pass; x_I is normalized by the sample's own. The sum is computed as
    one normalization, with deviation 1 / (rho / std_B + (1 - rho) / std_I). A layer without spatial
    axes is a plain batch norm, one without a gate (`with_gates`) raises ValueError.
    """
    if not is_spatial(x):
        return statistics_of(None, layer, x, valid)
    if layer.gate is None:
        remedy = "train with fedig:gates=True or copa, or add batch_instance.with_gates"
        raise ValueError(f"batch norm {layer.name!r} has no gate: {remedy}")
    own_mean, own_var = instance_moments(x, layer.columns)
    plain = Statistics(layer.mean, layer.var)
    if layer.training:
        positions = x[0, ..., 0].size
        plain = moving(layer, *moments_of_all(own_mean, own_var, positions, valid))
    (mean, var), gate = plain[:2], layer.gate
    # Only the value is clipped: `clip` would halve the gradient at 1, where gates start, and stop
    # it beyond.
    gate = gate + jax.lax.stop_gradient(jnp.clip(gate, 0, 1) - gate)
    gate = gate.astype(own_mean.dtype)
    share = gate / jnp.sqrt(var + layer.epsilon).astype(gate.dtype)
    own_share = (1 - gate) / jnp.sqrt(own_var + layer.epsilon)
    std = 1 / (share + own_share)
    mixed = std * (share * mean.astype(gate.dtype) + own_share * own_mean)
    return handed_over(mixed, std, layer, x)._replace(moved=plain.moved)


def with_gates(variables: dict[str, PyTree]) -> dict[str, PyTree]:
    """Adds a gate f[C] of 1, pure batch norm, to every batch norm's parameters without a gate."""
    params = flatten_dict(variables.get("params", {}), keep_empty_nodes=True)
    # A batch norm without scale and bias has statistics alone, so these show where the norms are.
    for path, leaf in flatten_dict(variables["batch_stats"]).items():
        if path[-1] == "mean":
            params.setdefault((*path[:-1], GATE), jnp.ones_like(leaf))
    return {**variables, "params": unflatten_dict(params)}


def keep_gates(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer with steps that keep every gate in [0, 1] (BIN, Section 3)."""
    check_optimizer(optimizer)
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: PyTree, state: PyTree, params: PyTree, **extra: Any) -> tuple:
        updates, state = inner.update(updates, state, params, **extra)

        def keep(path: tuple, step: jax.Array, leaf: jax.Array) -> jax.Array:
            is_gate = getattr(path[-1], "key", None) == GATE
            return jnp.clip(leaf + step, 0, 1) - leaf if is_gate else step

        return jax.tree_util.tree_map_with_path(keep, updates, params), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
