"""What an adaptation is, the plain ones, TsmoBN, and the ensemble of the clients' batch norms."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import UpTo1, bounded
from fedjax_bn.models.cpu import in_cache
from fedjax_bn.models.forward import forward
from fedjax_bn.models.masks import take
from fedjax_bn.normalization import Layer, Statistics, StatisticsRule, batch_statistics
from fedjax_bn.normalization.calls import name_of
from fedjax_bn.normalization.tsmobn import About, tracked_statistics
from fedjax_bn.sharing import (
    STATISTICS,
    Variables,
    all_but_batch_norm,
    batch_norm_paths,
    join,
    path_names,
    split,
    without,
)

PyTree = Any
_CLIENTS = "clients"  # the collection that `with_clients` adds


class Adaptation(NamedTuple):
    """A way to predict on an unseen client.

    Attributes:
      init: `init(variables) -> carry`, before the client's first batch.
      predict: `predict(variables, carry, images, valid=None) -> (logits f[B, classes], carry)`;
        images f[B, ...] as the model reads them, valid bool[B] marks the real ones.
    """

    init: Callable[[Variables], PyTree]
    predict: Callable[..., tuple[jax.Array, PyTree]]


def running(model: Any) -> Adaptation:
    """Plain inference: the received running statistics normalize, if there are any."""
    return stateless(model, None, per_sample=True)


def batch(model: Any) -> Adaptation:
    """The received affine with the client's own statistics, batch by batch (FedBN, Appendix G)."""
    return stateless(model, batch_statistics)


def initial(model: Any) -> Adaptation:
    """Plain inference with the statistics of an untrained batch norm: mean 0, variance 1.

    With `affine=False` (scale 1, bias 0) no batch norm has learned anything, as in a global model
    whose batch norms are never updated (UniFed, section 4.1.3, its row FedBN).
    """

    def untrained(layer: Layer, x: jax.Array, valid: jax.Array | None = None) -> Statistics:
        del x, valid
        return Statistics(jnp.zeros_like(layer.mean), jnp.ones_like(layer.var))

    return stateless(model, untrained, per_sample=True)


def of_clients(model: Any, statistics: StatisticsRule | None) -> Adaptation:
    """How a method's own clients predict: by its `FederatedMethod.statistics`; None: `running`."""
    return stateless(model, statistics, per_sample=statistics is None)


def stateless(
    model: Any, statistics: StatisticsRule | None, *, per_sample: bool = False
) -> Adaptation:
    """Predicts every batch by itself, normalized by a statistics rule.

    Args:
      model: a linen module or `models.from_nnx` of an nnx module, images -> logits.
      statistics: the rule of all its batch norms; None for the running statistics.
      per_sample: whether no sample's statistics depend on another's, so that a large batch may
        pass in chunks (`models.cpu.in_cache`).

    Raises:
      ValueError: at `predict`, if there is a rule and the model has no batch norm, or one that no
        rule reaches.
    """
    if per_sample:
        return each_by_itself(partial(predict_each, model, statistics))

    def predict(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        return forward(model, variables, images, statistics=statistics, valid=valid).outputs, carry

    return Adaptation(init=lambda variables: (), predict=predict)


def each_by_itself(predict: Callable[[Variables, jax.Array], jax.Array]) -> Adaptation:
    """Makes an adaptation of a prediction whose samples do not depend on each other."""
    return Adaptation(
        init=lambda variables: (),
        predict=lambda variables, carry, images, valid=None: (predict(variables, images), carry),
    )


def predict_each(
    model: Any, statistics: StatisticsRule | None, variables: Variables, images: jax.Array
) -> jax.Array:
    """Returns logits f[B, classes] by a rule that takes no sample's statistics from another one."""

    def logits(chunk: jax.Array) -> jax.Array:
        return forward(model, variables, chunk, statistics=statistics).outputs

    return in_cache(logits, images)


class _Tracked(NamedTuple):
    """The carry of `tsmobn`: tracked `batch_stats`, and bool[], whether a valid sample was seen."""

    statistics: Variables
    started: jax.Array


@bounded
def tsmobn(
    model: Any, momentum: UpTo1 | jax.Array = 0.9, *, about: About = "tracked"
) -> Adaptation:
    """The client's own statistics, tracked with momentum over its batches (Algorithm 1, Eq. 4).

    One pass over the stream in order: each batch moves the tracked mean and variance of every
    batch norm and is then normalized with them; the affine is the received one. The first batch
    gives its own statistics, so momentum 0 is `batch`, and a single batch is too.

    Args:
      model: as in `adaptation.stateless`, images -> logits.
      momentum: tau, the weight of the past, in [0, 1]; it may be traced.
      about: as in `normalization.tsmobn.update`.

    Raises:
      ValueError: at `init`, if the model has no batch norm; at `predict`, if it has one that no
        rule reaches.
    """

    def init(variables: Variables) -> _Tracked:
        if STATISTICS not in variables:
            raise ValueError(
                f"tsmobn tracks the statistics of batch norms, of which {name_of(model)} has "
                "none: use the adaptation running"
            )
        return _Tracked(variables[STATISTICS], jnp.zeros((), bool))

    def predict(
        variables: Variables, carry: _Tracked, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, _Tracked]:
        # Momentum 0 gives the first batch its own statistics, in the same program as later ones.
        now = jnp.where(carry.started, momentum, 0)
        tracking = {**variables, STATISTICS: carry.statistics}
        rule = tracked_statistics(now, about=about)
        output = forward(model, tracking, images, statistics=rule, valid=valid, wanted=["moved"])
        some = jnp.ones((), bool) if valid is None else valid.any()
        return output.outputs, _Tracked(output.moved[STATISTICS], carry.started | some)

    return Adaptation(init, predict)


def without_affine(adaptation: Adaptation) -> Adaptation:
    """The adaptation with every batch norm's scale 1 and bias 0 (TsmoBN, Fig. 3d).

    Raises:
      ValueError: at `init`, if the model has no batch norm.
    """

    def plain(variables: Variables) -> Variables:
        layers = batch_norm_paths(variables)
        if not layers:
            raise ValueError(
                "without_affine resets the scale and bias of batch norms, and the model has none: "
                "use the adaptation with its affine"
            )

        def reset(path: tuple, leaf: jax.Array) -> jax.Array:
            *module, name = path_names(path)
            if tuple(module) not in layers or name not in ("scale", "bias"):
                return leaf
            return jnp.ones_like(leaf) if name == "scale" else jnp.zeros_like(leaf)

        params = jax.tree_util.tree_map_with_path(reset, variables["params"])
        return {**variables, "params": params}

    return _of_changed(adaptation, plain)


def without_mask(adaptation: Adaptation) -> Adaptation:
    """The adaptation of the received model without its masks (see `fedjax_bn.models.masks`)."""
    return _of_changed(adaptation, lambda variables: take(variables)[0])


def _of_changed(adaptation: Adaptation, change: Callable[[Variables], Variables]) -> Adaptation:
    """The adaptation of a received model that `change` changes first."""

    def predict(
        variables: Variables, carry: PyTree, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        return adaptation.predict(change(variables), carry, images, valid)

    return Adaptation(lambda variables: adaptation.init(change(variables)), predict)


def ensemble(model: Any) -> Adaptation:
    """log of the mean over clients of softmax(logits with that client's batch norms).

    DSON (Seo et al., ECCV 2020). Each member takes one client's scale, bias, mean and variance and
    all else from the received model. It needs every client's batch norms at the tested client (see
    `with_clients`), which FedIG names a threat to privacy. It costs K passes.

    Raises:
      ValueError: at `predict`, if there are no clients' batch norms, or no logits.
    """

    def predict(variables: Variables, images: jax.Array) -> jax.Array:
        if _CLIENTS not in variables:
            raise ValueError(
                f"the variables have no collection {_CLIENTS!r}: make them with "
                "fedjax_bn.adaptation.with_clients(global_variables(state), "
                "client_variables(state))"
            )
        clients = variables[_CLIENTS]
        received = {name: variables[name] for name in clients}

        def member(own: Variables) -> jax.Array:
            mine = without(variables, *clients) | join(own, received)
            outputs = predict_each(model, None, mine, images)
            if getattr(outputs, "ndim", 0) != 2:
                raise ValueError(
                    "ensemble takes the mean of the clients' probabilities of classes, but "
                    f"{type(model).__name__} has other outputs than logits f[B, classes]: use "
                    "running or another adaptation"
                )
            return jax.nn.log_softmax(outputs)

        # One client after another, so that memory is that of one pass; in logs, because the
        # probability of a class may be too small for its dtype.
        logs = jax.lax.map(member, clients)
        return jax.nn.logsumexp(logs, axis=0) - jnp.log(len(logs)).astype(logs.dtype)

    return each_by_itself(predict)


def with_clients(variables: Variables, clients: Variables) -> Variables:
    """Adds to the received variables the collection `clients`, all clients' batch norms [K, ...].

    Args:
      variables: one model's collections, as from `federation.global_variables`.
      clients: all clients' collections [K, ...], as from `federation.client_variables`.

    Raises:
      ValueError: the model has no batch norm.
    """
    model = {name: clients[name] for name in ("params", "batch_stats")}
    _, own = split(model, all_but_batch_norm(model))
    return {**variables, _CLIENTS: own}
