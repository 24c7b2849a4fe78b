"""The server's part of a round; `client` has the clients' part, `federation` joins both."""

import jax
import jax.numpy as jnp

from fedjax_bn.aggregation import (
    Aggregate,
    ServerUpdate,
    Weighing,
    WeighingRule,
    normalize,
    restore,
)
from fedjax_bn.client import where_tree
from fedjax_bn.engine.uploads import (
    Sums,
    all_finite,
    counting,
    leaf_weights,
    sum_uploads,
    weigh_uploads,
)
from fedjax_bn.state import FederatedState, Upload


def serve(
    server: ServerUpdate, weigh: WeighingRule | Weighing, state: FederatedState, uploads: Upload
) -> FederatedState:
    """Returns the state after a round; the clients' own parts are those of before.

    Args:
      server: the server's step.
      weigh: the weighing rule.
      state: before the round.
      uploads: stacked, of all rows of the state or of some.
    """
    rows, given = state.weights.shape[0], uploads.client.shape[0]
    population = rows if uploads.population is None else uploads.population.max()
    # A row's number is its client's, except in the state of a cohort, whose rows are in its order.
    numbered = (population == rows) & (uploads.client < rows).all()
    place = jnp.where(numbered, uploads.client, jnp.arange(given, dtype=jnp.int32))
    mine = jax.tree.map(lambda leaf: leaf[place], state.weighing)
    weights, new = weigh_uploads(weigh, mine, uploads)
    sums = sum_uploads(server, weights, uploads, leaf_weights(weigh, weights, uploads))
    after, _ = conclude(server, state, sums, counting(uploads), population)
    weights = jnp.zeros_like(state.weights).at[place].set(normalize(weights))
    return after._replace(
        weights=jnp.where(weights.sum() > 0, weights, state.weights),
        weighing=jax.tree.map(lambda leaf, rows: leaf.at[place].set(rows), state.weighing, new),
    )


def conclude(
    server: ServerUpdate,
    state: FederatedState,
    sums: Sums,
    counts: jax.Array,
    population: jax.Array | int,
) -> tuple[FederatedState, jax.Array]:
    """Makes the server's step from the sums; returns the state, and whether it is finite, bool[].

    A step that is not finite is dropped: the shared leaves and the server's state stay as they are.

    Args:
      server: the step.
      state: before the round.
      sums: over the clients that count.
      counts: bool[C], which clients count.
      population: the number of all clients.
    """
    # The division comes last, so that clients add to sums in any order and on any device.
    mean = jax.tree.map(lambda x: x / sums.weight.astype(x.dtype), sums.leaves)
    message = jax.tree.map(lambda x: x / sums.message_weight.astype(x.dtype), sums.messages)
    count = counts.sum(dtype=float)
    share = count / jnp.asarray(population, float)
    aggregate = Aggregate(restore(mean, state.shared), message, share, count)
    new = server.update(state.shared, aggregate, state.server)
    counted = sums.weight > 0
    # Where nobody counts the mean is 0 / 0; that is no failure of the server.
    finite = all_finite(new) | ~counted
    shared, kept = where_tree(counted & finite, new, (state.shared, state.server))
    return state._replace(round=state.round + 1, shared=shared, server=kept), finite
