"""Robust weighing rules, for federations in which some clients may send anything.

One client can move a mean as far as it likes. Each function here returns a `Weighing` whose
`combine` computes something else from all uploaded shared leaves [C, ...], for any method whose
clients send nothing else.

Clients count alike, whatever sizes they report, because a size is a claim too. With
`weights="by_size"` a client of n samples counts as n clients with the same upload. The weights
of a round are those of the result: of the clients that Krum keeps, of the geometric median's last
iteration, the share of numbers that a median or trimmed mean takes from a client, or the factors of
clipping. Personal leaves are averaged with them for an unseen client (`state.global_variables`), in
a mean that no rule bounds.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.arguments.ranges import Above0, Range, Steps, StepsOr0, bounded
from fedjax_bn.engine.devices import sum_over
from fedjax_bn.engine.dtypes import wide
from fedjax_bn.engine.weighing import Weighing, normalized, uniform, weighted

PyTree = Any
_Combine = Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, jax.Array]]
# (the weight of clients with lesser values [...], all weights [C], k) -> what counts of client k's.
_Part = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# A fraction that can be cut at both ends.
_BelowHalf = Annotated[float, Range("at least 0 and below 0.5", lambda value: 0 <= value < 0.5)]
_Weights = Literal["uniform", "by_size"]


@bounded
def coordinate_median(*, weights: _Weights = "uniform") -> Weighing:
    r"""Returns the rule of the median of each number over the clients that count.

    (Yin et al., ICML 2018, Option I.) With weights w and $W = \sum_k w_k$ it is the mean of the
    least value up to which the weights sum to at least W/2, and of the greatest from which on they
    do: of an even number of equal weights the two middle values are averaged.

    Args:
      weights: `uniform`, or `by_size` for the clients' numbers of samples.
    """

    def part(below: jax.Array, w: jax.Array, k: jax.Array) -> jax.Array:
        lower, upper = (x.astype(jnp.int32) for x in _are_middle(below, w[k], w))
        return lower + upper

    return _rule(_mean_of_parts(part, lambda w: jnp.asarray(2)), weights)


@bounded
def trimmed_mean(*, trim: _BelowHalf = 0.25, weights: _Weights = "uniform") -> Weighing:
    r"""Returns the rule of the mean of each number without its least and greatest values.

    (Yin et al., ICML 2018, Option II.) Of n clients that count, $\lfloor \beta n \rfloor$ are left
    out at each end, other ones for each number. With weights by size $\beta W$ of the sum W of the
    weights is left out at each end, so that a client on the border counts with what is left of it.

    Args:
      trim: beta, at least 0 and below 0.5; 0 gives the mean of all.
      weights: `uniform`, or `by_size` for the clients' numbers of samples.
    """

    def ends(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = w.sum(dtype=w.dtype)
        if weights == "by_size":
            total = total.astype(jnp.result_type(float))
            return trim * total, total - trim * total
        # Rounded, so that 0.29 of 100 are 29, and not 28 because 0.29 * 100 is 28.999....
        cuts = np.floor(np.round(trim * np.arange(len(w) + 1), 9)).astype(np.int32)
        cut = jnp.asarray(cuts)[total]
        return cut, total - cut

    def part(below: jax.Array, w: jax.Array, k: jax.Array) -> jax.Array:
        low, high = ends(w)
        start, end = below.astype(low.dtype), (below + w[k]).astype(low.dtype)
        return jnp.maximum(jnp.minimum(end, high) - jnp.maximum(start, low), 0)

    return _rule(_mean_of_parts(part, lambda w: ends(w)[1] - ends(w)[0]), weights)


@bounded
def krum(*, malicious: StepsOr0 = 1, keep: Steps = 1) -> Weighing:
    r"""Returns the rule of Krum, or of Multi-Krum if it keeps several clients.

    (Blanchard et al., NeurIPS 2017, section 4.) Of n clients that count, the score of client k is
    the sum of its squared distances to the n - f - 2 clients nearest to it, over all shared leaves
    together. The result is the mean of the uploads with the least scores, of equal ones the first.
    The guarantee needs n >= 2f + 3: with fewer clients weights are 0 and shared leaves stay.

    Args:
      malicious: f, how many of the clients may send anything, at least 0; a round with fewer than
        2f + 3 rows raises ValueError.
      keep: how many uploads are averaged, at least 1; n - f if these are fewer.
    """
    least_clients = 2 * malicious + 3

    def combine(stacked: PyTree, start: PyTree, weights: jax.Array) -> tuple[PyTree, jax.Array]:
        del start
        counts, rows = weights > 0, jnp.arange(len(weights))
        if len(weights) < least_clients:
            raise ValueError(
                f"krum:malicious={malicious} needs {least_clients} clients a round, not "
                f"{len(weights)}: lower malicious"
            )
        count = counts.sum()
        is_pair = counts[:, None] & counts & (rows[:, None] != rows)
        near = jnp.sort(jnp.where(is_pair, _squared_distances(stacked, rows), jnp.inf), axis=1)
        scores = jnp.where(rows < count - malicious - 2, near, 0).sum(1)
        # Clients that do not count come last, even if scores are infinite.
        rank = jnp.argsort(jnp.lexsort((scores, ~counts)))
        chosen = counts & (rank < jnp.minimum(keep, count - malicious)) & (count >= least_clients)
        weights = normalized(chosen)
        return sum_over(weighted, stacked, weights), weights

    return _rule(combine)


@bounded
def geometric_median(
    *, iterations: Steps = 10, smoothing: Above0 = 1e-6, weights: _Weights = "uniform"
) -> Weighing:
    r"""Returns the rule of RFA: the point with the least sum of distances to the uploads.

    (Pillutla et al., IEEE TSP 2022, Algorithm 2, the smoothed Weiszfeld algorithm.) The norm is
    over all shared leaves together; each iteration is

    $v \leftarrow \sum_k w_k y_k / \sum_k w_k$ with
    $w_k = \alpha_k / \max(\nu, \lVert v - y_k \rVert)$

    Differs from the authors' code, which weighs clients by size and starts at their mean: alpha is
    1 by default, and it starts at what the clients received, with nu in the first iteration at
    least the median of the distances. So no upload pulls harder than another of its size.

    Args:
      iterations: at least 1.
      smoothing: nu, above 0; the norm below which distances are alike.
      weights: alpha, `uniform`, or `by_size` for the clients' numbers of samples.
    """

    def combine(stacked: PyTree, start: PyTree, w: jax.Array) -> tuple[PyTree, jax.Array]:
        def step(number: jax.Array, previous: tuple) -> tuple[PyTree, jax.Array]:
            far = update_norms(stacked, previous[0], w > 0)
            # Of two middle distances the smaller one, which an attacker cannot make large.
            middle, _ = _medians(far, w)
            floor = jnp.maximum(jnp.where(number == 0, middle, 0), smoothing)
            shares = normalized(w.astype(far.dtype) / jnp.maximum(far, floor))
            return sum_over(weighted, stacked, shares), shares

        initial = jax.tree.map(wide, start), normalized(w)
        return jax.lax.fori_loop(0, iterations, step, initial)

    return _rule(combine, weights)


@bounded
def norm_clipping(*, factor: Above0 = 1.0, weights: _Weights = "uniform") -> Weighing:
    r"""Returns the rule of a mean of updates whose norms are bounded by the round's median norm.

    (Sun et al., "Can you really backdoor federated learning?", 2019, with a bound that follows the
    round.) With the update $\Delta_k = y_k - x$ over all shared leaves, and weights w, which the
    median has too (`coordinate_median`),

    $x' = x + \sum_k w_k s_k \Delta_k / \sum_k w_k$

    $s_k = \min(1, c \, \mathrm{median}_j \lVert \Delta_j \rVert / \lVert \Delta_k \rVert)$

    Args:
      factor: c, above 0.
      weights: w, `uniform`, or `by_size` for the clients' numbers of samples.
    """

    def combine(stacked: PyTree, start: PyTree, w: jax.Array) -> tuple[PyTree, jax.Array]:
        norms = update_norms(stacked, start, w > 0)
        bound = factor * sum(_medians(norms, w)) / 2
        scales = jnp.where(norms > bound, bound / jnp.where(norms > 0, norms, 1), 1)
        parts, total = scales * w.astype(scales.dtype), w.sum().astype(scales.dtype)
        shares = parts / jnp.where(total > 0, total, 1)
        # A mean of x and all y, not x plus updates, which rounding could make a negative variance.
        start_part, moved = weighted(start, 1 - shares.sum()), sum_over(weighted, stacked, shares)
        return jax.tree.map(jnp.add, start_part, moved), normalized(parts)

    return _rule(combine, weights)


def update_norms(stacked: PyTree, start: PyTree, counts: jax.Array) -> jax.Array:
    """Returns the norm of each client's leaves [C, ...] minus `start`, f[C]; 0 without `counts`."""

    def norm(client: tuple[PyTree, jax.Array]) -> jax.Array:
        leaves, counts = client
        return jnp.where(counts, jnp.sqrt(_squared(leaves, start)), 0)

    return jax.lax.map(norm, (stacked, counts))


def _rule(combine: _Combine, weights: _Weights = "uniform") -> Weighing:
    """Returns the rule that combines the leaves of clients with these weights by `combine`."""

    def weigh(state: PyTree, sizes: jax.Array, risks: jax.Array, messages: PyTree) -> tuple:
        if sent := len(jax.tree.leaves(messages)):
            raise ValueError(
                f"this method's clients send {sent} arrays beside leaves, whose mean one client "
                "could move: use a method such as fedbn"
            )
        # Sizes are integers, so that no rounding of their sums moves a median.
        return (sizes if weights == "by_size" else uniform(sizes, risks)), state

    def combine_weighted(stacked: PyTree, start: PyTree, w: jax.Array) -> tuple[PyTree, jax.Array]:
        amounts = w if weights == "by_size" else (w > 0).astype(jnp.int32)
        return combine(stacked, start, jnp.asarray(amounts))

    return Weighing(lambda num_clients: (), weigh, combine=combine_weighted)


def _mean_of_parts(part: _Part, whole: Callable[[jax.Array], jax.Array]) -> _Combine:
    """Returns `combine` for the mean of each number weighed by parts, whose sum is `whole(w)`."""

    def combine(stacked: PyTree, start: PyTree, w: jax.Array) -> tuple[PyTree, jax.Array]:
        del start
        rows = jnp.arange(len(w))

        def summed(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
            several = (-1, *[1] * (leaf.ndim - 1))

            # Ranks by comparing: on CPU in a twentieth of the time in which XLA sorts [8, 1e6].
            def taken(row: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
                before = (leaf < row) | ((leaf == row) & (rows < k).reshape(several))
                below = jnp.where(before, w.reshape(several), 0).sum(0, dtype=w.dtype)
                share, number = part(below, w, k), wide(row)
                scaled = jnp.where(share > 0, number * share.astype(number.dtype), 0)
                return scaled, jnp.where(rows == k, share.sum(dtype=share.dtype), 0)

            return sum_over(taken, leaf, rows)

        leaves, form = jax.tree.flatten(stacked)
        sums, taken = zip(*map(summed, leaves), strict=True) if leaves else ((), ())
        divisor = jnp.where(w.any(), whole(w), 1)
        means = [total / divisor.astype(total.dtype) for total in sums]
        shares = sum(n.astype(jnp.result_type(float)) for n in taken)
        return jax.tree.unflatten(form, means), normalized(shares if leaves else w)

    return combine


def _are_middle(below: jax.Array, weight: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether values are the lower and the upper median; lesser ones weigh `below`."""
    total = w.sum(dtype=w.dtype)
    to_half, past_half = total - below - below, (below + weight) - (total - below - weight)
    # Floats that add up to half of all do so up to rounding.
    exact = jnp.issubdtype(w.dtype, jnp.integer)
    slack = 0 if exact else len(w) * jnp.finfo(w.dtype).eps * total
    return (to_half > slack) & (past_half >= -slack), (to_half >= -slack) & (past_half > slack)


def _medians(values: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the lower and the upper median of values f[C] with weights [C]."""
    order = jnp.argsort(jnp.where(w > 0, values, jnp.inf))
    ordered = w[order]
    below = jnp.cumsum(ordered, dtype=w.dtype) - ordered
    lower, upper = (values[order][jnp.argmax(x)] for x in _are_middle(below, ordered, w))
    return lower, upper


def _squared_distances(stacked: PyTree, rows: jax.Array) -> jax.Array:
    """Returns the squared distance of every two of the rows i32[C], f[C, C], over all leaves."""
    # Differences, not products of leaves, of which rounding leaves nothing where clients are close.
    # The numbers of the rows are mapped too, because a method may share no leaf at all.
    to_all = jax.vmap(lambda row, row_j, _: _squared(row, row_j), (None, 0, 0))
    return jax.lax.map(lambda row: to_all(row[0], stacked, rows), (stacked, rows))


def _squared(leaves: PyTree, leaves_j: PyTree) -> jax.Array:
    """Returns the squared distance of two trees, f[]."""
    dtype = jnp.result_type(float)
    parts = jax.tree.map(lambda y, x: jnp.square(wide(y) - wide(x)).sum(), leaves, leaves_j)
    return sum((part.astype(dtype) for part in jax.tree.leaves(parts)), jnp.zeros((), dtype))
