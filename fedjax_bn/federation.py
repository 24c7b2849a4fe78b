"""The heart: a federated method is a pair of pure functions, and `federate` makes one.

A federation is K clients. The variables of their models are split by a sharing rule into shared
leaves (one copy) and personal leaves (stacked, leading axis K). One call of `round` broadcasts the
shared leaves, trains every client, averages what is shared and leaves what is personal.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_bn import local
from fedjax_bn.aggregation import (
    ServerUpdate,
    WeighingRule,
    averaging,
    by_size,
    normalize,
    weighted_mean,
)
from fedjax_bn.clients import group_size, map_clients
from fedjax_bn.data.batches import Batches, blank_padding, check_batches
from fedjax_bn.data.images import Prepare, standardize
from fedjax_bn.local import Objective, Received, cross_entropy, masked_mean, select
from fedjax_bn.sharing import SharingRule, Variables, everything, join, split, split_like

PyTree = Any
Metrics = dict[str, jax.Array]


class FederatedState(NamedTuple):
    """All that a federation remembers between rounds.

    Attributes:
      round: i32[], rounds finished.
      shared: the shared leaves, one copy; None where a leaf is personal.
      personal: the personal leaves [K, ...]; None where a leaf is shared.
      weights: f[K], aggregation weights of the last round (before the first: uniform).
      server: the server's part of the method state.
      memory: the clients' part of the method state, [K, ...].
    """

    round: jax.Array
    shared: PyTree
    personal: PyTree
    weights: jax.Array
    server: PyTree
    memory: PyTree


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

    objective: Objective
    optimizer: optax.GradientTransformation
    share: SharingRule
    weigh: WeighingRule
    server: ServerUpdate
    clients: str
    local_epochs: int
    keep_optimizer: bool


class ClientResult(NamedTuple):
    """One client's round: its trained leaves and what is reported of it."""

    shared: PyTree
    personal: PyTree
    memory: PyTree
    losses: jax.Array
    counts: jax.Array
    finite: jax.Array


def federate(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    objective: Objective | None = None,
    share: SharingRule = everything,
    weigh: WeighingRule = by_size,
    server: ServerUpdate | None = None,
    clients: str = "auto",
    local_epochs: int = 1,
    keep_optimizer: bool = False,
    prepare: Prepare | None = None,
) -> FederatedMethod:
    """Composes a federated method from independent choices.

    `round` takes batches {"image": f|u8[K, S, B, ...], "label": i32[K, S, B],
    "valid": bool[K, S, B]}, optionally "participates": bool[K] and "size": i32[K] (samples a client
    owns; by default its valid samples of one epoch). A client that sits out, and one whose update
    is not finite, keeps its personal leaves and method state and has weight 0; where nobody counts
    the shared leaves stay as they are. Random keys are `fold_in(fold_in(key, round), client)`.

    Its metrics are loss f[K] (mean over valid samples; NaN for a client that sits out), step_loss
    f[K, S], risk f[K] (mean loss of the last local epoch), weights f[K] and finite bool[K].

    Args:
      model: linen module, images -> logits.
      optimizer: the local optimizer; it starts afresh each round.
      objective: what clients minimize; cross entropy by default.
      share: the sharing rule, see `fedjax_bn.sharing`.
      weigh: the weighing rule, see `fedjax_bn.aggregation`.
      server: the server's step; plain averaging by default.
      clients: how clients are mapped, see `fedjax_bn.clients`.
      local_epochs: S steps are this many equal epochs; at least 1.
      keep_optimizer: whether clients keep their optimizer's state between rounds.
      prepare: turns stored images into what the model reads; by default bytes are standardized
        with mean and standard deviation 0.5.

    Raises:
      ValueError: at `init`, where `share` needs a batch norm and the model has none, or `clients`
        does not suit K; at `round`, where batches do not fit.
    """
    if local_epochs < 1:
        raise ValueError(f"local_epochs={local_epochs} must be at least 1")
    plan = Plan(
        objective=objective or cross_entropy(model, prepare or standardize()),
        optimizer=optimizer,
        share=share,
        weigh=weigh,
        server=server or averaging(),
        clients=clients,
        local_epochs=local_epochs,
        keep_optimizer=keep_optimizer,
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
    memory = plan.optimizer.init(variables["params"]) if plan.keep_optimizer else ()
    return FederatedState(
        round=jnp.zeros((), jnp.int32),
        shared=shared,
        personal=_stack(personal, num_clients),
        weights=normalize(jnp.ones(num_clients)),
        server=plan.server.init(shared),
        memory=_stack(memory, num_clients),
    )


def run_round(
    plan: Plan, state: FederatedState, batches: Batches, key: jax.Array
) -> tuple[FederatedState, Metrics]:
    """One round: broadcast, local training, aggregation."""
    num_clients = state.weights.shape[0]
    check_batches(batches, num_clients, plan.local_epochs)
    result = train_clients(plan, state, batches, key)
    participates = batches.get("participates", jnp.ones(num_clients, bool))
    counts = participates & result.finite
    risks = last_epoch_loss(plan, result)
    weights = weigh_clients(plan, batches, counts, risks)

    steps = (result.counts > 0).sum(1, dtype=jnp.int32)
    updated = plan.server.update(state.shared, result.shared, weights, steps, state.server)
    anybody = weights.sum() > 0
    shared, server = select(anybody, updated, (state.shared, state.server))
    # A client that sat out, or failed, keeps what is its own.
    old = (state.personal, state.memory)
    personal, memory = jax.vmap(select)(counts, (result.personal, result.memory), old)
    new = FederatedState(
        round=state.round + 1,
        shared=shared,
        personal=personal,
        weights=jnp.where(anybody, weights, state.weights),
        server=server,
        memory=memory,
    )
    loss = jax.vmap(masked_mean)(result.losses, result.counts)
    return new, {
        "loss": jnp.where(participates, loss, jnp.nan),
        "step_loss": result.losses,
        "risk": risks,
        "weights": weights,
        "finite": result.finite,
    }


def train_clients(
    plan: Plan, state: FederatedState, batches: Batches, key: jax.Array
) -> ClientResult:
    """Local training of all clients, results stacked [K, ...]; who sits out costs nothing."""
    round_key = jax.random.fold_in(key, state.round)
    clients = jnp.arange(state.weights.shape[0])
    keys = jax.vmap(functools.partial(jax.random.fold_in, round_key))(clients)
    stacked = (state.personal, state.memory, blank_padding(batches), keys)
    train = functools.partial(train_client, plan, state.shared)
    if "participates" not in batches:
        return map_clients(train, plan.clients, *stacked)

    def idle(*client: PyTree) -> ClientResult:
        like = jax.eval_shape(train, *client)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        kept = {"shared": state.shared, "personal": client[0], "memory": client[1]}
        return nothing._replace(**kept, finite=jnp.ones((), bool))

    def train_if(participates: jax.Array, *client: PyTree) -> ClientResult:
        return jax.lax.cond(participates, train, idle, *client)

    return map_clients(train_if, plan.clients, batches["participates"], *stacked)


def train_client(
    plan: Plan, shared: PyTree, personal: PyTree, memory: PyTree, batches: Batches, key: jax.Array
) -> ClientResult:
    """Local training of one client."""
    variables = join(shared, personal)
    state = memory if plan.keep_optimizer else plan.optimizer.init(variables["params"])
    received = Received(shared, personal, memory)
    trained = local.train(plan.objective, plan.optimizer, received, variables, state, batches, key)
    memory = trained.optimizer_state if plan.keep_optimizer else memory
    return ClientResult(
        *split_like(trained.variables, shared),
        memory=memory,
        losses=trained.losses,
        counts=trained.counts,
        finite=_all_finite((trained.variables, memory, trained.losses)),
    )


def last_epoch_loss(plan: Plan, result: ClientResult) -> jax.Array:
    """R_k f[K], the mean training loss of each client's last local epoch (FedCD's risk)."""
    steps = result.losses.shape[1] // plan.local_epochs
    return jax.vmap(masked_mean)(result.losses[:, -steps:], result.counts[:, -steps:])


def weigh_clients(plan: Plan, batches: Batches, counts: jax.Array, risks: jax.Array) -> jax.Array:
    """Aggregation weights f[K] that sum to 1, or all 0 where nobody counts (bool[K])."""
    sizes = batches.get("size")
    if sizes is None:
        sizes = batches["valid"].sum((1, 2), dtype=jnp.int32) // plan.local_epochs
    weights = plan.weigh(jnp.where(counts, sizes, 0), jnp.where(counts, risks, 0))
    return normalize(jnp.where(counts, weights, 0))


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


def _select_clients(chosen: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.vmap(select)(chosen, new, old)


def _all_finite(tree: PyTree) -> jax.Array:
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in floating]).all()
