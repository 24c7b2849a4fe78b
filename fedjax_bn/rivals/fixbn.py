"""FixBN (Zhong, Chen & Chao, 2023): from a round on batch norms keep the federation's moments."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import RoundsOr0, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, differentiate, gradient_step
from fedjax_bn.methods.learning import Options, learning, method_of, require_batch_norm, supervised
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
    """FedAvg whose batch norms normalize by the received running statistics from a round on.

    Before `from_round` it is FedAvg. From then on running statistics move no more, but for rounding
    in their mean, and training normalizes by them too, so that clients and their mean see the same
    network; scale, bias and weights are trained on. One step of SGD of all clients is then the step
    of the pooled data. The authors also keep the momentum between rounds (`keep_optimizer=True`).
    Only the model travels. With `from_round` at the last round or later it is FedAvg.

    Args:
      model: one with at least one batch norm, images -> outputs.
      from_round: rounds of FedAvg before, at least 0; half of all rounds in HybridBN's code, as 10
        is of the program's 20.
      optimizer, **options: as in `fedavg`.

    Raises:
      ValueError: at `init`, the model has no batch norm.
    """
    learned, rest = learning(model, **options)

    def start(key: jax.Array, variables: Variables) -> Variables:
        del key
        require_batch_norm("fixbn", variables)
        return variables

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        # Traced, so that the rounds before and after are one program.
        rule = _fixed_statistics(jnp.asarray(received.round >= from_round))
        return supervised(learned, rule)(variables, batch, received, key)

    return method_of(gradient_step(differentiate(objective), optimizer), start=start, **rest)


def _fixed_statistics(fixed: jax.Array) -> StatisticsRule:
    """Returns the rule of the running statistics, which stay, if `fixed`; else of the pass."""

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        # Always computed, since one program serves the rounds before and after.
        plain = statistics_of(None, layer, x, valid)

        def choose(kept: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(fixed, kept.astype(new.dtype), new)

        mean, var = choose(layer.mean, plain.mean), choose(layer.var, plain.var)
        if plain.moved is None:
            return Statistics(mean, var)
        moved = choose(layer.mean, plain.moved[0]), choose(layer.var, plain.moved[1])
        return Statistics(mean, var, moved)

    return rule
