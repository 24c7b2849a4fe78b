"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates against client drift."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Aggregate, ServerState, ServerUpdate, equal_messages
from fedjax_bn.arguments.ranges import Above0, bounded
from fedjax_bn.client import Finish, Trained
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Gradient, differentiate, gradient_step
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of, supervised
from fedjax_bn.methods.response import check_fresh, check_rate, dtype_of, for_each, response
from fedjax_bn.sharing import Variables, join, split_like
from fedjax_bn.state import Received

PyTree = Any


@bounded
def scaffold(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: Above0 | None = None,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    """Every local gradient is corrected, and every client estimates its own anew (option II).

        g <- g - c_k + c
        c_k' = c_k - c + (x - y_k) / (tau_k lr)
        x' = sum_k p_k y_k,   c' = c + 1/K sum_k (c_k' - c_k)

    Variates start at 0 and exist for shared parameters only; tau_k is the client's real number of
    steps. c stays the mean of all c_k, clients that sit out included.

    Differs from the paper: by default tau_k lr is the optimizer's response (see
    `methods.response`), which for SGD is the same and with momentum keeps c_k in the scale of a
    gradient, where tau_k lr would make it up to 1 / (1 - momentum) times as large.

    Args:
      model: images -> outputs.
      optimizer: the local optimizer, one that is linear in its gradients, such as SGD.
      learning_rate: lr as in the equation, for an optimizer without schedule; by default found by
        the optimizer's response, in each round that of its rates.
      **options: those of `fedavg`.

    Raises:
      ValueError: `learning_rate` is not positive or stands beside a schedule, or clients keep a
        momentum.
    """
    check_rate("scaffold", optimizer, learning_rate)
    if learning_rate is None:
        check_fresh("scaffold", optimizer, options)
    learned, rest = learning(model, **options)
    gradient = corrected(differentiate(supervised(learned)))
    rest |= keeping_variates(optimizer, learning_rate)
    return method_of(gradient_step(gradient, optimizer), **rest)


def keeping_variates(
    optimizer: optax.GradientTransformation, learning_rate: float | None = None
) -> dict[str, Any]:
    """The options of `method_of` by which clients and server keep their variates."""
    return {
        "server": averaging_with_variate(),
        "memory": lambda shared, personal: jax.tree.map(jnp.zeros_like, shared["params"]),
        "finish": _renew_variate(optimizer, learning_rate),
    }


def corrected(gradient: Gradient) -> Gradient:
    """g - c_k + c over shared parameters; c_k is the client's memory, c the server's state."""

    def wrapped(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, tuple[jax.Array, Variables]]:
        gradients, reported = gradient(variables, batch, received, key)
        params = correct(gradients["params"], received.memory, received.server)
        return gradients | {"params": params}, reported

    return wrapped


def correct(gradients: PyTree, own: PyTree, server: PyTree) -> PyTree:
    """g - c_k + c; the variates have None where a parameter is personal."""
    shared, personal = split_like(gradients, own)
    return join(jax.tree.map(lambda g, c_k, c: g - c_k + c, shared, own, server), personal)


def new_variate(
    optimizer: optax.GradientTransformation,
    learning_rate: float | None,
    received: Received,
    trained: Trained,
    own: PyTree,
    server: PyTree,
) -> PyTree:
    """c_k' = c_k - c + (x - y_k) / (tau_k lr); c_k where nothing could move (tau_k lr = 0)."""
    start = received.shared["params"]
    now, _ = split_like(trained.variables["params"], start)
    dtype, steps = dtype_of(start), trained.steps
    if learning_rate is None:
        way = response(optimizer, steps, trained.counts.shape[0], dtype, received)
    else:
        way = learning_rate * steps.astype(dtype)

    def renew(
        c_k: jax.Array, c: jax.Array, x: jax.Array, y: jax.Array, way: jax.Array
    ) -> jax.Array:
        inverse = (1 / jnp.where(way > 0, way, 1)).astype(x.dtype)
        return jnp.where(way > 0, c_k - c + (x - y) * inverse, c_k)

    return jax.tree.map(renew, own, server, start, now, for_each(way, start))


def _renew_variate(optimizer: optax.GradientTransformation, learning_rate: float | None) -> Finish:
    """The client keeps c_k' and sends c_k' - c_k."""

    def finish(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
        old = received.memory
        new = new_variate(optimizer, learning_rate, received, trained, old, received.server)
        return trained.variables, new, jax.tree.map(jnp.subtract, new, old)

    return finish


def averaging_with_variate() -> ServerUpdate:
    """Averages the shared leaves with the round's weights, and moves c, which it sends.

    c' = c + 1/K sum_k (c_k' - c_k) over the clients that count; the messages are the differences.
    """

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        del personal
        return ServerState(sent=jax.tree.map(jnp.zeros_like, shared["params"]))

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        del shared
        share = aggregate.share
        variate = jax.tree.map(
            lambda c, d: c + (d * share.astype(d.dtype)).astype(c.dtype),
            state.sent,
            aggregate.message,
        )
        return aggregate.mean, ServerState(sent=variate)

    return ServerUpdate(init, update, message_weight=equal_messages)
