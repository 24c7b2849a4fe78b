"""Ditto (Li et al., ICML 2021): each client also has a model of its own, pulled to the global."""

from typing import Any, Unpack

import jax
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import (
    Batch,
    Gradient,
    Grads,
    LocalStep,
    differentiate,
    gradient_step,
)
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.rivals.own import with_own
from fedjax_bn.sharing import FROZEN, OWN, Variables, everything, join, keeping, without
from fedjax_bn.state import Received

PyTree = Any


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
      model: images -> outputs.
      optimizer: the local optimizer of both models.
      weight: lambda, strength of the pull, at least 0.
      **options: as in `fedavg`.
    """
    learned, rest = learning(model, **options)
    gradient = differentiate(supervised(learned))
    step = _both(
        gradient_step(gradient, optimizer), gradient_step(_pulled(gradient, weight), optimizer)
    )
    return method_of(
        step,
        share=keeping(rest.pop("share", everything), OWN),
        start=lambda key, variables: with_own(variables),
        **rest,
    )


def _pulled(gradient: Gradient, weight: float) -> Gradient:
    """Returns the gradient plus weight (v - w)."""

    def pulled(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Grads:
        gradients, reported = gradient(variables, batch, received, key)
        start = join(received.shared, received.personal)["params"]
        params = jax.tree.map(
            lambda g, v, w: g + weight * (v - w), gradients["params"], variables["params"], start
        )
        return {"params": params}, reported

    return pulled


def _both(shared: LocalStep, own: LocalStep) -> LocalStep:
    """Returns the step that trains the shared and the client's own model on the same batch."""

    def init(variables: Variables) -> PyTree:
        return shared.init(without(variables, OWN)), own.init(variables[OWN]["model"])

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        mine, before, rest = variables[OWN], without(variables, OWN), (batch, received, key)
        new, first, loss = shared.update(before, state[0], *rest)
        moved, second, _ = own.update({**before, **mine["model"]}, state[1], *rest)
        return {**new, OWN: {**mine, "model": without(moved, FROZEN)}}, (first, second), loss

    return LocalStep(
        init, update, lambda variables, *rest: shared.check(without(variables, OWN), *rest)
    )
