"""Weights of each leaf by how far clients are from their mean (Yuan et al., TKDE 2023, CSAC).

    q_k = ||m - w_k|| / sum_j ||m - w_j||,   m = mean_j w_j,   for each leaf w

A client that is farther from the plain mean of a leaf counts more there, so that what few clients
have learned is not averaged away.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.mapping import sum_over
from fedjax_bn.engine.weighing import Weighing

PyTree = Any


def by_divergence() -> Weighing:
    """Returns the weighing rule of CSAC, for any method: semantic aggregation, leaf by leaf.

    The mean m is over the clients that count, unweighted, as in the authors' code; clients with
    equal leaves have equal weights. The weights that a round reports are 1 / K.
    """

    def weigh(
        state: PyTree, sizes: jax.Array, risks: jax.Array, messages: PyTree
    ) -> tuple[jax.Array, PyTree]:
        del risks, messages
        present = (sizes > 0).astype(jnp.result_type(float))
        return present / jnp.maximum(present.sum(), 1), state

    return Weighing(lambda num_clients: (), weigh, by_leaf=distances)


def distances(stacked: PyTree, weights: jax.Array) -> PyTree:
    """Returns weights f[C] of each leaf [C, ...], with the same sum as `weights`, and its zeros."""
    counts = weights > 0
    number = jnp.maximum(counts.sum(dtype=weights.dtype), 1)

    def one(leaf: jax.Array) -> jax.Array:
        dtype = promote(leaf.dtype, weights.dtype)

        def counted(row: jax.Array, counts: jax.Array) -> jax.Array:
            return jnp.where(counts, row.astype(dtype), 0)

        def distance(client: tuple[jax.Array, jax.Array]) -> jax.Array:
            row, counts = client
            return jnp.where(counts, jnp.linalg.norm((counted(row, counts) - mean).ravel()), 0)

        mean = sum_over(counted, leaf, counts) / number.astype(dtype)
        # One client after another, so that no second copy of all uploads is held.
        far = jax.lax.map(distance, (leaf, counts))
        total = far.sum()
        alike = counts.astype(dtype) / number.astype(dtype)
        shares = jnp.where(total > 0, far / jnp.where(total > 0, total, 1), alike)
        return weights.sum() * shares.astype(weights.dtype)

    return jax.tree.map(one, stacked)
