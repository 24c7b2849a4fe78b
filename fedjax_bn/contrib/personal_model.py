"""A client's own model beside the one that it shares: the collection `own`, see `models.hooks`.

It is {"model": collections, "present": f[] of 1, ...} and stays with its client. Such a client
predicts with its own model; an unseen client, which receives zeros, with the shared one.
"""

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.local_step import Batch, LocalStep
from fedjax_bn.sharing import FROZEN, OWN, PyTree, Variables, without
from fedjax_bn.state import Received


def with_own_model(variables: Variables, **collections: PyTree) -> Variables:
    """Returns the variables with an own model that equals the shared one, and more of its own."""
    variables = without(variables, OWN)
    present = jnp.ones((), parameter_dtype(variables))
    return {**variables, OWN: {"model": variables, "present": present, **collections}}


def with_model(variables: Variables, model: Variables, **collections: PyTree) -> Variables:
    """Returns the variables with another own model, of which frozen leaves are left out."""
    return {
        **variables,
        OWN: {**variables[OWN], "model": without(model, OWN, FROZEN), **collections},
    }


def of_shared(step: LocalStep) -> LocalStep:
    """Returns the step of the shared model, which neither sees nor changes `own`."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        trained, state, loss = step.update(without(variables, OWN), state, batch, received, key)
        return {**trained, OWN: variables[OWN]}, state, loss

    return LocalStep(
        lambda variables: step.init(without(variables, OWN)),
        update,
        lambda variables, *arguments: step.check(without(variables, OWN), *arguments),
    )
