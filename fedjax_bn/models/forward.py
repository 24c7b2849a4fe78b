"""Passes a batch through a model: methods and adaptations call a model only through `forward`.

A model is a linen module, or an nnx module wrapped by `models.from_nnx`. `forward` handles
features, masks, hooks, statistics rules and the argument `train` (or `deterministic`, ...), so that
callers need not check which of these a model has.
"""

import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax

from fedjax_bn.models import hooks
from fedjax_bn.models.classifier import ClassifiedBy, FeaturesOf, features_method, times
from fedjax_bn.models.feature_masks import COLLECTION, FEATURES
from fedjax_bn.models.layers import require_floats
from fedjax_bn.normalization import StatisticsRule, calls, normalize_with, running_statistics
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
    """The results of a pass."""

    outputs: PyTree  # the model's outputs, such as logits f[B, classes]
    features: Any  # f[B, F], the classifier's inputs, masked; None unless requested
    # the updated collections, {"batch_stats": ...}; {} unless the pass trains or they are requested
    moved: Variables
    # values that the statistics rule recorded, by layer and name; {} unless requested
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
      variables: its collections, optionally with `mask` (see `models.feature_masks`) or
        collections with hooks (see `models.hooks`).
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
      ValueError: the images are integers; the model's classifier cannot be found for features; a
        rule reaches no batch norm, or not all; an nnx module lacks `from_nnx`; in training the
        model's dropout is off.
    """
    require_floats(images)
    frozen_leaves = variables.get(FROZEN) or {}
    fixed = batch_norm_paths(frozen_leaves) if train else frozenset()
    # A frozen batch norm must not move, whatever rule the method has for the others.
    if fixed:
        statistics = _fixing(fixed, statistics)
    plain = complete(hooks.predicting(variables))
    feature_masks = plain.get(COLLECTION, {})
    plain, hooked = hooks.apply_hooks(without(plain, COLLECTION), images, key if train else None)
    images = hooked.images
    model, around = model if isinstance(model, ClassifiedBy) else (model, hooked.around)
    if instead := isinstance(model, FeaturesOf):
        # `FeaturesOf` returns the features unmasked, so their mask is removed.
        model, wanted = model.model, (*wanted, "features")
        feature_masks = without(feature_masks, FEATURES)
    if not hasattr(model, "apply"):
        name = calls.network_name(model)
        raise ValueError(f"{name} has no method apply: give a linen module or models.from_nnx(net)")
    owners = batch_norm_paths(plain) if statistics is not None else frozenset()
    if statistics is not None and not owners:
        problem = f"{calls.network_name(model)} has no batch norm for a statistics rule"
        raise ValueError(f"{problem}: build it with {calls.SERVED}, or use fedavg and running")
    method, mask = None, feature_masks.get(FEATURES)
    shown, frozen = "features" in wanted, "frozen features" in wanted
    if shown or frozen or mask is not None or around:
        method = features_method(model, plain, images, frozen=frozen, mask=mask, around=around)
    options: dict[str, Any] = calls.mode_arguments(method or model.__call__, train)
    mutable = [STATISTICS] * (train or "moved" in wanted) + [RECORDED] * ("recorded" in wanted)
    if mutable:
        options["mutable"] = mutable
    if train and key is not None:
        options["rngs"] = {"dropout": key}
    with ExitStack() as contexts:
        if inside := without(feature_masks, FEATURES):
            masked = calls.changing_outputs(inside, lambda name, x: times(x, inside[name]))
            contexts.enter_context(masked)
        for context in hooked.contexts:
            contexts.enter_context(context)
        contexts.enter_context(normalize_with(statistics, valid, owners=owners))
        # Otherwise a user would train without the dropout that the network shows.
        if train and _leaves_dropout_off(model):
            contexts.enter_context(_refusing_dropout())
        result = model.apply(plain, images, method=method, **options)
    out, moved = result if mutable else (result, {})
    # Frozen statistics came back unchanged; None in their places keeps them out of uploads.
    moved = trainable(moved, frozen_leaves)
    features, outputs = out if method else (None, out)
    outputs = features if instead else outputs
    # A mask or a hook alone needs the features, but its caller did not ask for them.
    features = features if shown or frozen else None
    return Output(outputs, features, without(moved, RECORDED), moved.get(RECORDED, {}))


def _fixing(fixed: frozenset[tuple[str, ...]], rule: StatisticsRule | None) -> StatisticsRule:
    """Returns the rule whose batch norms at the paths `fixed` keep and use running statistics."""

    def fixing(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        if layer.path in fixed:
            return running_statistics(layer, x)
        return statistics_of(rule, layer, x, valid)

    return fixing


def _leaves_dropout_off(model: Any) -> bool:
    """Whether nothing tells a model that a pass trains, and it does not decide so itself."""
    network = inspect.unwrap(model)
    # `net` is an attribute of what `from_nnx` returns; nnx takes long to import.
    network = network if isinstance(network, nn.Module) else getattr(network, "net", network)
    methods = [getattr(network, name, None) for name in ("__call__", "features", "classify")]
    if any(calls.mode_arguments(method, True) for method in methods if callable(method)):
        return False
    # It decides itself if its call has no further arguments, and it has no field like `train`.
    arguments = set(inspect.signature(network).parameters) - {"rngs"}
    fields = (getattr(network, name, None) for name in (*calls.TRAINING, *calls.PREDICTING))
    return len(arguments) != 1 or any(isinstance(field, bool) for field in fields)


def _refusing_dropout() -> AbstractContextManager:
    """Returns a context in which dropout with a rate above 0 that is off raises ValueError."""

    def refuse(function: Callable, call: calls.Call, args: tuple, kwargs: dict) -> Any:
        module = call.module
        arguments = inspect.signature(module).bind_partial(*args, **kwargs).arguments
        off = arguments.get("deterministic")
        off = module.deterministic if off is None else off
        if off is True and (_rate(module) or 0) > 0:
            problem = f"the dropout {'/'.join(call.path)!r} is off in training"
            remedy = f"give __call__ an argument {', '.join((*calls.TRAINING, *calls.PREDICTING))}"
            raise ValueError(f"{problem}: {remedy}, or set its rate to 0")
        return function(*args, **kwargs)

    def concerns(call: calls.Call) -> bool:
        return call.method == "__call__" and _rate(call.module) is not None

    return calls.intercepting(refuse, concerns, reads_outputs=False)


def _rate(module: Any) -> float | None:
    """Returns the rate of flax's dropout or of the dropout in its attention; None for others."""
    if not hasattr(module, "deterministic"):
        return None
    return getattr(module, "rate", getattr(module, "dropout_rate", None))
