"""FedNova (Wang et al., NeurIPS 2020): divides each client's change by its work."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import Aggregate, ServerState, ServerUpdate
from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.client import Trained
from fedjax_bn.engine.optimizers import check_fresh, for_each, response
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import minimizing
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of, supervised
from fedjax_bn.sharing import PyTree, Variables, join, split_like
from fedjax_bn.state import Received


@bounded
def fednova(
    model: Any, optimizer: optax.GradientTransformation, **options: Unpack[OptionsButServer]
) -> FederatedMethod:
    r"""The server divides each client's change by the number of its effective steps.

    $x' = x - \tau_{eff} \sum_k p_k (x - y_k) / a_k$ with $\tau_{eff} = \sum_k p_k a_k$

    $a_k = \sum_{j=1}^{\tau_k} (1 - \rho^j) / (1 - \rho)$

    In tau_k steps of SGD with momentum rho, each gradient enters x - y_k with a factor; a_k is the
    sum of these factors (tau_k without momentum). Here a_k is `engine.optimizers.response`, which
    is equivalent for SGD and also right for Nesterov's momentum and schedules. Weight decay counts
    as part of the gradient and does not change a_k. Only the change of shared parameters is
    normalized; running statistics are averaged with p_k. With equal steps, such as of clients of
    equal sizes, it is FedAvg. Clients that keep their momentum raise ValueError.
    """
    check_fresh("fednova", optimizer, options)
    learned, federate_options = learning(model, **options)

    # Uploads (y_k - x) / a_k as the client's parameters, and sends a_k.
    def finish(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
        most_steps, dtype = trained.counts.shape[0], jnp.result_type(float)
        work = response(optimizer, trained.steps, most_steps, dtype, received)
        start = received.shared["params"]
        params, personal = split_like(trained.variables["params"], start)

        def normalized(y: jax.Array, x: jax.Array, work: jax.Array) -> jax.Array:
            # A client without a step has work 0, and adds nothing to the direction.
            inverse = jnp.where(work > 0, 1 / jnp.where(work > 0, work, 1), 0)
            return (y - x) * inverse.astype(x.dtype)

        direction = jax.tree.map(normalized, params, start, for_each(work, start))
        uploaded = {**trained.variables, "params": join(direction, personal)}
        # A tree if masks of the optimizer give parameters different work.
        sent = work if isinstance(work, jax.Array) else for_each(work, start)
        return uploaded, received.memory, sent

    return method_of(
        minimizing(supervised(learned), optimizer),
        server=ServerUpdate(lambda shared, personal: ServerState(), _move),
        finish=finish,
        **federate_options,
    )


def _move(shared: PyTree, aggregate: Aggregate, state: ServerState) -> tuple[PyTree, ServerState]:
    """Returns x + tau_eff * mean direction (Eq. 6), and the mean running statistics."""
    # The messages a_k are weighted like the models, so their sum is tau_eff.
    effective = for_each(aggregate.message, shared["params"])

    def step(x: jax.Array, d: jax.Array, tau: jax.Array) -> jax.Array:
        return x + tau.astype(x.dtype) * d

    params = jax.tree.map(step, shared["params"], aggregate.mean["params"], effective)
    return {**aggregate.mean, "params": params}, state
