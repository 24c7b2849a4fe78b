"""Aggregation: weighted means over clients, weighing rules, and the server's step.

A weighing rule is a function `(sizes i32[K], risks f[K]) -> f[K]` whose result sums to 1. A client
that does not count in a round (it sits out, or its update is not finite) enters with size 0 and
risk 0 and gets weight 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.dtypes import promote

PyTree = Any
WeighingRule = Callable[[jax.Array, jax.Array], jax.Array]


def by_size(sizes: jax.Array, risks: jax.Array) -> jax.Array:
    """p_k = n_k / sum_j n_j (FedAvg, McMahan et al. 2017, Algorithm 1).

    Args:
      sizes: i32[K], samples a client owns.
      risks: f[K], not used.

    Returns:
      f[K] that sums to 1; all 0 if every size is 0.
    """
    del risks
    return normalize(sizes)


def uniform(sizes: jax.Array, risks: jax.Array) -> jax.Array:
    """p_k = 1/K over the clients with at least one sample (FedBN, authors' digits and Office code).

    Args:
      sizes: i32[K], samples a client owns.
      risks: f[K], not used.

    Returns:
      f[K] that sums to 1; all 0 if every size is 0.
    """
    del risks
    return normalize(sizes > 0)


def normalize(weights: jax.Array) -> jax.Array:
    """Scales nonnegative `weights` [K] to sum 1, in the default float dtype; zeros stay zeros."""
    weights = jnp.asarray(weights).astype(jnp.result_type(float))
    total = weights.sum()
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0)


def weighted_mean(stacked: PyTree, weights: jax.Array) -> PyTree:
    """sum_k w_k x_k / sum_k w_k, leaf by leaf.

    A client of weight 0 is left out altogether: NaN in its leaves does not reach the mean.

    Args:
      stacked: tree of arrays [K, ...].
      weights: f[K], nonnegative, not all 0; need not sum to 1.

    Returns:
      The tree without the leading axis; every leaf keeps its dtype (integers are rounded).
    """
    weights = jnp.asarray(weights)

    def mean(leaf: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        dtype = promote(leaf.dtype, jnp.float32) if floating else jnp.result_type(float)
        w = weights.astype(dtype)
        w = (w / w.sum()).reshape(-1, *(1,) * (leaf.ndim - 1))
        # Not a dot product: TPUs would multiply in bfloat16.
        result = jnp.sum(jnp.where(w > 0, leaf.astype(dtype) * w, 0), axis=0)
        return (result if floating else jnp.round(result)).astype(leaf.dtype)

    return jax.tree.map(mean, stacked)


class ServerUpdate(NamedTuple):
    """The server's step, as a pair of pure functions.

    Attributes:
      init: `init(shared) -> state`, the server's part of the method state.
      update: `update(shared, trained, weights, steps, state) -> (shared, state)`, with the shared
        leaves as the clients received them, as they trained them [K, ...], the weights f[K] that
        sum to 1 and the clients' real step counts i32[K].
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, jax.Array, jax.Array, PyTree], tuple[PyTree, PyTree]]


def averaging() -> ServerUpdate:
    """x' = sum_k p_k y_k (FedAvg): the weighted mean replaces the shared leaves."""

    def update(
        shared: PyTree, trained: PyTree, weights: jax.Array, steps: jax.Array, state: PyTree
    ) -> tuple[PyTree, PyTree]:
        del shared, steps
        return weighted_mean(trained, weights), state

    return ServerUpdate(init=lambda shared: (), update=update)
