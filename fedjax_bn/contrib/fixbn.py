"""FixBN (Zhong, Chen & Chao, 2023): later rounds fix batch norms to the federation's moments."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import RoundsOr0, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.normalization.calls import require_batch_norm
from fedjax_bn.normalization.layer import Layer, Statistics, StatisticsRule, statistics_of
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received


@bounded
def fixbn(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    from_round: RoundsOr0 = 10,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedAvg whose batch norms use the received running statistics from round `from_round`.

    Before `from_round` it is FedAvg. Afterwards running statistics stay fixed, up to rounding in
    their mean, and training normalizes by them too, so that clients train the network that
    predicts; scale, bias and weights still train. One SGD step of all clients then equals a step on
    the pooled data. The authors also keep the momentum between rounds (`keep_optimizer=True`).
    Only the model travels. With `from_round` at or above the number of rounds it is FedAvg.

    Args:
      from_round: number of FedAvg rounds before, at least 0; half of all rounds in HybridBN's
        code, as 10 is half of our default of 20.
    """
    learned, federate_options = learning(model, **options)

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        # Traced, so that the rounds before and after share one program.
        rule = _fixed_statistics(jnp.asarray(received.round >= from_round))
        return supervised(learned, rule)(variables, batch, received, key)

    return method_of(
        minimizing(objective, optimizer),
        start=lambda key, variables: require_batch_norm("fixbn", variables),
        **federate_options,
    )


def _fixed_statistics(fixed: jax.Array) -> StatisticsRule:
    """Returns the rule that keeps and uses running statistics if `fixed`, else the batch's."""

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        # Always computed, because one program serves the rounds before and after.
        plain = statistics_of(None, layer, x, valid)

        def choose(tracked: jax.Array, measured: jax.Array) -> jax.Array:
            return jnp.where(fixed, tracked.astype(measured.dtype), measured)

        mean, var = choose(layer.mean, plain.mean), choose(layer.var, plain.var)
        if plain.moved is None:
            return Statistics(mean, var)
        moved = choose(layer.mean, plain.moved[0]), choose(layer.var, plain.moved[1])
        return Statistics(mean, var, moved)

    return rule
