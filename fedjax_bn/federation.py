"""The heart: a federated method is a client and a server, and `federate` makes one of the two.

A federation is K clients. The variables of their models are split by a sharing rule into shared
leaves (one copy) and personal leaves (stacked, leading axis K). One call of `round` broadcasts the
shared leaves, trains every client, averages what is shared and leaves what is personal. A round is
over the clients that its batches name, all of them or a cohort: rows of the state are rows of the
batches (see `fedjax_bn.batches`; `take_rows` and `put_rows` gather and scatter those of the state).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.aggregation import (
    Aggregate,
    ServerUpdate,
    Weighing,
    WeighingRule,
    averaging,
    by_size,
    normalize,
    restore,
)
from fedjax_bn.batches import Batches, check_batches, last_epoch, owned_samples
from fedjax_bn.client import Client, LocalUpdate, Received, where_tree
from fedjax_bn.mapping import group_size, map_and_sum
from fedjax_bn.sharing import SharingRule, Variables, everything, split, split_like
from fedjax_bn.state import (
    Broadcast,
    FederatedState,
    Own,
    Upload,
    broadcast_of,
    client_variables,
    global_variables,
    own_of,
    put_rows,
    stack,
    take_rows,
    with_own,
)
from fedjax_bn.task import masked_mean
from fedjax_bn.uploads import (
    Sums,
    counting,
    early_weights,
    part_of,
    sum_uploads,
    weigh_uploads,
)

__all__ = [
    "Broadcast",
    "FederatedMethod",
    "FederatedState",
    "Own",
    "Upload",
    "broadcast_of",
    "client_variables",
    "federate",
    "global_variables",
    "own_of",
    "put_rows",
    "take_rows",
    "traffic",
    "with_own",
]

PyTree = Any
Metrics = dict[str, jax.Array]


class FederatedMethod(NamedTuple):
    """A federated algorithm, as pure functions.

    Attributes:
      init: `init(key, variables, num_clients) -> FederatedState`; `variables` are one model's
        collections, the common start.
      round: `round(state, batches, key) -> (FederatedState, metrics)`, jitted; the state is
        donated: use the returned one. It is `client` for all rows and `server`.
      client: `client(broadcast, own, batches, key) -> (Own, Upload)`, jitted: one client's part,
        with batches without the axis K and with "client" i32[]; `key` is the run's.
      server: `server(state, uploads) -> state`, jitted, with uploads stacked along K; the clients'
        own part of the state stays as it is.
    """

    init: Callable[[jax.Array, Variables, int], FederatedState]
    round: Callable[[FederatedState, Batches, jax.Array], tuple[FederatedState, Metrics]]
    client: Callable[[Broadcast, Own, Batches, jax.Array], tuple[Own, Upload]]
    server: Callable[[FederatedState, Upload], FederatedState]


class _Plan(NamedTuple):
    """The choices that make a method; see `federate` for each."""

    client: Client
    server: ServerUpdate
    share: SharingRule
    weigh: WeighingRule | Weighing
    clients: str


def federate(
    client: Client,
    *,
    server: ServerUpdate | None = None,
    share: SharingRule = everything,
    weigh: WeighingRule | Weighing = by_size,
    clients: str = "auto",
) -> FederatedMethod:
    """Composes a federated method from independent choices.

    A client that sits out, and one whose update is not finite, keeps its personal leaves and memory
    and has weight 0; where nobody counts the shared leaves stay as they are; so it is where `weigh`
    gives NaN, and the metrics' weights are NaN then; and where the server's step, what it would
    share and keep, is not finite, and server_finite is False then. A client that makes fewer local
    epochs has valid=False in the others. Random keys are `fold_in(fold_in(key, round), client)`.

    A round's metrics are loss f[K] (mean over valid samples; NaN for a client that sits out),
    step_loss f[K, S], risk f[K] (mean loss of the last local epoch), weights f[K], finite
    bool[K] and server_finite bool[].

    Args:
      client: what a client does, usually `client.train_locally(step)`.
      server: the server's step; plain averaging by default.
      share: the sharing rule, see `fedjax_bn.sharing`.
      weigh: the weighing rule, see `fedjax_bn.aggregation`.
      clients: how clients are mapped, see `fedjax_bn.mapping`.

    Raises:
      ValueError: at `init`, where `share` needs a batch norm and the model has none, or `clients`
        does not suit K; at `round`, where batches do not fit.
    """
    plan = _Plan(client, server or averaging(), share, weigh, clients)
    return FederatedMethod(
        init=functools.partial(_init, plan),
        round=jax.jit(functools.partial(_round, plan), donate_argnums=0),
        client=jax.jit(lambda *arguments: _client(plan, *arguments)[:2]),
        server=jax.jit(functools.partial(_server, plan)),
    )


def traffic(method: FederatedMethod, state: FederatedState, batches: Batches) -> dict[str, int]:
    """{"down": bytes of a broadcast, "up": bytes of an upload}, of one client and round.

    Args:
      method: the method.
      state: its state; only shapes count, here and in the batches.
      batches: a round's, without the axis K.
    """
    sent = jax.eval_shape(broadcast_of, state)
    own = jax.eval_shape(lambda state: own_of(state, 0), state)
    batches = batches | {"client": jax.ShapeDtypeStruct((), jnp.int32)}
    key = jax.eval_shape(jax.random.key, 0)
    _, upload = jax.eval_shape(method.client, sent, own, batches, key)
    return {"down": _bytes(sent), "up": _bytes(upload)}


def _init(plan: _Plan, key: jax.Array, variables: Variables, num_clients: int) -> FederatedState:
    """The state before the first round: all clients start from `variables`."""
    del key  # nothing random here; methods with random state of their own use it
    if num_clients < 1:
        raise ValueError(f"a federation needs at least one client, not {num_clients}")
    group_size(plan.clients, num_clients)
    # Copies, because rounds donate the state and the caller keeps its variables.
    variables = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), variables)
    shared, personal = split(variables, plan.share(variables))
    memory = plan.client.init(shared, personal)
    weighing = plan.weigh.init(num_clients) if isinstance(plan.weigh, Weighing) else ()
    return FederatedState(
        round=jnp.zeros((), jnp.int32),
        shared=shared,
        # Copies, because a state must hold no array twice: all of it is donated.
        server=jax.tree.map(jnp.copy, plan.server.init(shared, personal)),
        weights=normalize(jnp.ones(num_clients)),
        weighing=jax.tree.map(jnp.copy, weighing),
        personal=stack(personal, num_clients),
        memory=stack(memory, num_clients),
    )


def _round(
    plan: _Plan, state: FederatedState, batches: Batches, key: jax.Array
) -> tuple[FederatedState, Metrics]:
    """One round: broadcast, local training, aggregation."""
    rows = state.weights.shape[0]
    check_batches(batches, rows, plan.client.epochs)
    batches = {"client": jnp.arange(rows, dtype=jnp.int32)} | batches
    population = batches.pop("population", None)
    broadcast = broadcast_of(state)
    # Weights known before training spare holding all trained models at once.
    early = early_weights(plan.weigh, batches, plan.client.epochs)

    def one(weight: jax.Array | None, own: Own, batches: Batches) -> tuple[PyTree, tuple]:
        own, upload, losses = _client(plan, broadcast, own, batches, key)
        if weight is None:
            return (), (own, upload, losses)
        part = part_of(plan.server, weight, upload)
        return part, (own, upload._replace(shared=(), message=()), losses)

    old = Own(state.personal, state.memory)
    sums, (own, uploads, losses) = map_and_sum(one, plan.clients, early, old, batches)
    if early is None:
        weights, weighing = weigh_uploads(plan.weigh, state.weighing, uploads)
        sums = sum_uploads(plan.server, weights, uploads)
    else:
        weights, weighing = jnp.where(counting(uploads), early, 0), state.weighing
    population = rows if population is None else population
    weights = normalize(weights)
    after, finite = _conclude(plan, state, sums, counting(uploads), population)
    after = after._replace(
        weights=jnp.where(weights.sum() > 0, weights, state.weights),
        weighing=weighing,
        personal=own.personal,
        memory=own.memory,
    )
    return after, {
        "loss": jnp.where(uploads.participates, uploads.loss, jnp.nan),
        "step_loss": losses,
        "risk": uploads.risk,
        "weights": weights,
        "finite": uploads.finite,
        "server_finite": finite,
    }


def _client(
    plan: _Plan, broadcast: Broadcast, own: Own, batches: Batches, key: jax.Array
) -> tuple[Own, Upload, jax.Array]:
    """One client's part of a round; who sits out costs nothing where clients are mapped in turn."""
    who, size = batches["client"], owned_samples(batches, plan.client.epochs)
    key = jax.random.fold_in(jax.random.fold_in(key, broadcast.round), who)
    validation = batches.get("validation", ())
    data = {name: batches[name] for name in ("image", "label", "valid")}
    data |= {"source": batches["source"]} if "source" in batches else {}
    last = last_epoch(batches["valid"], plan.client.epochs)
    received = Received(broadcast.shared, own.personal, own.memory, broadcast.message, validation)

    def train(received: Received) -> tuple[Own, PyTree, LocalUpdate, jax.Array]:
        update = plan.client.run(received, data | {"last_epoch": last}, key)
        shared, personal = split_like(update.variables, broadcast.shared)
        new = Own(personal, update.memory)
        finite = _all_finite((shared, new, update.message, update.losses))
        # A client that fails keeps what is its own.
        return where_tree(finite, new, own), shared, _told(update), finite

    def idle(received: Received) -> tuple[Own, PyTree, LocalUpdate, jax.Array]:
        like = jax.eval_shape(train, received)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return own, *nothing[1:3], jnp.ones((), bool)

    participates = batches.get("participates")
    if participates is None:
        participates = jnp.ones((), bool)
        own, shared, update, finite = train(received)
    else:
        own, shared, update, finite = jax.lax.cond(participates, train, idle, received)
    losses, counts = update.losses, update.counts
    upload = Upload(
        shared=shared,
        message=update.message,
        size=size,
        risk=masked_mean(losses, jnp.where(last, counts, 0)),
        loss=masked_mean(losses, counts),
        finite=finite,
        participates=participates,
        client=who,
        population=batches.get("population"),
    )
    return own, upload, losses


def _told(update: LocalUpdate) -> LocalUpdate:
    """What is told of a client's round: all but what it keeps."""
    return update._replace(variables=(), memory=())


def _server(plan: _Plan, state: FederatedState, uploads: Upload) -> FederatedState:
    """The server's part of a round; uploads may be of some rows of the state only."""
    rows, given = state.weights.shape[0], uploads.client.shape[0]
    population = rows if uploads.population is None else uploads.population.max()
    # Rows are numbered by client, but in the state of a cohort, whose rows are in its order.
    numbered = (population == rows) & (uploads.client < rows).all()
    place = jnp.where(numbered, uploads.client, jnp.arange(given, dtype=jnp.int32))
    mine = jax.tree.map(lambda leaf: leaf[place], state.weighing)
    weights, new = weigh_uploads(plan.weigh, mine, uploads)
    after, _ = _conclude(
        plan, state, sum_uploads(plan.server, weights, uploads), counting(uploads), population
    )
    weights = jnp.zeros_like(state.weights).at[place].set(normalize(weights))
    return after._replace(
        weights=jnp.where(weights.sum() > 0, weights, state.weights),
        weighing=jax.tree.map(lambda leaf, rows: leaf.at[place].set(rows), state.weighing, new),
    )


def _conclude(
    plan: _Plan, state: FederatedState, sums: Sums, counts: jax.Array, population: jax.Array | int
) -> tuple[FederatedState, jax.Array]:
    """The server's step, from the sums over clients, and whether it is finite, bool[].

    One that is not is not taken: what the server shares and keeps stays as it was.
    """
    mean = jax.tree.map(lambda x: x / sums.weight.astype(x.dtype), sums.leaves)
    message = jax.tree.map(lambda x: x / sums.message_weight.astype(x.dtype), sums.messages)
    share = counts.sum(dtype=float) / jnp.asarray(population, float)
    aggregate = Aggregate(restore(mean, state.shared), message, share)
    new = plan.server.update(state.shared, aggregate, state.server)
    counted = sums.weight > 0
    finite = _all_finite(new) | ~counted
    shared, server = where_tree(counted & finite, new, (state.shared, state.server))
    return state._replace(round=state.round + 1, shared=shared, server=server), finite


def _all_finite(tree: PyTree) -> jax.Array:
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floating] or [jnp.array(True)]).all()


def _bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
