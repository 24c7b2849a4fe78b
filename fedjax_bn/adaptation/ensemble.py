"""Ensemble of the clients' batch norms (Seo et al., ECCV 2020: DSON)."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.adaptation.adaptation import Adaptation, predict_each
from fedjax_bn.sharing import Variables, all_but_batch_norm, join, split

COLLECTION = "clients"


def ensemble(model: Any) -> Adaptation:
    """log of the mean over clients of softmax(logits with that client's batch norms).

    Each member takes one client's scale, bias, mean and variance and all else from the received
    model. It needs every client's batch norms at the tested client (see `with_clients`), which
    FedIG names a threat to privacy. It costs K passes.

    Raises:
      ValueError: at `predict`, where there are no clients' batch norms, or no logits.
    """

    def predict(
        variables: Variables, carry: tuple, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, tuple]:
        del valid  # no sample sees another
        if COLLECTION not in variables:
            raise ValueError(
                f"the variables have no collection {COLLECTION!r}: make them with "
                "fedjax_bn.adaptation.with_clients(global_variables(state), "
                "client_variables(state))"
            )
        clients = variables[COLLECTION]
        received = {name: variables[name] for name in clients}
        others = {name: tree for name, tree in variables.items() if name not in clients}

        def member(own: Variables) -> jax.Array:
            mine = others | join(own, received)
            outputs = predict_each(model, None, mine, images)
            if getattr(outputs, "ndim", 0) != 2:
                raise ValueError(
                    "ensemble takes the mean of the clients' probabilities of classes, but "
                    f"{type(model).__name__} has other outputs than logits f[B, classes]: use "
                    "running or another adaptation"
                )
            return jax.nn.log_softmax(outputs)

        logs = jax.lax.map(member, clients)
        return jax.nn.logsumexp(logs, axis=0) - jnp.log(len(logs)).astype(logs.dtype), carry

    return Adaptation(lambda variables: (), predict)


def with_clients(variables: Variables, clients: Variables) -> Variables:
    """The received variables with the collection `clients`, batch norms of all clients [K, ...].

    Args:
      variables: one model's collections, as from `federation.global_variables`.
      clients: all clients' collections [K, ...], as from `federation.client_variables`.

    Raises:
      ValueError: the model has no batch norm.
    """
    model = {name: clients[name] for name in ("params", "batch_stats")}
    _, own = split(model, all_but_batch_norm(model))
    return {**variables, COLLECTION: own}
