"""The server's half of a round for uploads that arrive one after another, and are not kept.

`aggregation.server_step` needs all uploads of a round. With weights that are known up to a common
factor, sums are enough.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from fedjax_bn import aggregation
from fedjax_bn.aggregation import ServerUpdate, Sums, Weighing, WeighingRule
from fedjax_bn.engine.weighing import relative_weights
from fedjax_bn.state import FederatedState, Upload


class Running(NamedTuple):
    """A round of K clients while uploads arrive."""

    sums: Sums  # over the uploads so far
    # f[K], their weights before scaling; 0 for clients that sent none or do not count
    weights: jax.Array
    counts: jax.Array  # bool[K], which clients have sent an upload that counts


class Adding(NamedTuple):
    """The server's half of a round, as pure functions; it equals `server_step` up to rounding."""

    # `begin(num_clients, upload) -> Running` without uploads; `upload` may be shapes
    begin: Callable[[int, Upload], Running]
    # `add(running, upload) -> Running`, jitted; donates `running`
    add: Callable[[Running, Upload], Running]
    # `end(state, running) -> (state, finite)`, jitted, as `server_step` returns them; row k of the
    # state must belong to client k
    end: Callable[[FederatedState, Running], tuple[FederatedState, jax.Array]]


def adding(server: ServerUpdate, weigh: WeighingRule | Weighing) -> Adding | None:
    """Returns the server's half by sums, or None if weights depend on other clients' uploads."""
    if isinstance(weigh, Weighing):
        return None
    relative = functools.partial(relative_weights, weigh)
    if jax.eval_shape(relative, jax.ShapeDtypeStruct((), jnp.int32)) is None:
        return None

    def part(upload: Upload) -> Sums:
        # The common factor is the same for all clients, so that it cancels at the end.
        return aggregation.weighted_part(server, cast(jax.Array, relative(upload.size)), upload)

    def begin(num_clients: int, upload: Upload) -> Running:
        like = jax.eval_shape(part, upload)
        sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return Running(sums, jnp.zeros(num_clients), jnp.zeros(num_clients, bool))

    def add(running: Running, upload: Upload) -> Running:
        addend, k = part(upload), upload.client
        return Running(
            sums=jax.tree.map(jnp.add, running.sums, addend),
            weights=running.weights.at[k].set(addend.weight),
            counts=running.counts.at[k].set(upload.counts),
        )

    def end(state: FederatedState, running: Running) -> tuple[FederatedState, jax.Array]:
        counts = running.counts
        after, finite = aggregation.conclude(server, state, running.sums, counts, len(counts))
        return after._replace(weights=aggregation.last_weights(running.weights, state)), finite

    return Adding(begin, jax.jit(add, donate_argnums=0), jax.jit(end))
