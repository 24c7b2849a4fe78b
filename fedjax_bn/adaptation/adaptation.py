"""Defines adaptations: plain ones, FedIG-A's adapter, TsmoBN, the ensemble of batch norms."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import UpTo1, bounded
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.segmentation import as_classes
from fedjax_bn.models import feature_masks, hooks
from fedjax_bn.models.cpu import in_cache
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization import Layer, Statistics, StatisticsRule, batch_statistics
from fedjax_bn.normalization.adapter import COLLECTION, adapted_statistics
from fedjax_bn.normalization.calls import network_name, require_batch_norm
from fedjax_bn.normalization.tsmobn import About, update
from fedjax_bn.sharing import (
    MEASURED,
    STATISTICS,
    PyTree,
    Variables,
    all_but_batch_norm,
    batch_norm_paths,
    join,
    path_names,
    split,
    without,
)

_CLIENTS = "clients"  # the collection that `with_clients` adds


class Adaptation(NamedTuple):
    """A way to predict on an unseen client.

    Attributes:
      init: `init(variables) -> carry`, called before the client's first batch.
      predict: `predict(variables, carry, images, valid=None) -> (outputs, carry)`, such as logits
        f[B, classes] or maps of logits f[B, H, W, classes]; images f[B, ...] are prepared as the
        model expects, valid bool[B] is False for padding.
    """

    init: Callable[[Variables], PyTree]
    predict: Callable[..., tuple[jax.Array, PyTree]]


def running(model: Any) -> Adaptation:
    """Predicts with the received running statistics, if there are any: plain inference."""
    return stateless(model, None, per_sample=True)


def batch(model: Any) -> Adaptation:
    """Predicts with each batch's own statistics and the received affine (FedBN, Appendix G)."""
    return stateless(model, batch_statistics)


def initial(model: Any) -> Adaptation:
    """Predicts with the statistics of an untrained batch norm: mean 0, variance 1.

    With `affine=False` batch norms are as before training (UniFed, section 4.1.3, the row FedBN).
    """

    def untrained(layer: Layer, x: jax.Array, valid: jax.Array | None = None) -> Statistics:
        return Statistics(jnp.zeros_like(layer.mean), jnp.ones_like(layer.var))

    return stateless(model, untrained, per_sample=True)


def of_clients(model: Any, statistics: StatisticsRule | None) -> Adaptation:
    """Returns the adaptation of a method's own clients: its `statistics`, or `running` for None."""
    return stateless(model, statistics, per_sample=statistics is None)


def stateless(
    model: Any, statistics: StatisticsRule | None, *, per_sample: bool = False
) -> Adaptation:
    """Predicts every batch independently, normalized by a statistics rule.

    Args:
      statistics: the rule of all batch norms; None for the running statistics.
      per_sample: whether each sample's statistics are independent of the other samples, so that a
        large batch may pass in chunks (`models.cpu.in_cache`).
    """
    # A rule that reads the whole batch must not see it in chunks.
    if per_sample:
        return _each_by_itself(partial(_predict_each, model, statistics))

    def predict(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        return forward(model, variables, images, statistics=statistics, valid=valid).outputs, carry

    return Adaptation(init=lambda variables: (), predict=predict)


def _each_by_itself(predict: Callable[[Variables, jax.Array], jax.Array]) -> Adaptation:
    return Adaptation(
        init=lambda variables: (),
        predict=lambda variables, carry, images, valid=None: (predict(variables, images), carry),
    )


def _predict_each(
    model: Any, statistics: StatisticsRule | None, variables: Variables, images: jax.Array
) -> jax.Array:
    """The outputs by a rule that must treat each sample independently of the others."""
    return in_cache(
        lambda chunk: forward(model, variables, chunk, statistics=statistics).outputs, images
    )


def zero_shot_adapter(model: Any) -> Adaptation:
    """Mixes each sample's statistics into the global ones by a learned alpha, in every batch norm.

    FedIG-A (Eq. 7, Table 14). The variables need the collection `adapter`, which
    `methods.fedig(..., adapter=True)` trains.
    """

    def predict(variables: Variables, images: jax.Array) -> jax.Array:
        statistics = adapted_statistics(variables.get(COLLECTION, {}))
        return _predict_each(model, statistics, variables, images)

    return _each_by_itself(predict)


class _Tracked(NamedTuple):
    """The carry of `tsmobn`: tracked `batch_stats`, and bool[], whether a valid sample was seen."""

    statistics: Variables
    started: jax.Array


@bounded
def tsmobn(
    model: Any, momentum: UpTo1 | jax.Array = 0.9, *, about: About = "tracked"
) -> Adaptation:
    """Predicts with statistics tracked over the client's batches (TsmoBN, Algorithm 1, Eq. 4).

    Each batch, in order, first moves the tracked mean and variance of every batch norm and is then
    normalized by them, with the received affine. The first batch is normalized by its own
    statistics, and so is every batch with momentum 0.

    Args:
      momentum: tau, the weight of the past, in [0, 1]; may be traced.
      about: as in `normalization.tsmobn.update`.
    """

    def init(variables: Variables) -> _Tracked:
        require_batch_norm("tsmobn", variables, "use running")
        return _Tracked(variables[STATISTICS], jnp.zeros((), bool))

    def predict(
        variables: Variables, carry: _Tracked, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, _Tracked]:
        # With momentum 0 the first batch uses its own statistics, in the program of later batches.
        batch_momentum = jnp.where(carry.started, momentum, 0)

        def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
            pair = update((layer.mean, layer.var), x, batch_momentum, valid, about=about)
            return Statistics(*pair, moved=pair)

        # Running statistics hold the tracked ones here, and the pass moves them.
        tracking = {**variables, STATISTICS: carry.statistics}
        output = forward(model, tracking, images, statistics=rule, valid=valid, wanted=["moved"])
        # A batch of padding is no first batch: nothing is tracked after it.
        any_valid = jnp.ones((), bool) if valid is None else valid.any()
        return output.outputs, _Tracked(output.moved[STATISTICS], carry.started | any_valid)

    return Adaptation(init, predict)


def following(adaptation: Adaptation) -> Adaptation:
    """Returns the adaptation with what a client measures of its stream (`models.hooks.follow`)."""

    def init(variables: Variables) -> PyTree:
        carry = adaptation.init(variables)
        return (variables[MEASURED], carry) if MEASURED in variables else carry

    def predict(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        if MEASURED not in variables:
            return adaptation.predict(variables, carry, images, valid)
        # The batch counts before it is predicted, as in `tsmobn`.
        measured = hooks.follow(variables, carry[0], images, valid)
        outputs, carry = adaptation.predict(
            {**variables, MEASURED: measured}, carry[1], images, valid
        )
        return outputs, (measured, carry)

    return Adaptation(init, predict)


def without_affine(adaptation: Adaptation) -> Adaptation:
    """Returns the adaptation with scale 1 and bias 0 in every batch norm (TsmoBN, Fig. 3d)."""
    initial_values = {"scale": 1, "bias": 0}

    def plain(variables: Variables) -> Variables:
        layers = batch_norm_paths(require_batch_norm("affine=False", variables, "use running"))

        def reset(path: tuple, leaf: jax.Array) -> jax.Array:
            *module, name = path_names(path)
            affine = tuple(module) in layers and name in initial_values
            return jnp.full_like(leaf, initial_values[name]) if affine else leaf

        return {**variables, "params": jax.tree.map_with_path(reset, variables["params"])}

    return _of_changed(adaptation, plain)


def without_mask(adaptation: Adaptation) -> Adaptation:
    """Returns the adaptation applied without the received masks (see `models.feature_masks`)."""
    return _of_changed(adaptation, lambda variables: without(variables, feature_masks.COLLECTION))


def _of_changed(adaptation: Adaptation, change: Callable[[Variables], Variables]) -> Adaptation:
    """Applies `change` to the received variables before the adaptation."""

    def predict(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        return adaptation.predict(change(variables), carry, images, valid)

    return Adaptation(lambda variables: adaptation.init(change(variables)), predict)


def ensemble(model: Any) -> Adaptation:
    """Predicts the log of the mean over clients of softmax(logits with the client's batch norms).

    DSON (Seo et al., ECCV 2020). Each of K passes uses the batch norms of one client, which the
    tested client needs (see `with_clients`; FedIG calls it a threat to privacy), and the received
    model otherwise. In segmentation the mean is of each pixel; one logit becomes the two log
    probabilities of background and foreground.
    """

    def predict(variables: Variables, images: jax.Array) -> jax.Array:
        if _CLIENTS not in variables:
            remedy = "adaptation.with_clients(global_variables(state), client_variables(state))"
            raise ValueError(
                "ensemble needs the batch norms of all clients, which no served model holds; in "
                f"Python {remedy} adds them"
            )
        clients = variables[_CLIENTS]
        received = {name: variables[name] for name in clients}

        def member(client_norms: Variables) -> jax.Array:
            # Norms of one client, everything else as received.
            client_model = without(variables, *clients) | join(client_norms, received)
            outputs = _predict_each(model, None, client_model, images)
            return jax.nn.log_softmax(_class_logits(model, outputs))

        # One client after another, to need only the memory of one pass. The mean is taken in logs,
        # because the probability of a class may be too small for its dtype.
        logs = jax.lax.map(member, clients)
        return jax.nn.logsumexp(logs, axis=0) - jnp.log(len(logs)).astype(logs.dtype)

    return _each_by_itself(predict)


def _class_logits(model: Any, outputs: Any) -> jax.Array:
    """The logits f[B, C] or f[B, H, W, C] of classes."""
    if getattr(outputs, "ndim", 0) not in (2, 4):  # of classifiers, and for segmentation
        problem = f"{network_name(model)} gives no logits f[B, classes] or f[B, H, W, classes]"
        raise ValueError(f"{problem}, which this adaptation reads: use running or tsmobn")
    return outputs if outputs.ndim == 2 else as_classes(outputs)


def logits_and_seen(
    model: Any, outputs: Any, valid: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns logits f[..., C] of at least float32 and bool[...], the predictions that count."""
    logits = _class_logits(model, outputs)
    seen = jnp.ones(len(logits), bool) if valid is None else valid
    seen = jnp.broadcast_to(seen.reshape(-1, *[1] * (logits.ndim - 2)), logits.shape[:-1])
    logits = logits.astype(promote(logits.dtype, jnp.float32))
    # Before the softmax, because the gradient of a NaN is NaN even if its value is dropped.
    return jnp.where(seen[..., None], logits, 0), seen


def with_clients(variables: Variables, clients: Variables) -> Variables:
    """Adds the collection `clients` to the received variables: all clients' batch norms [K, ...].

    They are those of `federation.global_variables` and `federation.client_variables`.
    """
    # All that is no batch norm is the received model's, so only norms need K rows.
    model = {name: clients[name] for name in ("params", "batch_stats")}
    _, client_norms = split(model, all_but_batch_norm(model))
    return {**variables, _CLIENTS: client_norms}
