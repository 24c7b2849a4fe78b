"""Passes a batch through a model: methods and adaptations call a model only through `forward`.

A model is a linen module, or an nnx module wrapped by `models.from_nnx`. `forward` handles
features, masks, hooks, statistics rules and the argument `train` (or `deterministic`, ...), so that
callers need not check which of these a model has.
"""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import jax

from fedjax_bn.models import hooks, masks
from fedjax_bn.models.dropout import require_dropout
from fedjax_bn.models.features import ClassifiedBy, FeaturesOf, features_method
from fedjax_bn.models.layers import require_floats
from fedjax_bn.normalization import StatisticsRule, normalize_with, running_statistics
from fedjax_bn.normalization.calls import SERVED, mode_arguments, name_of
from fedjax_bn.normalization.layer import RECORDED, Layer, Statistics, statistics_of
from fedjax_bn.sharing import (
    FROZEN,
    STATISTICS,
    Variables,
    batch_norm_paths,
    complete,
    trainable,
    without,
)

PyTree = Any


class Output(NamedTuple):
    """The results of a pass.

    Attributes:
      outputs: the model's outputs, such as logits f[B, classes].
      features: f[B, F], the classifier's inputs, masked; None unless requested.
      moved: the updated collections, {"batch_stats": ...}; {} unless the pass trains or they are
        requested.
      recorded: values that the statistics rule recorded, by layer and name; {} unless requested.
    """

    outputs: PyTree
    features: Any
    moved: Variables
    recorded: Variables


def forward(
    model: Any,
    variables: Variables,
    images: jax.Array,
    *,
    train: bool = False,
    statistics: StatisticsRule | None = None,
    valid: jax.Array | None = None,
    key: jax.Array | None = None,
    wanted: Collection[Literal["features", "frozen features", "moved", "recorded"]] = (),
) -> Output:
    """Passes a batch through a model, with the masks and hooks in its variables.

    Args:
      model: images f[B, ...] -> outputs; a linen module or the result of `from_nnx`, optionally
        wrapped in `FeaturesOf` or `ClassifiedBy`.
      variables: its collections, optionally with `mask` (see `models.masks`) or collections with
        hooks (see `models.hooks`).
      images: f[B, ...], prepared as the model expects.
      train: whether running statistics move; also passed to a model whose call has an argument
        `train` or another of `normalization.calls.mode_arguments`.
      statistics: the rule of all batch norms; by default the batch's own in training, otherwise the
        running ones.
      valid: bool[B], the samples that count in batch statistics; None for all.
      key: random key of hooks and dropout in training.
      wanted: additional results: "features"; "frozen features", at which the gradient of the
        outputs stops; "moved", the running statistics that the rule updates; "recorded", the values
        that the rule records.

    Raises:
      ValueError: the images are integers; features are requested, but the model's classifier cannot
        be found; a statistics rule is given, but the model has no batch norm, or one that no rule
        reaches; the model is an nnx module without `from_nnx`; in training its dropout is off,
        see `models.dropout`.
    """
    require_floats(images)
    frozen_leaves = variables.get(FROZEN) or {}
    fixed = batch_norm_paths(frozen_leaves) if train else frozenset()
    if fixed:
        statistics = _fixing(fixed, statistics)
    plain, feature_masks = masks.take(complete(hooks.predicting(variables)))
    plain, hooked = hooks.take(plain, images, key if train else None)
    images = hooked.images
    model, around = model if isinstance(model, ClassifiedBy) else (model, hooked.around)
    if instead := isinstance(model, FeaturesOf):
        # `FeaturesOf` returns the features unmasked, so their mask is removed.
        model, wanted = model.model, (*wanted, "features")
        feature_masks = without(feature_masks, masks.FEATURES)
    if not hasattr(model, "apply"):
        raise ValueError(
            f"{name_of(model)} has no method apply: a model is a linen module, or "
            "fedjax_bn.models.from_nnx(net) of an nnx module with its weights"
        )
    owners = batch_norm_paths(plain) if statistics is not None else frozenset()
    if statistics is not None and not owners:
        raise ValueError(
            f"a statistics rule chooses how batch norms normalize, but the variables of "
            f"{name_of(model)} have no batch norm: build the model with {SERVED}, or use a "
            "method that needs none, such as fedavg, and the adaptation running"
        )
    method, mask = None, feature_masks.get(masks.FEATURES)
    shown, frozen = "features" in wanted, "frozen features" in wanted
    if shown or frozen or mask is not None or around:
        method = features_method(model, plain, images, frozen=frozen, mask=mask, around=around)
    options: dict[str, Any] = mode_arguments(method or model.__call__, train)
    mutable = [STATISTICS] * (train or "moved" in wanted) + [RECORDED] * ("recorded" in wanted)
    if mutable:
        options["mutable"] = mutable
    if train and key is not None:
        options["rngs"] = {"dropout": key}
    rule = normalize_with(statistics, valid, owners=owners)
    contexts = (
        masks.multiply(feature_masks),
        *hooked.contexts,
        rule,
        *require_dropout(model, train),
    )
    with ExitStack() as around_layers:
        for context in contexts:
            around_layers.enter_context(context)
        result = model.apply(plain, images, method=method, **options)
    out, moved = result if mutable else (result, {})
    moved = trainable(moved, frozen_leaves)
    read_features, outputs = out if method else (None, out)
    features, recorded = read_features if shown or frozen else None, moved.get(RECORDED, {})
    return Output(
        read_features if instead else outputs, features, without(moved, RECORDED), recorded
    )


def _fixing(fixed: frozenset[tuple[str, ...]], rule: StatisticsRule | None) -> StatisticsRule:
    """Returns the rule whose batch norms at the paths `fixed` keep and use running statistics."""

    def fixing(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if layer.path in fixed:
            return running_statistics(layer, x)
        return statistics_of(rule, layer, x, valid)

    return fixing
