"""Computes weighted sums over clients, and defines weighing rules (see `fedjax_bn.aggregation`)."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import AtLeast0, Rounds, bounded
from fedjax_bn.engine.devices import sum_over
from fedjax_bn.engine.dtypes import promote, wide
from fedjax_bn.sharing import Variables, join

PyTree = Any
# measure(variables, received) -> f[], the metric of a model on a client's validation samples
_Measure = Callable[[Variables, Any], jax.Array]


def by_size(sizes: jax.Array, risks: jax.Array) -> jax.Array:
    """Returns p_k = n_k / sum_j n_j f[K] of sizes i32[K] (FedAvg, McMahan et al. 2017)."""
    del risks
    return normalized(sizes)


def uniform(sizes: jax.Array, risks: jax.Array) -> jax.Array:
    """Returns p_k = 1/K f[K] over the clients with samples (the code of FedBN's authors)."""
    del risks
    return normalized(sizes > 0)


def relative_weights(
    rule: Callable[[jax.Array, jax.Array], jax.Array], sizes: jax.Array
) -> jax.Array | None:
    """Returns the weights f[C] of `by_size` or `uniform` before scaling; None for other rules."""
    # Weights of others may depend on the sizes of all clients.
    if rule not in (by_size, uniform):
        return None
    return (sizes if rule is by_size else sizes > 0).astype(jnp.result_type(float))


def normalized(weights: jax.Array) -> jax.Array:
    """Returns nonnegative weights [K] scaled to sum 1, in the default float dtype; all 0 stay 0."""
    weights = jnp.asarray(weights).astype(jnp.result_type(float))
    total = weights.sum()
    # == and not >, so that a NaN sum stays NaN, which shows the round that the rule failed.
    return jnp.where(total == 0, 0, weights / jnp.where(total == 0, 1, total))


def weighted_mean(stacked: PyTree, weights: jax.Array) -> PyTree:
    """Returns sum_k w_k x_k / sum_k w_k, leaf by leaf of `stacked` [K, ...], without axis K.

    Weights f[K] are nonnegative, not all 0, and need not sum to 1; NaN of a client of weight 0 does
    not reach the mean. Every leaf keeps its dtype (integers are rounded).
    """
    weights = jnp.asarray(weights)
    weights = weights.astype(promote(weights.dtype, jnp.result_type(float)))
    shares = weights / weights.sum()
    # Not a dot product, in which TPUs would multiply float32 in bfloat16.
    return in_dtypes_of(sum_over(weighted, stacked, shares), stacked)


def weighted(tree: PyTree, weight: jax.Array) -> PyTree:
    """Returns w x of one client's arrays, in float32 or wider; 0 where w is 0, even for NaN."""

    def scale(leaf: jax.Array) -> jax.Array:
        # Sums of 16-bit floats would lose what a client of small weight adds.
        leaf = wide(leaf)
        w = weight.astype(leaf.dtype)
        return jnp.where(w > 0, leaf * w, 0)

    return jax.tree.map(scale, tree)


def in_dtypes_of(total: PyTree, like: PyTree) -> PyTree:
    """Returns a sum of `weighted` leaves in the dtypes of `like`; integers are rounded."""

    def cast(x: jax.Array, leaf: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return (x if floating else jnp.round(x)).astype(leaf.dtype)

    return jax.tree.map(cast, total, like)


class Weighing(NamedTuple):
    """A weighing rule that may look at the clients' messages and remember."""

    # `init(num_clients) -> state`, a tree of arrays [K, ...], one row for each client
    init: Callable[[int], PyTree]
    # `weigh(state, sizes, risks, messages) -> (weights f[C], state)` of the C clients of the round;
    # messages are their stacked `LocalUpdate.message`, or the results of `report`. A client that
    # does not count has size and risk 0, and its message is meaningless. With `combine` they may
    # have any sum
    weigh: Callable[[PyTree, jax.Array, jax.Array, PyTree], tuple[jax.Array, PyTree]]
    # `report(received, variables) -> tree of arrays`, what a client uploads for the rule alone,
    # from its `state.Received` and its trained variables; None for nothing
    report: Callable[[Any, Variables], PyTree] | None = None
    # `combine(stacked, start, weights f[C]) -> (leaves, weights f[C])`, what the server takes
    # instead of the weighted mean of the uploaded leaves [C, ...], in float32 or wider, and the
    # weights of the round, which sum to 1; all 0 drop the round. `start` are the shared leaves
    # before it; leaves of a client of weight 0 are meaningless. None for the weighted mean
    combine: Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, jax.Array]] | None = None
    # `reweigh(state, stacked, start, weights f[C]) -> (weights f[C], state)` of a rule that learns
    # the weights of the mean from the same leaves; None for those of `weigh`
    reweigh: Callable[..., tuple[jax.Array, PyTree]] | None = None

    @property
    def reads_leaves(self) -> bool:
        """Whether it looks at the uploaded leaves, which all devices of a mesh then hold."""
        return self.combine is not None or self.reweigh is not None


def by_divergence() -> Weighing:
    r"""Returns the weighing rule of CSAC (Yuan et al., TKDE 2023), for any method.

    The weight of client k for each leaf w grows with its distance from the plain mean of the
    clients that count:

    $q_k = \lVert m - w_k \rVert / \sum_j \lVert m - w_j \rVert$ with the mean $m$ of all $w_j$

    Clients with equal leaves have equal weights. A round reports the weight 1 / n for each of the n
    clients that count.
    """

    def combine(stacked: PyTree, start: PyTree, weights: jax.Array) -> tuple[PyTree, jax.Array]:
        del start
        counts = weights > 0
        number = jnp.maximum(counts.sum(dtype=weights.dtype), 1)

        def shares_of(leaf: jax.Array) -> jax.Array:
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

        shares = jax.tree.map(shares_of, stacked)
        return sum_over(lambda *rows: jax.tree.map(weighted, *rows), stacked, shares), weights

    return Weighing(lambda num_clients: (), plain(uniform), combine=combine)


def plain(rule: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., tuple]:
    """Returns `Weighing.weigh` of a rule of sizes and risks, which leaves the state as it is."""
    return lambda state, sizes, risks, messages: (rule(sizes, risks), state)


@bounded
def generalization_adjustment(
    measure: _Measure | None = None,
    *,
    metric: Literal["loss", "accuracy"] = "loss",
    step: AtLeast0 = 0.2,
    rounds: Rounds = 40,
) -> Weighing:
    r"""Returns the weighing rule of FedDG-GA (Zhang et al., CVPR 2023), for any method.

    A client's gap is how much worse the aggregated model w is on its validation samples than its
    own trained model y_k was; F_k is the loss, or minus the accuracy.

    $g_k = F_k(w) - F_k(y_k)$

    $a_k \leftarrow \mathrm{clip}(a_k + s_r g_k / (K \max_j |g_j|), 0, 1)$, divided by their sum

    $s_r = s (1 - (r - 1) / R)$ for $r = 0, 1, \ldots, R - 1$

    with a_k = 1/K before the first round, which is a plain average. Clients also upload the metrics
    of the received and of the trained model; the server keeps the second until its next round. So
    the weights of a round are those that the authors' code computes after the previous one.

    Differs from the authors' code, which has neither absent clients nor cohorts: an absent client
    keeps its weight, the present ones the sum of theirs, whose mean replaces 1/K, and r counts a
    client's own rounds. The code's metric is accuracy, the paper's the loss.

    Args:
      measure: `methods.selection.validation_loss(...)`, or `validation_score(...)` for accuracy, on
        the batches' "validation". The configuration sets it; None raises ValueError at use.
      metric: what it measures; less loss or more accuracy is better.
      step: s, at least 0; 0.2 in the authors' code.
      rounds: R, over which the step decreases to about 0, at least 1; 40 in the authors' code.
    """
    sign = 1 if metric == "loss" else -1

    def report(received: Any, variables: Variables) -> dict[str, jax.Array]:
        if measure is None:
            option = "measure=selection.validation_loss(...)"
            raise ValueError(f"generalization_adjustment needs {option}")
        start = join(received.shared, received.personal)
        variables = received.with_frozen(variables)
        return {"received": measure(start, received), "trained": measure(variables, received)}

    def weigh(state: PyTree, sizes: jax.Array, risks: jax.Array, messages: PyTree) -> tuple:
        del risks
        present, times = sizes > 0, state["rounds"]
        received = messages["received"].astype(state["trained"].dtype)
        # In a client's first round there is no earlier trained model to compare with.
        gaps = jnp.where(present & (times > 0), sign * (received - state["trained"]), 0)
        # The gaps were measured in the previous round, r = times - 1.
        steps = step * jnp.maximum(1 - (times - 2).astype(gaps.dtype) / rounds, 0)
        weights = _adjusted(state["weight"], gaps, steps, present)
        trained = messages["trained"].astype(received.dtype)
        renewed = {
            "weight": weights,
            "trained": jnp.where(present, trained, state["trained"]),
            "rounds": times + present.astype(times.dtype),
        }
        return jnp.where(present, weights, 0), renewed

    def init(num_clients: int) -> dict[str, jax.Array]:
        return {
            "weight": jnp.full(num_clients, 1 / num_clients),
            "trained": jnp.zeros(num_clients),
            "rounds": jnp.zeros(num_clients, jnp.int32),
        }

    return Weighing(init, weigh, report)


def _adjusted(
    weights: jax.Array, gaps: jax.Array, steps: jax.Array | float, present: jax.Array
) -> jax.Array:
    """Returns the weights f[C] moved by gaps f[C]; the present clients keep their sum."""
    largest = jnp.abs(gaps).max()
    relative = gaps / jnp.where(largest > 0, largest, 1)
    # Present clients divide their old sum among themselves, so absent clients keep their weights.
    mass = jnp.where(present, weights, 0).sum()
    mean = mass / jnp.maximum(present.sum(dtype=weights.dtype), 1)
    moved = jnp.where(present, jnp.clip(weights + steps * relative * mean, 0, 1), 0)
    total = moved.sum()
    scaled = moved * (mass / jnp.where(total > 0, total, 1))
    return jnp.where(present & (total > 0), scaled, weights)
