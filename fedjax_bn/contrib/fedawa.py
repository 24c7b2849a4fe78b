"""FedAWA (Shi et al., CVPR 2025): aggregation weights learned from the clients' updates."""

from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Weighing, WeighingRule, by_size
from fedjax_bn.arguments.ranges import AtLeast0, Steps, bounded
from fedjax_bn.engine.dtypes import wide
from fedjax_bn.engine.weighing import plain
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.methods.fedavg import fedavg
from fedjax_bn.methods.learning import Options
from fedjax_bn.sharing import PyTree


@bounded
def adaptive_weights(*, rate: AtLeast0 = 0.001, steps: Steps = 1) -> Weighing:
    r"""Returns the weighing rule of FedAWA, for any method.

    $p = \mathrm{softmax}(a)$ over the clients that count, and Adam ($\beta_1 = 0.5$) moves a along

    $\sum_k p_k \Vert t_k - \sum_j p_j t_j \Vert + \sum_k p_k (1 - \cos(x, y_k))$

    with the received model x, uploads y_k and $t_k = y_k - x$, vectors of all shared parameters. As
    in the authors' code a_k starts at the client's share of the samples in its first round, so that
    weights are nearly equal; Adam starts anew in each round, which takes the weights from before
    its last step. There a_k belongs to a place in the round, here to a client.

    Args:
      rate: Adam's learning rate, at least 0; 0.001 in the authors' code.
      steps: steps in a round, at least 1; 1 in the authors' code.
    """
    optimizer = optax.adam(rate, b1=0.5)

    def init(num_clients: int) -> dict[str, jax.Array]:
        return {"score": jnp.zeros(num_clients), "started": jnp.zeros(num_clients, bool)}

    def reweigh(
        state: PyTree, stacked: PyTree, start: PyTree, weights: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        counts = weights > 0
        geometry = _geometry(stacked["params"], start["params"], counts)
        squares, cosines = (part.astype(weights.dtype) for part in geometry)

        def shares(scores: jax.Array) -> jax.Array:
            return jnp.where(counts, jax.nn.softmax(jnp.where(counts, scores, -jnp.inf)), 0)

        def loss(scores: jax.Array) -> jax.Array:
            p = shares(scores)
            # |t_k - sum_j p_j t_j|^2 by squared distances of pairs, because the p_j sum to 1; not
            # by a matrix product, which accelerators round more.
            far = (squares * p).sum(1)
            far = far - (p * far).sum() / 2
            # The root has no gradient at 0, where a client is alone.
            far = jnp.where(far > 0, jnp.sqrt(jnp.where(far > 0, far, 1)), 0)
            return (p * (far + 1 - cosines)).sum()

        def step(number: jax.Array, carry: tuple) -> tuple:
            scores, moments, _ = carry
            with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
                moved, moments = optimizer.update(jax.grad(loss)(scores), moments)
            return scores + moved, moments, shares(scores)

        scores = jnp.where(counts, jnp.where(state["started"], state["score"], weights), 0)
        carry = scores, optimizer.init(scores), weights
        learned, _, weights = jax.lax.fori_loop(0, steps, step, carry)
        score = jnp.where(counts, learned, state["score"])
        return weights, {"score": score, "started": state["started"] | counts}

    return Weighing(init, plain(by_size), reweigh=reweigh)


def _geometry(stacked: PyTree, start: PyTree, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the squared distances f[C, C] of the clients' leaves, and their cosines to start."""

    def parts(leaf: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        x, axes = wide(x), tuple(range(1, leaf.ndim))
        # An upload that does not count is replaced, so that its NaN reaches nothing.
        y = jnp.where(jnp.expand_dims(counts, axes), wide(leaf), x)
        # One client after another, so that no [C, C, ...] is held.
        pairs = jax.lax.map(lambda row: jnp.square(y - row).sum(axes), y)
        return pairs, (y * x).sum(axes), jnp.square(y).sum(axes), jnp.square(x).sum()

    leaves = zip(jax.tree.leaves(stacked), jax.tree.leaves(start), strict=True)
    sums: Any = map(sum, zip(*(parts(*pair) for pair in leaves), strict=True))
    pairs, products, lengths, length = sums
    return pairs, products / jnp.maximum(jnp.sqrt(lengths * length), 1e-8)


@bounded
def fedawa(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    weigh: Annotated[WeighingRule | Weighing | None, adaptive_weights] = None,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedAvg whose server learns the weights of the clients: `weigh` is `adaptive_weights()`."""
    return fedavg(model, optimizer, weigh=weigh or adaptive_weights(), **options)
