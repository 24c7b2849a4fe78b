"""What an adaptation is, and the two plain ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_bn.models.cpu.chunks import in_cache
from fedjax_bn.models.masks import apply, take
from fedjax_bn.normalization import (
    StatisticsRule,
    batch_statistics,
    normalize_with,
    running_statistics,
)
from fedjax_bn.normalization.layer import path_names
from fedjax_bn.sharing import Variables, batch_norm_layers

PyTree = Any


class Adaptation(NamedTuple):
    """A way to predict on an unseen client.

    Attributes:
      init: `init(variables) -> carry`, before the client's first batch.
      predict: `predict(variables, carry, images, valid=None) -> (logits f[B, classes], carry)`;
        images f[B, ...] as the model reads them, valid bool[B] marks the real ones.
    """

    init: Callable[[Variables], PyTree]
    predict: Callable[..., tuple[jax.Array, PyTree]]


def running(model: nn.Module) -> Adaptation:
    """Plain inference: the received running statistics normalize."""
    return stateless(model, running_statistics, per_sample=True)


def batch(model: nn.Module) -> Adaptation:
    """The received affine with the client's own statistics, batch by batch (FedBN, Appendix G)."""
    return stateless(model, batch_statistics)


def stateless(
    model: nn.Module, statistics: StatisticsRule, *, per_sample: bool = False
) -> Adaptation:
    """Predicts every batch by itself, normalized by a statistics rule.

    Args:
      model: linen module, images -> logits.
      statistics: the rule of all its batch norms.
      per_sample: whether no sample's statistics depend on another's, so that a large batch may
        pass in chunks (`chunks.in_cache`).
    """

    def predict(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        if per_sample:
            return predict_each(model, statistics, variables, images), carry
        with normalize_with(statistics, valid):
            return apply(model, variables, images), carry

    return Adaptation(init=lambda variables: (), predict=predict)


def predict_each(
    model: nn.Module, statistics: StatisticsRule, variables: Variables, images: jax.Array
) -> jax.Array:
    """Logits f[B, classes] by a rule under which no sample's statistics depend on another's."""

    def logits(chunk: jax.Array) -> jax.Array:
        with normalize_with(statistics):
            return apply(model, variables, chunk)

    return in_cache(logits, images)


def without_affine(adaptation: Adaptation) -> Adaptation:
    """The adaptation with every batch norm's scale 1 and bias 0 (TsmoBN, Fig. 3d)."""

    def plain(variables: Variables) -> Variables:
        layers = batch_norm_layers(variables)

        def reset(path: tuple, leaf: jax.Array) -> jax.Array:
            *module, name = path_names(path)
            if tuple(module) not in layers or name not in ("scale", "bias"):
                return leaf
            return jnp.ones_like(leaf) if name == "scale" else jnp.zeros_like(leaf)

        params = jax.tree_util.tree_map_with_path(reset, variables["params"])
        return {**variables, "params": params}

    def predict(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        return adaptation.predict(plain(variables), carry, images, valid)

    return Adaptation(lambda variables: adaptation.init(plain(variables)), predict)


def without_mask(adaptation: Adaptation) -> Adaptation:
    """The adaptation of the received model without its masks (see `fedjax_bn.models.masks`)."""

    def predict(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        return adaptation.predict(take(variables)[0], carry, images, valid)

    return Adaptation(lambda variables: adaptation.init(take(variables)[0]), predict)
