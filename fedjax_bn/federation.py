"""The heart: a federated method is a pair of pure functions, and `federate` makes one.

A federation is K clients. The variables of their models are split by a sharing rule into shared
leaves (one copy) and personal leaves (stacked, leading axis K). One call of `round` broadcasts the
shared leaves, trains every client, averages what is shared and leaves what is personal.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn import client as local
from fedjax_bn.aggregation import (
    ServerUpdate,
    Uploads,
    WeighingRule,
    averaging,
    by_size,
    needs_risks,
    normalize,
    restore,
    weighted,
    weighted_mean,
)
from fedjax_bn.client import Load, LocalStep, Received, Trained, masked_mean, select
from fedjax_bn.data.batches import Batches, blank_padding, check_batches
from fedjax_bn.mapping import group_size, map_and_sum
from fedjax_bn.sharing import SharingRule, Variables, everything, join, split, split_like

PyTree = Any
Metrics = dict[str, jax.Array]
MemoryInit = Callable[[PyTree, PyTree], PyTree]
Finish = Callable[[Received, Trained], tuple[Variables, PyTree, PyTree]]
Train = Callable[..., Trained]


class FederatedState(NamedTuple):
    """All that a federation remembers between rounds.

    Attributes:
      round: i32[], rounds finished.
      shared: the shared leaves, one copy; None where a leaf is personal.
      personal: the personal leaves [K, ...]; None where a leaf is shared.
      weights: f[K], aggregation weights of the last round (before the first: uniform).
      server: the server's part of the method state.
      memory: the clients' part of the method state, [K, ...].
      local: the states of the clients' local steps [K, ...], where they are kept between rounds.
    """

    round: jax.Array
    shared: PyTree
    personal: PyTree
    weights: jax.Array
    server: PyTree
    memory: PyTree
    local: PyTree = ()


class FederatedMethod(NamedTuple):
    """A federated algorithm.

    Attributes:
      init: `init(key, variables, num_clients) -> FederatedState`; `variables` are one model's
        collections, the common start.
      round: `round(state, batches, key) -> (FederatedState, metrics)`, jitted; the state is
        donated: use the returned one.
    """

    init: Callable[[jax.Array, Variables, int], FederatedState]
    round: Callable[[FederatedState, Batches, jax.Array], tuple[FederatedState, dict]]


class Plan(NamedTuple):
    """The choices that make a method; see `federate` for each."""

    step: LocalStep
    share: SharingRule
    weigh: WeighingRule
    server: ServerUpdate
    memory: MemoryInit
    finish: Finish
    clients: str
    local_epochs: int
    keep_optimizer: bool
    load: Load | None
    train: Train


class ClientResult(NamedTuple):
    """One client's round: its trained leaves and what is reported of it."""

    shared: PyTree
    personal: PyTree
    memory: PyTree
    local: PyTree
    message: PyTree
    losses: jax.Array
    counts: jax.Array
    steps: jax.Array
    finite: jax.Array


def no_memory(shared: PyTree, personal: PyTree) -> PyTree:
    """Clients remember nothing but their personal leaves."""
    del shared, personal
    return ()


def plain_finish(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """A client sends its trained leaves and nothing else; its memory stays as it was."""
    return trained.variables, received.memory, ()


def federate(
    step: LocalStep,
    *,
    share: SharingRule = everything,
    weigh: WeighingRule = by_size,
    server: ServerUpdate | None = None,
    memory: MemoryInit = no_memory,
    finish: Finish = plain_finish,
    clients: str = "auto",
    local_epochs: int = 1,
    keep_optimizer: bool = False,
    load: Load | None = None,
    train: Train = local.train,
) -> FederatedMethod:
    """Composes a federated method from independent choices.

    `round` takes batches {"image": f|u8[K, S, B, ...], "label": i32[K, S, B],
    "valid": bool[K, S, B]}, optionally "participates": bool[K], "size": i32[K] (samples a client
    owns; by default its valid samples of one epoch) and "validation" (a tree of arrays [K, ...],
    whose part of a client is its `Received.validation`). A client that sits out, and one whose
    update is not finite, keeps its personal leaves and method state and has weight 0; where nobody
    counts the shared leaves stay as they are; so it is where `weigh` gives NaN, and the metrics'
    weights are NaN then. A client that makes fewer local epochs has valid=False in the others.
    Random keys are `fold_in(fold_in(key, round), client)`.

    Its metrics are loss f[K] (mean over valid samples; NaN for a client that sits out), step_loss
    f[K, S], risk f[K] (mean loss of the last local epoch), weights f[K] and finite bool[K].

    Args:
      step: the local step, usually `local.gradient_step`; its state starts afresh each round.
      share: the sharing rule, see `fedjax_bn.sharing`.
      weigh: the weighing rule, see `fedjax_bn.aggregation`.
      server: the server's step; plain averaging by default.
      memory: `memory(shared, personal)` -> a client's part of the method state before the first
        round, from the common start.
      finish: `finish(received, trained) -> (variables, memory, message)`, a client's last act of a
        round: the leaves it keeps and uploads, its new part of the method state, and a message to
        the server (a tree of arrays).
      clients: how clients are mapped, see `fedjax_bn.mapping`.
      local_epochs: S steps are this many equal epochs; at least 1.
      keep_optimizer: whether clients keep the local step's state between rounds.
      load: `load(key, image)`, what every step does to `image` [B, ...] of its batch before all
        else: augmentation, or a look-up where the batches hold numbers of samples, not images.
      train: local training over a round's steps, such as `selection.best_of_round(...)`.

    Raises:
      ValueError: at `init`, where `share` needs a batch norm and the model has none, or `clients`
        does not suit K; at `round`, where batches do not fit.
    """
    if local_epochs < 1:
        raise ValueError(f"local_epochs={local_epochs} must be at least 1")
    plan = Plan(
        step=step,
        share=share,
        weigh=weigh,
        server=server or averaging(),
        memory=memory,
        finish=finish,
        clients=clients,
        local_epochs=local_epochs,
        keep_optimizer=keep_optimizer,
        load=load,
        train=train,
    )
    return FederatedMethod(
        init=functools.partial(init_state, plan),
        round=jax.jit(functools.partial(run_round, plan), donate_argnums=0),
    )


def init_state(
    plan: Plan, key: jax.Array, variables: Variables, num_clients: int
) -> FederatedState:
    """The state before the first round: all clients start from `variables`."""
    del key  # nothing random here; methods with random state of their own use it
    if num_clients < 1:
        raise ValueError(f"a federation needs at least one client, not {num_clients}")
    group_size(plan.clients, num_clients)
    # Copies, because rounds donate the state and the caller keeps its variables.
    variables = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), variables)
    shared, personal = split(variables, plan.share(variables))
    local_state = plan.step.init(variables) if plan.keep_optimizer else ()
    return FederatedState(
        round=jnp.zeros((), jnp.int32),
        shared=shared,
        personal=_stack(personal, num_clients),
        weights=normalize(jnp.ones(num_clients)),
        # Copies, because a state must hold no array twice: all of it is donated.
        server=jax.tree.map(jnp.copy, plan.server.init(shared, personal)),
        memory=_stack(plan.memory(shared, personal), num_clients),
        local=_stack(local_state, num_clients),
    )


def run_round(
    plan: Plan, state: FederatedState, batches: Batches, key: jax.Array
) -> tuple[FederatedState, Metrics]:
    """One round: broadcast, local training, aggregation."""
    num_clients = state.weights.shape[0]
    check_batches(batches, num_clients, plan.local_epochs)
    last = jax.vmap(functools.partial(local.last_epoch, local_epochs=plan.local_epochs))
    last_epoch = last(batches["valid"])
    participates = batches.get("participates", jnp.ones(num_clients, bool))
    # Weights known before training spare holding K trained models at once.
    early = None
    if not needs_risks(plan.weigh, num_clients):
        early = weigh_clients(plan, batches, participates, jnp.zeros(num_clients))
    total, result = train_clients(plan, state, batches, last_epoch, early, key)
    counts = participates & result.finite
    risks = jax.vmap(masked_mean)(result.losses, jnp.where(last_epoch, result.counts, 0))
    if early is None:
        weights = weigh_clients(plan, batches, counts, risks)
        mean = weighted_mean(result.shared, weights)
    else:
        weights = normalize(jnp.where(counts, early, 0))
        kept = jnp.where(counts, early, 0).sum()
        mean = restore(jax.tree.map(lambda x: x / kept.astype(x.dtype), total), state.shared)

    sizes = jnp.where(counts, owned_samples(plan, batches), 0)
    uploads = Uploads(mean, result.message, weights, counts, result.steps, sizes)
    updated = plan.server.update(state.shared, uploads, state.server)
    anybody = weights.sum() > 0
    shared, server = select(anybody, updated, (state.shared, state.server))
    # A client that sat out, or failed, keeps what is its own.
    old = (state.personal, state.memory, state.local)
    new = (result.personal, result.memory, result.local)
    personal, memory, local_state = jax.vmap(select)(counts, new, old)
    after = FederatedState(
        round=state.round + 1,
        shared=shared,
        personal=personal,
        weights=jnp.where(anybody, weights, state.weights),
        server=server,
        memory=memory,
        local=local_state,
    )
    loss = jax.vmap(masked_mean)(result.losses, result.counts)
    return after, {
        "loss": jnp.where(participates, loss, jnp.nan),
        "step_loss": result.losses,
        "risk": risks,
        "weights": weights,
        "finite": result.finite,
    }


def train_clients(
    plan: Plan,
    state: FederatedState,
    batches: Batches,
    last_epoch: jax.Array,
    weights: jax.Array | None,
    key: jax.Array,
) -> tuple[PyTree, ClientResult]:
    """Local training of all clients; who sits out costs nothing.

    Args:
      plan: the method.
      state: before the round.
      batches: those of the round.
      last_epoch: bool[K, S].
      weights: f[K], or None if they are not known yet.
      key: the run's random key.

    Returns:
      The sum of w_k y_k over clients whose shared leaves y_k are finite, and all results, stacked
      [K, ...], without y_k. Where weights are not known: (), and results with y_k.
    """
    round_key = jax.random.fold_in(key, state.round)
    num_clients = state.weights.shape[0]
    keys = jax.vmap(functools.partial(jax.random.fold_in, round_key))(jnp.arange(num_clients))
    data = blank_padding(batches) | {"last_epoch": last_epoch}
    participates = batches.get("participates")
    own = (state.personal, state.memory, state.local, data, batches.get("validation", ()), keys)
    stacked = (participates, weights, *own)
    train = functools.partial(train_client, plan, state.shared, state.server)

    def idle(*client: PyTree) -> ClientResult:
        like = jax.eval_shape(train, *client)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        personal, memory, local_state, *_ = client
        kept = {"personal": personal, "memory": memory, "local": local_state}
        return nothing._replace(shared=state.shared, **kept, finite=jnp.ones((), bool))

    def train_one(
        participates: jax.Array | None, weight: jax.Array | None, *client: PyTree
    ) -> tuple[PyTree, ClientResult]:
        if participates is None:
            result = train(*client)
        else:
            result = jax.lax.cond(participates, train, idle, *client)
        if weight is None:
            return (), result
        part = weighted(result.shared, jnp.where(result.finite, weight, 0))
        return part, result._replace(shared=())

    return map_and_sum(train_one, plan.clients, *stacked)


def train_client(
    plan: Plan,
    shared: PyTree,
    server: PyTree,
    personal: PyTree,
    memory: PyTree,
    local_state: PyTree,
    batches: Batches,
    validation: PyTree,
    key: jax.Array,
) -> ClientResult:
    """Local training of one client."""
    variables = join(shared, personal)
    start = local_state if plan.keep_optimizer else plan.step.init(variables)
    received = Received(shared, personal, memory, server, validation)
    trained = plan.train(plan.step, received, variables, start, batches, key, plan.load)
    variables, memory, message = plan.finish(received, trained)
    kept = trained.state if plan.keep_optimizer else ()
    return ClientResult(
        *split_like(variables, shared),
        memory=memory,
        local=kept,
        message=message,
        losses=trained.losses,
        counts=trained.counts,
        steps=trained.steps,
        finite=_all_finite((variables, memory, kept, message, trained.losses)),
    )


def weigh_clients(plan: Plan, batches: Batches, counts: jax.Array, risks: jax.Array) -> jax.Array:
    """Aggregation weights f[K] that sum to 1, or all 0 where nobody counts (bool[K])."""
    sizes = owned_samples(plan, batches)
    weights = plan.weigh(jnp.where(counts, sizes, 0), jnp.where(counts, risks, 0))
    return normalize(jnp.where(counts, weights, 0))


def owned_samples(plan: Plan, batches: Batches) -> jax.Array:
    """i32[K]: samples that clients own, by default the valid ones of their largest epoch."""
    sizes = batches.get("size")
    if sizes is not None:
        return sizes
    valid = batches["valid"]
    epochs = valid.reshape(valid.shape[0], plan.local_epochs, -1)
    return epochs.sum(2, dtype=jnp.int32).max(1)


def client_variables(state: FederatedState) -> Variables:
    """The model that each internal client would use now: collections with leading axis K."""
    num_clients = state.weights.shape[0]
    return join(_stack(state.shared, num_clients), jax.tree.map(jnp.copy, state.personal))


def global_variables(state: FederatedState) -> Variables:
    """The model that an unseen client receives: one copy of the collections.

    Personal leaves enter as their mean with the last round's weights, so that batch norm is
    averaged too (FedBN, Appendix G); the clients' own are not touched.
    """
    personal = weighted_mean(state.personal, state.weights)
    return join(jax.tree.map(jnp.copy, state.shared), personal)


def _stack(tree: PyTree, num_clients: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], num_clients, axis=0), tree)


def _all_finite(tree: PyTree) -> jax.Array:
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in floating]).all()
