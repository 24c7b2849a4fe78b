"""Ditto (Li et al., ICML 2021): each client also has a model of its own, pulled to the global."""

from typing import Any, Unpack

import jax
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.contrib.parts import of_shared, with_model, with_own_model
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Grads, LocalStep, differentiate, gradient_step, in_turn
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.sharing import OWN, PyTree, Variables, join, without
from fedjax_bn.state import Received


@bounded
def ditto(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    weight: AtLeast0 = 1.0,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""FedAvg, beside which each client trains its own model v and predicts with it.

    $F_k(v) + \frac{\lambda}{2} \Vert v - w \Vert^2$ with the model w that the round starts from

    The shared model trains as in FedAvg (Algorithm 1 of the paper), on the same batches, and is
    what an unseen client receives. v starts at the common start, stays with its client with its
    running statistics, and has an optimizer state of its own. With weight 0 it is SingleSet's
    model beside FedAvg's. The reported loss is the shared model's. A step costs a second pass.

    Args:
      weight: lambda, strength of the pull, at least 0.
    """
    learned, federate_options = learning(model, **options)
    gradient = differentiate(supervised(learned))

    def pulled(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Grads:
        gradients, reported = gradient(variables, batch, received, key)
        # w is the received model, which stays the same in all steps of a round.
        start = join(received.shared, received.personal)["params"]
        trees = gradients["params"], variables["params"], start
        return {"params": jax.tree.map(lambda g, v, w: g + weight * (v - w), *trees)}, reported

    # Two steps in turn on one batch, each with an optimizer state of its own.
    personal_step = _of_own(gradient_step(pulled, optimizer))
    return method_of(
        in_turn(of_shared(gradient_step(gradient, optimizer)), personal_step),
        keeps=OWN,
        start=lambda key, variables: with_own_model(variables),
        **federate_options,
    )


def _of_own(step: LocalStep) -> LocalStep:
    """Returns the step of the client's own model."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        # The step sees the own model in the places of the shared one.
        personal_model = {**without(variables, OWN), **variables[OWN]["model"]}
        moved, state, loss = step.update(personal_model, state, batch, received, key)
        return with_model(variables, moved), state, loss

    return LocalStep(lambda variables: step.init(variables[OWN]["model"]), update)
