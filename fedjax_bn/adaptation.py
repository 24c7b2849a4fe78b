"""Test-time adaptation: how a client that was not in the federation uses the received model.

An adaptation is a pair of pure functions; its carry streams over the batches of one client and
starts afresh for each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fedjax_bn.normalization import (
    StatisticsRule,
    batch_statistics,
    normalize_with,
    running_statistics,
)
from fedjax_bn.sharing import Variables

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
    return _stateless(model, running_statistics)


def batch(model: nn.Module) -> Adaptation:
    """The received affine with the client's own statistics, batch by batch (FedBN, Appendix G)."""
    return _stateless(model, batch_statistics)


def _stateless(model: nn.Module, statistics: StatisticsRule) -> Adaptation:
    def predict(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        with normalize_with(statistics, valid):
            return model.apply(variables, images), carry

    return Adaptation(init=lambda variables: (), predict=predict)
