"""Sums over clients: what a round reduces to, whatever the number of clients."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.aggregation import ServerUpdate, weighted
from fedjax_bn.state import Upload

PyTree = Any


class Sums(NamedTuple):
    """What one reduction over clients gives: sums of w_k y_k, w_k, v_k m_k and v_k."""

    leaves: PyTree
    weight: jax.Array
    messages: PyTree
    message_weight: jax.Array


def counting(upload: Upload) -> jax.Array:
    """Whether a client counts, bool[...]: it takes part and its update is finite."""
    return upload.participates & upload.finite


def part_of(server: ServerUpdate, weight: jax.Array, upload: Upload) -> Sums:
    """One client's part of the sums."""
    counts = counting(upload)
    weight = jnp.where(counts, weight, 0).astype(jnp.result_type(float))
    share = server.message_weight(weight, upload.size, counts)
    return Sums(weighted(upload.shared, weight), weight, weighted(upload.message, share), share)


def sum_uploads(server: ServerUpdate, weights: jax.Array, uploads: Upload) -> Sums:
    """The sums over uploads stacked [C, ...], with weights f[C]."""
    parts = jax.vmap(functools.partial(part_of, server))(weights, uploads)
    return jax.tree.map(lambda x: x.sum(0), parts)
