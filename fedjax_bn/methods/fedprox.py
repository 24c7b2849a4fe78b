"""FedProx (Li et al., MLSys 2020): FedAvg with a proximal term in every local step."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, differentiate, gradient_step
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.sharing import Variables, split_like
from fedjax_bn.state import Received


@bounded
def fedprox(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    mu: AtLeast0 = 0.01,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Clients minimize their loss and the distance from the received shared parameters x.

    $F_k(w) + \frac{\mu}{2} \Vert w - x \Vert^2$

    With mu = 0 it is FedAvg. The reported loss is F_k alone.

    Args:
      mu: strength of the proximal term, at least 0; 0.01 as in FedBN's experiments.
    """
    learned, federate_options = learning(model, **options)
    gradient = differentiate(proximal(supervised(learned), mu))
    return method_of(gradient_step(gradient, optimizer), **federate_options)


def proximal(objective: Objective, mu: float) -> Objective:
    """Returns the objective plus mu/2 ||w - x||^2 over shared parameters (FedProx, Eq. 2)."""

    def penalized(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        value, reported = objective(variables, batch, received, key)
        start = received.shared["params"]
        # Personal parameters have no server's value to stay near.
        params, _ = split_like(variables["params"], start)
        distances = jax.tree.map(lambda w, w0: jnp.sum(jnp.square(w - w0)), params, start)
        return value + mu / 2 * sum(jax.tree.leaves(distances)), reported

    return penalized
