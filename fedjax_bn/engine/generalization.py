"""Generalization adjustment, FedDG-GA (Zhang et al., CVPR 2023): weights by how clients fare.

A client's gap is how much worse the aggregated model is on its validation samples than its own
trained model was. Clients with large gaps gain weight:

    gap_k = F_k(w) - F_k(y_k),    a_k <- clip(a_k + s_r gap_k / max_j |gap_j| / K, 0, 1)
    a <- a / sum_j a_j,           s_r = s (1 - (r - 1) / R),   r = 0, 1, ..., R - 1

with a_k = 1/K before the first round. F_k is the loss, or minus the accuracy.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import AtLeast0, Rounds, bounded
from fedjax_bn.engine.weighing import Weighing
from fedjax_bn.sharing import Variables, join

PyTree = Any
# measure(variables, received) -> f[], of a model on a client's own validation samples
Measure = Callable[[Variables, Any], jax.Array]


@bounded
def generalization_adjustment(
    measure: Measure | None = None,
    *,
    metric: Literal["loss", "accuracy"] = "loss",
    step: AtLeast0 = 0.2,
    rounds: Rounds = 40,
) -> Weighing:
    """Returns the weighing rule of FedDG-GA, for any method.

    At the end of a round a client also uploads two numbers: the metric of the received model and
    that of the trained one, both on its validation samples. The server keeps the second one until
    the client's next round. So the weights of a round are those that the authors' code computes
    after the previous round; the first round is a plain average, as every round with step 0. A
    client that sits out keeps its weight; if no client has a gap, all do.

    Differs from the authors' code, which knows neither sitting out nor cohorts: the sum of the
    weights of those present stays what it was, the mean of these stands for 1/K, and r counts a
    client's own rounds. By default the metric is the paper's, the loss; the code's is accuracy.

    Args:
      measure: `selection.validation_loss(...)`, or `selection.validation_score(...)` for accuracy,
        of the batches' "validation". The configuration gives it; None serves no federation.
      metric: what it measures; less loss or more accuracy is better.
      step: s, at least 0; 0.2 in the authors' code.
      rounds: R, over which the step goes to about 0, at least 1; 40 in the authors' code.

    Raises:
      ValueError: an argument is out of its range; at use, there is no `measure`.
    """
    sign = 1 if metric == "loss" else -1

    def tell(received: Any, variables: Variables) -> dict[str, jax.Array]:
        if measure is None:
            raise ValueError(
                "generalization_adjustment has nothing to measure: give it measure="
                "fedjax_bn.engine.selection.validation_loss(model, prepare)"
            )
        start = join(received.shared, received.personal)
        return {"received": measure(start, received), "trained": measure(variables, received)}

    def weigh(
        state: PyTree, sizes: jax.Array, risks: jax.Array, told: PyTree
    ) -> tuple[jax.Array, PyTree]:
        del risks
        present, times = sizes > 0, state["rounds"]
        old = told["received"].astype(state["trained"].dtype)
        gaps = jnp.where(present & (times > 0), sign * (old - state["trained"]), 0)
        # The gaps are those of the round before, r = times - 1.
        steps = step * jnp.maximum(1 - (times - 2).astype(gaps.dtype) / rounds, 0)
        weights = adjust(state["weight"], gaps, steps, present)
        new = {
            "weight": weights,
            "trained": jnp.where(present, told["trained"].astype(old.dtype), state["trained"]),
            "rounds": times + present.astype(times.dtype),
        }
        return jnp.where(present, weights, 0), new

    def init(num_clients: int) -> dict[str, jax.Array]:
        return {
            "weight": jnp.full(num_clients, 1 / num_clients),
            "trained": jnp.zeros(num_clients),
            "rounds": jnp.zeros(num_clients, jnp.int32),
        }

    return Weighing(init, weigh, tell)


def adjust(
    weights: jax.Array, gaps: jax.Array, steps: jax.Array | float, present: jax.Array
) -> jax.Array:
    """Returns the weights f[C] after one adjustment; the clients present keep their sum.

    Args:
      weights: f[C], in [0, 1].
      gaps: f[C], 0 where there is none.
      steps: s_r, f[C] or f[].
      present: bool[C], whose weights move.
    """
    largest = jnp.abs(gaps).max()
    relative = gaps / jnp.where(largest > 0, largest, 1)
    mass = jnp.where(present, weights, 0).sum()
    mean = mass / jnp.maximum(present.sum(dtype=weights.dtype), 1)
    moved = jnp.where(present, jnp.clip(weights + steps * relative * mean, 0, 1), 0)
    total = moved.sum()
    scaled = moved * (mass / jnp.where(total > 0, total, 1))
    return jnp.where(present & (total > 0), scaled, weights)
