"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates against client drift."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Aggregate, averaging, equal_messages
from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.client import Trained
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.optimizers import check_fresh, for_each, response
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Gradient, Grads, differentiate, gradient_step
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of, supervised
from fedjax_bn.sharing import PyTree, Variables, join, split_like
from fedjax_bn.state import Received


@bounded
def scaffold(
    model: Any, optimizer: optax.GradientTransformation, **options: Unpack[OptionsButServer]
) -> FederatedMethod:
    r"""Control variates correct every local gradient; clients re-estimate theirs (option II).

    $g \leftarrow g - c_k + c$

    $c_k' = c_k - c + (x - y_k) / (\tau_k lr)$

    $x' = \sum_k p_k y_k$ and $c' = c + \frac{1}{K} \sum_k (c_k' - c_k)$

    Variates start at 0; only shared parameters have them. tau_k is the number of the client's steps
    without padding. c stays the mean of all c_k, including clients that sit out.

    Differs from the paper: tau_k lr is `engine.optimizers.response`. For SGD both are the same.
    With momentum the response keeps c_k at the scale of a gradient, whereas tau_k lr would make it
    up to 1 / (1 - momentum) times as large.

    Args:
      optimizer: the local optimizer, which should be linear in its gradients, such as SGD; one
        whose momentum clients keep raises ValueError.
    """
    check_fresh("scaffold", optimizer, options)
    learned, federate_options = learning(model, **options)
    gradient = corrected(differentiate(supervised(learned)))
    federate_options |= keeping_variates(optimizer)
    return method_of(gradient_step(gradient, optimizer), **federate_options)


def keeping_variates(optimizer: optax.GradientTransformation) -> dict[str, Any]:
    """Returns `server`, `memory` and `finish`, options of `method_of`, which keep variates.

    The server averages, and also sends c' = c + 1/K sum_k (c_k' - c_k) over those that count.
    """

    def finish(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
        after = _new_variate(optimizer, received, trained)
        return trained.variables, after, jax.tree.map(jnp.subtract, after, received.memory)

    # Equal weights: c is the plain mean of the c_k, whatever the weights of the models.
    server = averaging(no_changes, add_messages, equal_messages)
    return {"server": server, "memory": no_changes, "finish": finish}


def no_changes(shared: PyTree, personal: PyTree) -> PyTree:
    """Returns zeros like the shared parameters."""
    return jax.tree.map(jnp.zeros_like, shared["params"])


def add_messages(total: PyTree, aggregate: Aggregate) -> PyTree:
    """Returns the total plus the sum over all K clients of their equal messages, divided by K."""
    share = aggregate.share  # the fraction of all K clients that counts in the round
    return jax.tree.map(
        lambda c, d: c + (d * share.astype(d.dtype)).astype(c.dtype), total, aggregate.message
    )


def corrected(gradient: Gradient) -> Gradient:
    """Returns g - c_k + c over shared parameters: c_k is the client's memory, c is the server's."""

    def changed(received: Received, gradients: PyTree, params: PyTree) -> PyTree:
        trees = gradients, received.memory, received.server
        return jax.tree.map(lambda g, c_k, c: g - c_k + c, *trees)

    return over_shared(gradient, changed)


def over_shared(
    gradient: Gradient, change: Callable[[Received, PyTree, PyTree], PyTree]
) -> Gradient:
    """Returns the gradient with `change(received, gradients, params)` over shared parameters.

    Personal parameters keep theirs, because no server knows the direction of others for them; in
    the trees of shared ones their entries are None.
    """

    def wrapped(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Grads:
        gradients, reported = gradient(variables, batch, received, key)
        start = received.shared["params"]
        params, _ = split_like(variables["params"], start)
        shared, personal = split_like(gradients["params"], start)
        shared = change(received, shared, params)
        return gradients | {"params": join(shared, personal)}, reported

    return wrapped


def _new_variate(
    optimizer: optax.GradientTransformation, received: Received, trained: Trained
) -> PyTree:
    """Returns c_k' = c_k - c + (x - y_k) / (tau_k lr); c_k if nothing could move (tau_k lr = 0)."""
    start = received.shared["params"]
    params, _ = split_like(trained.variables["params"], start)
    most_steps, dtype = trained.counts.shape[0], parameter_dtype(received.shared)
    way = response(optimizer, trained.steps, most_steps, dtype, received)

    def renew(c_k: jax.Array, c: jax.Array, x: jax.Array, y: jax.Array, way: jax.Array) -> Any:
        # With a rate of 0, or without a step, this would be 0 / 0.
        inverse = (1 / jnp.where(way > 0, way, 1)).astype(x.dtype)
        return jnp.where(way > 0, c_k - c + (x - y) * inverse, c_k)

    trees = received.memory, received.server, start, params, for_each(way, start)
    return jax.tree.map(renew, *trees)
