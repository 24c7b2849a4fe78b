"""One pass of a model: the only place where methods and adaptations meet its framework.

A model is what initializes variables and computes outputs; whether it shows its features, carries
masks or is told that it trains is settled here.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fedjax_bn.models import masks
from fedjax_bn.models.features import takes_train
from fedjax_bn.models.halves import halves
from fedjax_bn.normalization import StatisticsRule, normalize_with
from fedjax_bn.sharing import STATISTICS, Variables

PyTree = Any


class Output(NamedTuple):
    """What a pass gives.

    Attributes:
      outputs: what the model returns, such as logits f[B, classes].
      features: f[B, F], what the classifier reads, behind their mask; None where not asked for.
      moved: the collections that the pass moved, {"batch_stats": ...}; {} unless it trains.
    """

    outputs: PyTree
    features: jax.Array | None
    moved: Variables


def forward(
    model: nn.Module,
    variables: Variables,
    images: jax.Array,
    *,
    train: bool = False,
    statistics: StatisticsRule | None = None,
    valid: jax.Array | None = None,
    key: jax.Array | None = None,
    features: bool = False,
    frozen: bool = False,
) -> Output:
    """Passes a batch through a model; masks among the variables are applied.

    Args:
      model: images f[B, ...] -> outputs.
      variables: its collections, perhaps with `mask` (see `models.masks`).
      images: f[B, ...] as the model reads them.
      train: whether running statistics move and the model is told that it trains.
      statistics: the rule of all batch norms; by default the batch's own in training and the
        running ones else.
      valid: bool[B], the samples that count in batch statistics; None for all.
      key: random key of dropout, in training.
      features: whether features are wanted besides.
      frozen: whether the gradient of the outputs stops at the features.

    Raises:
      ValueError: features are asked for, or to be frozen, and the model has none to show.
    """
    plain, _ = masks.take(variables)
    method = halves(model, plain, images, frozen=frozen) if features or frozen else None
    options = takes_train(method or model.__call__, train)
    if train:
        options |= {"mutable": [STATISTICS], "rngs": {} if key is None else {"dropout": key}}
    with normalize_with(statistics, valid):
        result = masks.apply(model, variables, images, method=method, **options)
    out, moved = result if train else (result, {})
    found, outputs = out if method else (None, out)
    return Output(outputs, found, moved)
