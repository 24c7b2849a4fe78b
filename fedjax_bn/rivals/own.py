"""A client's own model beside the one that it shares: the collection `own`, see `hook`.

It is {"model": collections, "present": f[] of 1, ...} and stays with its client. Such a client
predicts with its own model; an unseen client, which receives zeros, with the shared one.
"""

from typing import Any

import jax.numpy as jnp

from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.local_step import Objective, Value
from fedjax_bn.sharing import OWN, Variables, without

PyTree = Any


def with_own(variables: Variables, **more: PyTree) -> Variables:
    """Returns the variables with an own model that equals the shared one, and more of its own."""
    variables = without(variables, OWN)
    present = jnp.ones((), parameter_dtype(variables))
    return {**variables, OWN: {"model": variables, "present": present, **more}}


def of_shared(objective: Objective) -> Objective:
    """Returns the objective of the shared model, which does not see `own`."""

    def seen(variables: Variables, *rest: Any) -> Value:
        return objective(without(variables, OWN), *rest)

    return seen
