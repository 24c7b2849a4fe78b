"""FedDyn (Acar et al., ICLR 2021): a dynamic regularizer that aligns clients' minima."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import (
    Aggregate,
    ServerState,
    ServerUpdate,
    Weighing,
    WeighingRule,
    uniform,
)
from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.client import Trained
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Gradient, Grads, differentiate, gradient_step
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of, supervised
from fedjax_bn.sharing import PyTree, Variables, join, split_like
from fedjax_bn.state import Received


@bounded
def feddyn(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    alpha: AtLeast0 = 0.01,
    weigh: WeighingRule | Weighing | None = uniform,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""Clients minimize a regularized loss whose minima agree with those of the mean loss.

    $F_k(w) - \langle g_k, w \rangle + \frac{\alpha}{2} \Vert w - x \Vert^2$ (Algorithm 1)

    $g_k' = g_k - \alpha (y_k - x)$ and $h' = h - \alpha \frac{1}{K} \sum_k (y_k - x)$

    $x' = \mathrm{mean}_k \, y_k - h' / \alpha$

    The sum and the mean are over the round's participants, K are all clients; g_k and h start at 0.
    A client keeps -g_k / alpha, the sum of its changes, and the server -h / alpha, so that nothing
    is divided. They concern shared parameters only; the server averages running statistics.
    Nothing is sent in addition to the model. The reported loss is F_k alone.

    With alpha 0, where h stays 0, it is FedAvg. That is not the limit of a small alpha, for which
    x' is x plus the clients' mean change and the sum of all mean changes so far, whatever alpha is.

    The authors' code (alpemreacar/FedDyn) also divides alpha by K p_k and clips gradients to norm
    10; with clients of equal size and small gradients both agree.

    Args:
      alpha: strength of the regularizer, at least 0; 0.01 in the authors' code for CIFAR-10.
      weigh: the weights of the participants in both means; equal ones in the paper.
    """
    learned, federate_options = learning(model, **options)
    gradient = differentiate(supervised(learned))
    if not alpha:
        return method_of(gradient_step(gradient, optimizer), weigh=weigh, **federate_options)
    return method_of(
        gradient_step(_regularized(gradient, alpha), optimizer),
        memory=lambda shared, personal: jax.tree.map(jnp.zeros_like, shared["params"]),
        finish=_add_change,
        server=_add_changes(),
        weigh=weigh,
        **federate_options,
    )


def _regularized(gradient: Gradient, alpha: float) -> Gradient:
    """Returns g + alpha (w - x + d_k) over shared parameters; the client's memory is d_k."""

    def regularized(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> Grads:
        gradients, reported = gradient(variables, batch, received, key)
        start = received.shared["params"]
        params, _ = split_like(variables["params"], start)
        shared, personal = split_like(gradients["params"], start)
        trees = shared, params, start, received.memory
        shared = jax.tree.map(lambda g, w, x, d: g + alpha * (w - x + d), *trees)
        return gradients | {"params": join(shared, personal)}, reported

    return regularized


def _add_change(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """Returns the last act: d_k' = d_k + y_k - x."""
    start = received.shared["params"]
    end, _ = split_like(trained.variables["params"], start)
    changes = jax.tree.map(lambda d, y, x: d + (y - x), received.memory, end, start)
    return trained.variables, changes, ()


def _add_changes() -> ServerUpdate:
    """Returns the step x' = mean + d with the mean d of all clients' d_k, which stays here."""

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        return ServerState(kept=jax.tree.map(jnp.zeros_like, shared["params"]))

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        mean, start = aggregate.mean["params"], shared["params"]

        def added(d: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
            return d + (y - x) * aggregate.share.astype(d.dtype)

        changes = jax.tree.map(added, state.kept, mean, start)
        params = jax.tree.map(jnp.add, mean, changes)
        return {**aggregate.mean, "params": params}, ServerState(kept=changes)

    return ServerUpdate(init, update)
