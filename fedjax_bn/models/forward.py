"""One pass of a model: the only place where methods and adaptations meet its framework.

A model initializes variables and computes outputs: a linen module, or an nnx module by
`models.from_nnx`. `forward` handles features, masks, hooks, statistics rules and an argument
`train`, so that no caller needs to ask what a model has.
"""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import jax

from fedjax_bn.models import hooks, masks
from fedjax_bn.models.features import ClassifiedBy, FeaturesOf, features_method
from fedjax_bn.models.layers import require_floats
from fedjax_bn.normalization import StatisticsRule, normalize_with
from fedjax_bn.normalization.calls import SERVED, name_of, takes_train
from fedjax_bn.normalization.layer import RECORDED
from fedjax_bn.sharing import STATISTICS, Variables, batch_norm_paths, without

PyTree = Any


class Output(NamedTuple):
    """What a pass returns.

    Attributes:
      outputs: what the model returns, such as logits f[B, classes].
      features: f[B, F], what the classifier reads, after their mask; None unless asked for.
      moved: the collections that the pass moved, {"batch_stats": ...}; {} unless it trains or they
        are asked for.
      recorded: what the statistics rule recorded, by layer and name; {} unless asked for.
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
    """Passes a batch through a model, with the masks and hooks that its variables hold.

    Args:
      model: images f[B, ...] -> outputs; a linen module, or what `from_nnx` makes; or one of these
        as `FeaturesOf` or `ClassifiedBy` it.
      variables: its collections, optionally with `mask` (see `models.masks`) or some that have
        hooks (see `models.hooks`).
      images: f[B, ...] as the model reads them.
      train: whether running statistics move; also the argument `train` of a model that has one.
      statistics: the rule of all batch norms; by default the batch's own in training, otherwise the
        running ones.
      valid: bool[B], the samples that count in batch statistics; None for all.
      key: random key of dropout, in training.
      wanted: what the output has in addition: "features"; "frozen features", at which the gradient
        of the outputs stops; "moved", the running statistics as a rule moves them; "recorded", what
        it records.

    Raises:
      ValueError: the images are bytes; features are asked for, and the model has none to show; a
        statistics rule is given, and the model has no batch norm, or one that no rule reaches; the
        model is an nnx module without `from_nnx`.
    """
    require_floats(images)
    plain, own = masks.take(variables)
    plain, hooked = hooks.take(plain, images, key if train else None)
    images = hooked.images
    model, around = model if isinstance(model, ClassifiedBy) else (model, hooked.around)
    if instead := isinstance(model, FeaturesOf):
        # The features before their mask, which therefore must not act.
        model, wanted = model.model, (*wanted, "features")
        own = without(own, masks.FEATURES)
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
    method, mask = None, own.get(masks.FEATURES)
    shown, frozen = "features" in wanted, "frozen features" in wanted
    if shown or frozen or mask is not None or around:
        method = features_method(model, plain, images, frozen=frozen, mask=mask, around=around)
    options: dict[str, Any] = takes_train(method or model.__call__, train)
    mutable = [STATISTICS] * (train or "moved" in wanted) + [RECORDED] * ("recorded" in wanted)
    if mutable:
        options["mutable"] = mutable
    if train and key is not None:
        options["rngs"] = {"dropout": key}
    rule = normalize_with(statistics, valid, owners=owners)
    with ExitStack() as around_layers:
        for context in (masks.multiply(own), *hooked.contexts, rule):
            around_layers.enter_context(context)
        result = model.apply(plain, images, method=method, **options)
    out, moved = result if mutable else (result, {})
    found, outputs = out if method else (None, out)
    features, recorded = found if shown or frozen else None, moved.get(RECORDED, {})
    return Output(found if instead else outputs, features, without(moved, RECORDED), recorded)
