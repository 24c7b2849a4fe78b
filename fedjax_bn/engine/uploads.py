"""Weighs and sums uploads; a round keeps these sums, whatever the number of clients."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.aggregation import (
    ServerUpdate,
    Weighing,
    WeighingRule,
    needs_risks,
    normalize,
    weighted,
)
from fedjax_bn.engine.backend import on_cpu
from fedjax_bn.engine.batches import Batches, owned_samples
from fedjax_bn.engine.mapping import sum_over
from fedjax_bn.state import Upload

PyTree = Any
OF_WEIGHTS = ("valid", "size", "participates")  # what `early_weights` reads of batches


class Sums(NamedTuple):
    """Sums over clients of w_k y_k (leaves), w_k, v_k m_k (messages) and v_k."""

    leaves: PyTree
    weight: jax.Array
    messages: PyTree
    message_weight: jax.Array


def counting(upload: Upload) -> jax.Array:
    """Returns which clients count, bool[...]: they take part and their update is finite."""
    return upload.participates & upload.finite


def part_of(
    server: ServerUpdate, weight: jax.Array, upload: Upload, by_leaf: PyTree = None
) -> Sums:
    """Returns one client's part of the sums.

    Args:
      server: weighs the message.
      weight: w_k f[].
      upload: of the client.
      by_leaf: a weight f[] for each shared leaf, in place of `weight`; None for the same one.
    """
    counts = counting(upload)
    weight = jnp.where(counts, weight, 0).astype(jnp.result_type(float))
    share = server.message_weight(weight, upload.size, counts)
    if by_leaf is None:
        leaves = weighted(upload.shared, weight)
    else:
        own = jax.tree.map(lambda w: jnp.where(counts, w, 0).astype(weight.dtype), by_leaf)
        leaves = jax.tree.map(weighted, upload.shared, own)
    return Sums(leaves, weight, weighted(upload.message, share), share)


def sum_uploads(
    server: ServerUpdate, weights: jax.Array, uploads: Upload, by_leaf: PyTree = None
) -> Sums:
    """Sums uploads stacked [C, ...] with weights f[C], or with a tree of f[C] for the leaves."""
    return sum_over(functools.partial(part_of, server), weights, uploads, by_leaf)


def weighs_leaves(rule: WeighingRule | Weighing) -> bool:
    """Returns whether a rule weighs each leaf on its own, which takes all uploads at once."""
    return isinstance(rule, Weighing) and rule.by_leaf is not None


def leaf_weights(
    rule: WeighingRule | Weighing, weights: jax.Array, uploads: Upload
) -> PyTree | None:
    """Returns weights f[C] for each leaf of uploads stacked [C, ...]; None if leaves have none."""
    if not isinstance(rule, Weighing) or rule.by_leaf is None:
        return None
    return rule.by_leaf(uploads.shared, weights)


def early_weights(rule: WeighingRule | Weighing, batches: Batches, epochs: int) -> jax.Array | None:
    """Returns weights f[K] from the batches alone; None if the rule needs uploads.

    A client whose update turns out not to be finite is left out of the sums later.
    """
    rows = batches["valid"].shape[0]
    if isinstance(rule, Weighing) or needs_risks(rule, rows):
        return None
    owned = functools.partial(owned_samples, epochs=epochs)
    known: Batches = {name: batches[name] for name in ("valid", "size") if name in batches}
    sizes = jax.vmap(owned)(known)
    participates = batches.get("participates", jnp.ones(rows, bool))
    weights = rule(jnp.where(participates, sizes, 0), jnp.zeros(rows))
    return normalize(jnp.where(participates, weights, 0))


def weigh_uploads(
    rule: WeighingRule | Weighing, state: PyTree, uploads: Upload
) -> tuple[jax.Array, PyTree]:
    """Returns weights f[C], 0 for clients that do not count, and the rule's new state."""
    counts, rows = counting(uploads), uploads.size.shape[0]
    if isinstance(rule, Weighing):
        sizes, risks = (jnp.where(counts, x, 0) for x in (uploads.size, uploads.risk))
        weights, state = rule.weigh(state, sizes, risks, uploads.message)
    elif needs_risks(rule, rows):
        weights = rule(*(jnp.where(counts, x, 0) for x in (uploads.size, uploads.risk)))
    else:
        # As in `early_weights`: a client that failed has its share, and is left out below.
        sizes = jnp.where(uploads.participates, uploads.size, 0)
        weights = rule(sizes, jnp.zeros(rows))
    return jnp.where(counts, weights, 0), state


def all_finite(tree: PyTree) -> jax.Array:
    """Returns whether all floating numbers of a tree are finite, bool[]."""
    leaves = [x for x in jax.tree.leaves(tree) if x.size]
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    ask = _finite_on_cpu if on_cpu() else lambda leaf: jnp.isfinite(leaf).all()
    answers = jnp.stack([ask(leaf) for leaf in floating] or [jnp.array(True)])
    # Else XLA joins the answers anew for each leaf that they decide: with the 600 leaves of
    # DenseNet121 that was seven eighths of a round's text and four fifths of its compilation.
    return jax.lax.optimization_barrier(answers).all()


def _finite_on_cpu(leaf: jax.Array) -> jax.Array:
    """Multiplies by zeros: the product of a row with a number that is not finite is NaN.

    It takes a fifth of the time of `isfinite` for each number on XLA:CPU.
    """
    rows = leaf.reshape(-1, leaf.shape[-1] if leaf.ndim else 1)
    return (rows @ jnp.zeros(rows.shape[1], leaf.dtype) == 0).all()
