"""Aggregation: weighted means over clients, weighing rules, and the server's step.

A weighing rule is a function `(sizes i32[K], risks f[K]) -> f[K]` whose result sums to 1. A client
that does not count in a round (it sits out, or its update is not finite) gets weight 0; one that
sits out enters with size 0, and into a rule that looks at the risks one that failed does too, with
risk 0. A rule that remembers is a `Weighing`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.engine.devices import sum_over
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.extrapolation import risk_extrapolation as risk_extrapolation
from fedjax_bn.engine.weighing import Weighing as Weighing
from fedjax_bn.engine.weighing import by_divergence as by_divergence
from fedjax_bn.engine.weighing import generalization_adjustment as generalization_adjustment

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


def needs_risks(rule: WeighingRule, num_clients: int) -> bool:
    """Returns whether a weighing rule reads the risks, which are known only after training."""
    sizes, risks = jnp.zeros(num_clients, jnp.int32), jnp.zeros(num_clients)
    jaxpr = jax.make_jaxpr(rule)(sizes, risks).jaxpr
    used = [value for equation in jaxpr.eqns for value in equation.invars] + jaxpr.outvars
    return any(value is jaxpr.invars[1] for value in used)


def normalize(weights: jax.Array) -> jax.Array:
    """Scales nonnegative `weights` [K] to sum 1, in the default float dtype; zeros stay zeros.

    One NaN makes all NaN.
    """
    weights = jnp.asarray(weights).astype(jnp.result_type(float))
    total = weights.sum()
    return jnp.where(total == 0, 0, weights / jnp.where(total == 0, 1, total))


def weighted_mean(stacked: PyTree, weights: jax.Array) -> PyTree:
    """Returns sum_k w_k x_k / sum_k w_k, leaf by leaf.

    A client of weight 0 is left out altogether: NaN in its leaves does not reach the mean.

    Args:
      stacked: tree of arrays [K, ...].
      weights: f[K], nonnegative, not all 0; need not sum to 1.

    Returns:
      The tree without the leading axis; every leaf keeps its dtype (integers are rounded).
    """
    weights = jnp.asarray(weights)
    weights = weights.astype(promote(weights.dtype, jnp.result_type(float)))
    shares = weights / weights.sum()
    # Not a dot product: TPUs would multiply in bfloat16.
    return restore(sum_over(weighted, stacked, shares), stacked)


def weighted(tree: PyTree, weight: jax.Array) -> PyTree:
    """Returns w x, leaf by leaf, in the dtype of sums; 0 where w is 0, even if x is NaN.

    Args:
      tree: one client's arrays.
      weight: f[], nonnegative.
    """

    def scale(leaf: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        dtype = promote(leaf.dtype, jnp.float32) if floating else jnp.result_type(float)
        w = weight.astype(dtype)
        return jnp.where(w > 0, leaf.astype(dtype) * w, 0)

    return jax.tree.map(scale, tree)


def restore(total: PyTree, like: PyTree) -> PyTree:
    """Returns a sum of `weighted` leaves in the dtypes of `like`; integers are rounded."""

    def cast(x: jax.Array, leaf: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return (x if floating else jnp.round(x)).astype(leaf.dtype)

    return jax.tree.map(cast, total, like)


class Aggregate(NamedTuple):
    """What the server has of a round, after one reduction over its clients.

    Attributes:
      mean: the weighted mean of the shared leaves that the clients uploaded; None elsewhere.
      message: the mean of their messages, with the weights that the server's step names.
      share: f[], the part of the whole population that counts in the round.
      count: f[], how many clients that are; None if unknown.
    """

    mean: PyTree
    message: PyTree
    share: jax.Array
    count: jax.Array | None = None  # type: ignore[assignment]


class ServerState(NamedTuple):
    """The server's part of the method state.

    Attributes:
      sent: what clients receive in addition to the shared leaves, `Received.server`.
      kept: what stays at the server, such as an optimizer's moments.
    """

    sent: PyTree = ()
    kept: PyTree = ()


# (weight f[], size i32[], counts bool[]) -> f[], with what a client's message enters its mean
MessageWeight = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _as_leaves(weight: jax.Array, size: jax.Array, counts: jax.Array) -> jax.Array:
    """Messages are averaged with the weights of the leaves."""
    del size, counts
    return weight


def equal_messages(weight: jax.Array, size: jax.Array, counts: jax.Array) -> jax.Array:
    """Messages of all clients that count are averaged alike."""
    del size
    return counts.astype(weight.dtype)


def messages_by_size(weight: jax.Array, size: jax.Array, counts: jax.Array) -> jax.Array:
    """Messages are averaged by the clients' numbers of samples, whatever the weighing rule."""
    return jnp.where(counts, size, 0).astype(weight.dtype)


class ServerUpdate(NamedTuple):
    """The server's step, as a pair of pure functions.

    Attributes:
      init: `init(shared, personal) -> ServerState`, from the common start of all clients;
        `sharing.join(shared, personal)` are its variables.
      update: `update(shared, aggregate, state) -> (shared, ServerState)`, with the shared leaves
        as the clients received them.
      message_weight: with what weights the clients' messages are averaged.
    """

    init: Callable[[PyTree, PyTree], ServerState]
    update: Callable[[PyTree, Aggregate, ServerState], tuple[PyTree, ServerState]]
    message_weight: MessageWeight = _as_leaves


def averaging(
    start: Callable[[PyTree, PyTree], PyTree] | None = None,
    renew: Callable[[PyTree, Aggregate], PyTree] | None = None,
    message_weight: MessageWeight = _as_leaves,
) -> ServerUpdate:
    r"""Returns FedAvg's step: the weighted mean replaces the shared leaves.

    $x' = \sum_k p_k y_k$

    Args:
      start: `start(shared, personal) -> tree`, what the server sends in the first round in addition
        to the shared leaves; by default nothing.
      renew: `renew(sent, aggregate) -> tree`, what it sends in the next round, in the dtypes of
        `sent`; by default what it sent before.
      message_weight: with what weights the clients' messages are averaged.
    """

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        return ServerState(sent=start(shared, personal) if start else ())

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        del shared
        if renew is None:
            return aggregate.mean, state
        new = renew(state.sent, aggregate)
        sent = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), new, state.sent)
        return aggregate.mean, state._replace(sent=sent)

    return ServerUpdate(init, update, message_weight)


def server_optimizer(optimizer: optax.GradientTransformation) -> ServerUpdate:
    r"""Returns the step of an optimizer whose gradient is $x - \sum_k p_k y_k$.

    (Reddi et al. 2021, Algorithm 1.) It sees shared parameters only; running statistics are plainly
    averaged, so that none can become negative.

    Args:
      optimizer: any optax transformation; `optax.sgd(1.0)` is `averaging`.
    """

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        del personal
        return ServerState(kept=optimizer.init(shared["params"]))

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        params = shared["params"]
        gradient = jax.tree.map(jnp.subtract, params, aggregate.mean["params"])
        with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
            updates, kept = optimizer.update(gradient, state.kept, params)
        params = optax.apply_updates(params, updates)
        return {**aggregate.mean, "params": params}, ServerState(kept=kept)

    return ServerUpdate(init, update)
