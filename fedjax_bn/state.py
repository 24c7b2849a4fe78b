"""Defines what a federation remembers between rounds, what travels, and the rows of a cohort."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.engine.weighing import weighted_mean
from fedjax_bn.sharing import FROZEN, MEASURED, OWN, Variables, filled, join, with_frozen, without

PyTree = Any


class Broadcast(NamedTuple):
    """What the server sends to every client of a round.

    Attributes:
      round: i32[], rounds finished.
      shared: the shared leaves, one copy; None where a leaf is personal.
      message: what the server's step sends in addition.
    """

    round: jax.Array
    shared: PyTree
    message: PyTree


class Own(NamedTuple):
    """What stays with a client.

    Attributes:
      personal: its personal leaves; None where a leaf is shared.
      memory: what it remembers, see `client.Client`.
      frozen: the frozen leaves, which all clients have alike; () in rows of several clients.
    """

    personal: PyTree
    memory: PyTree
    frozen: PyTree = ()


class Received(NamedTuple):
    """What a client starts a round with.

    Attributes:
      shared: the shared leaves as the server sent them, None elsewhere.
      personal: the client's personal leaves at the start of the round, None elsewhere; its
        collection `frozen` has the frozen leaves, if there are any.
      memory: what the method remembers of this client.
      server: what the server sends in addition to the shared leaves.
      validation: the client's part of the round's `batches["validation"]`, () if it has none.
      round: i32[], rounds finished.
      client: i32[], its number.
      begun: `client.Begun`, if the round's training has begun before; else None.
    """

    shared: PyTree
    personal: PyTree
    memory: PyTree = ()
    server: PyTree = ()
    validation: PyTree = ()
    round: jax.Array | int = 0
    client: jax.Array | int = 0
    begun: PyTree = None

    def with_frozen(self, variables: Variables) -> Variables:
        """Returns trained variables with the collection `frozen`, for a pass of the model."""
        return with_frozen(variables, self.personal[FROZEN]) if FROZEN in variables else variables


class Upload(NamedTuple):
    """What a client sends back.

    Attributes:
      shared: its trained shared leaves; None where a leaf is personal.
      message: what the method sends in addition.
      size: i32[], the number of its samples.
      risk: f[], mean loss over the valid samples of its last local epoch.
      loss: f[], mean loss over all valid samples.
      finite: bool[], whether its update is finite.
      participates: bool[], whether it takes part; a client that sits out sends nothing that counts.
      client: i32[], its number.
      population: i32[], the number of all clients; None if unknown.
    """

    shared: PyTree
    message: PyTree
    size: jax.Array
    risk: jax.Array
    loss: jax.Array
    finite: jax.Array
    participates: jax.Array
    client: jax.Array
    population: jax.Array | None = None

    @property
    def counts(self) -> jax.Array:
        """Returns which clients count, bool[...]: these have samples, and send a finite update."""
        # Without samples a client has weight 0 in every mean, so nothing may count it elsewhere.
        return self.participates & self.finite & (self.size > 0)


class ServerState(NamedTuple):
    """The server's part of the method state.

    Attributes:
      sent: what clients receive in addition to the shared leaves, `Received.server`.
      kept: what stays at the server, such as an optimizer's moments.
    """

    sent: PyTree = ()
    kept: PyTree = ()


class FederatedState(NamedTuple):
    """All that a federation remembers between rounds.

    Attributes:
      round: i32[], rounds finished.
      shared: the shared leaves, one copy; None where a leaf is personal.
      server: the server's part of the method state.
      weights: f[K], aggregation weights of the last round (before the first: uniform).
      weighing: what the weighing rule remembers, [K, ...].
      personal, memory: of each client, as in `Own`, [K, ...]. On a mesh padding rows may follow, up
        to a multiple of its clients axis.
      frozen: the frozen leaves, one copy, see `sharing.split_frozen`; () for none.
    """

    round: jax.Array
    shared: PyTree
    server: ServerState
    weights: jax.Array
    weighing: PyTree
    personal: PyTree
    memory: PyTree
    frozen: PyTree = ()


def broadcast_of(state: FederatedState) -> Broadcast:
    """Returns what the server sends to every client of the next round."""
    return Broadcast(state.round, state.shared, state.server.sent)


def own_of(state: FederatedState, k: jax.Array | int) -> Own:
    """Returns what row k of the state holds for its client."""
    client_state = jax.tree.map(lambda leaf: leaf[k], Own(state.personal, state.memory))
    return client_state._replace(frozen=state.frozen)


def with_own(state: FederatedState, k: jax.Array | int, own: Own) -> FederatedState:
    """Returns the state with row k replaced by `own`."""
    stacked = Own(state.personal, state.memory)
    own = own._replace(frozen=())
    row = jax.tree.map(lambda rows, row: rows.at[k].set(row), stacked, own)
    return state._replace(personal=row.personal, memory=row.memory)


def completed(state: FederatedState) -> FederatedState:
    """Returns the state with its frozen leaves among the shared ones, to evaluate its models."""
    if not state.frozen:
        return state
    shared = filled(without(state.shared, FROZEN), state.frozen)
    personal = without(state.personal, FROZEN)
    return state._replace(shared=shared, personal=personal, frozen=())


def client_variables(state: FederatedState, k: int | None = None) -> Variables:
    """Returns the models with which internal clients would predict now.

    These are the collections of client k, or of all clients with a leading axis K.
    """
    state = completed(state)
    if k is not None:
        # Copied, because the next round donates the state and so deletes its arrays.
        shared = jax.tree.map(jnp.copy, state.shared)
        return join(shared, jax.tree.map(lambda leaf: leaf[k], state.personal))
    num_clients = state.weights.shape[0]
    personal = jax.tree.map(lambda leaf: jnp.copy(leaf[:num_clients]), state.personal)
    return join(stack(state.shared, num_clients), personal)


def global_variables(state: FederatedState) -> Variables:
    """Returns the model that an unseen client receives: one copy of the collections.

    Personal leaves are averaged with the last round's weights, so that batch norm is averaged too
    (FedBN, Appendix G); the clients' own leaves are unchanged.
    """
    state, num_clients = completed(state), state.weights.shape[0]
    personal = jax.tree.map(lambda leaf: leaf[:num_clients], state.personal)
    # A client of weight 0 is left out, so that the NaN of a failed client does not reach the mean.
    personal = unseen_personal(personal, state.weights)
    return join(jax.tree.map(jnp.copy, state.shared), personal)


def unseen_personal(personal: PyTree, weights: jax.Array) -> PyTree:
    """Returns what an unseen client has for personal leaves [K, ...]: their weighted mean.

    What clients have measured of their own data (`sharing.MEASURED`) and the models with which they
    predict instead of the shared one (`sharing.OWN`) are 0 instead.
    """
    mean = weighted_mean(personal, weights)
    zeroed = {name: mean[name] for name in (MEASURED, OWN) if name in mean}
    return {**mean, **jax.tree.map(jnp.zeros_like, zeroed)} if zeroed else mean


def take_rows(state: FederatedState, client: jax.Array) -> FederatedState:
    """Returns the state of a cohort: its clients' rows, weights of 0, and the rest unchanged.

    `client` i32[C] are numbers of the K clients; a number of K or more makes a padding row, which
    must not participate.
    """
    # JAX clamps an index that is too large, so a padding row is a copy of the last client's.
    rows = (state.weighing, state.personal, state.memory)
    weighing, personal, memory = jax.tree.map(lambda leaf: leaf[client], rows)
    weights = jnp.zeros(client.shape, state.weights.dtype)
    return state._replace(weights=weights, weighing=weighing, personal=personal, memory=memory)


def put_rows(state: FederatedState, cohort: FederatedState, client: jax.Array) -> FederatedState:
    """Returns the state of all clients after a round of a cohort, whose state `take_rows` made.

    `state` is of all clients before the round, and `client` i32[C] as in `take_rows`.
    """

    def put(rows: jax.Array, cohort_rows: jax.Array) -> jax.Array:
        # Padding rows have numbers of K or more, outside the array, and are dropped.
        return rows.at[client].set(cohort_rows, mode="drop")

    all_rows, rows_of_cohort = ((s.weighing, s.personal, s.memory) for s in (state, cohort))
    weighing, personal, memory = jax.tree.map(put, all_rows, rows_of_cohort)
    weights = put(jnp.zeros_like(state.weights), cohort.weights)
    # If no client counts, the last weights stay.
    weights = jnp.where(cohort.weights.sum() > 0, weights, state.weights)
    return cohort._replace(weights=weights, weighing=weighing, personal=personal, memory=memory)


def stack(tree: PyTree, num_clients: int) -> PyTree:
    """Returns the tree repeated for every client, [K, ...]."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), tree)


def traffic(method: Any, state: FederatedState, batches: dict[str, PyTree]) -> dict[str, int]:
    """Returns the bytes that one client receives and sends in a round, {"down": int, "up": int}.

    `batches` are one client's of a round, without the axis K. Only shapes are read.
    """
    sent = jax.eval_shape(broadcast_of, state)
    client_state = jax.eval_shape(lambda state: own_of(state, 0), state)
    batches = batches | {"client": jax.ShapeDtypeStruct((), jnp.int32)}
    key = jax.eval_shape(jax.random.key, 0)
    _, upload = jax.eval_shape(method.client, sent, client_state, batches, key)
    down, up = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        for tree in (sent, upload)
    )
    return {"down": down, "up": up}
