"""FedALA (Zhang et al., AAAI 2023): clients weigh the global and their own last layers."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.arguments.text import names_in
from fedjax_bn.client import Load, Train, Trained, run_steps
from fedjax_bn.contrib.parts import of_shared, with_model, with_own_model
from fedjax_bn.engine.batches import first_epoch
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, LocalStep, Objective, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.models.classifier import only_head
from fedjax_bn.sharing import OWN, PyTree, Variables, at, split, without
from fedjax_bn.state import Received


@bounded
def fedala(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    rate: AtLeast0 = 1.0,
    names: str = "",
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""Before training, a client replaces the last layers by a learned mean of w and its own.

    $\hat w = w_k + (w - w_k) \odot W$ with $W$ in [0, 1] for each value (Eq. 4 of the paper)

    w is the received model, w_k the client's own at the end of its last round. W starts at 1. At
    the start of a round each batch of the first local epoch moves it,

    $W' = W - rate \; \nabla F_k(\hat w) \odot (w - w_k)$, clipped to [0, 1]

    and then the client trains from the weighted model as in FedAvg. All other leaves are those
    received. W and w_k stay with the client, which predicts with w_k; an unseen client receives
    the mean of the trained models. With rate 0 it is FedAvg.

    Differs from the authors' code (TsingZ0/FedALA): W passes once over the epoch's batches in every
    round, theirs over 80 % of the samples, and in a client's second round until its loss stands
    still; the last layers are named modules; the model is tested after training, not before.

    Args:
      rate: learning rate of W, at least 0; 1 as in the authors' code.
      names: modules whose parameters are weighed, such as "layer4_1,head"; "" for the classifier,
        see `models.classifier.only_head`. A frozen module raises ValueError at `round`.
    """
    learned, federate_options = learning(model, classifier="" if names else "fedala", **options)
    objective = supervised(learned)
    chosen = at(*names_in(names)) if names else only_head(model)

    def start(key: jax.Array, variables: Variables) -> Variables:
        last_layers, _ = split(variables, chosen(variables))
        return with_own_model(variables, weights=jax.tree.map(jnp.ones_like, last_layers["params"]))

    train, epochs = options.get("train") or run_steps, options.get("local_epochs", 1)
    federate_options["train"] = _weighed_first(train, objective, rate, epochs)
    step = of_shared(minimizing(objective, optimizer))
    return method_of(step, keeps=OWN, start=start, **federate_options)


def _weighed(variables: Variables, weights: PyTree) -> Variables:
    """Returns the shared model with w_k + (w - w_k) W where a parameter has weights W."""

    def mean(weight: jax.Array | None, w: jax.Array | None, personal: jax.Array) -> Any:
        if weight is None:
            return w
        if w is None:
            raise ValueError("fedala weighs a frozen module: name others by fedala:names")
        # At weight 1 exactly w, which personal + (w - personal) is not.
        return w + (1 - weight) * (personal - w)

    trees = weights, variables["params"], variables[OWN]["model"]["params"]
    params = jax.tree.map(mean, *trees, is_leaf=lambda leaf: leaf is None)
    return {**without(variables, OWN), "params": params}


def _weighed_first(train: Train, objective: Objective, rate: float, local_epochs: int) -> Train:
    """Returns local training that begins with the weights of a client's last layers."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        def value(weights: PyTree) -> tuple[jax.Array, jax.Array]:
            value, (loss, _) = objective(_weighed(variables, weights), batch, received, key)
            return value, loss

        personal = variables[OWN]
        # The gradient of W is that at the weighed parameters times w - w_k.
        slopes, loss = jax.grad(value, has_aux=True)(personal["weights"])

        def moved(weight: jax.Array, slope: jax.Array) -> jax.Array:
            return jnp.clip(weight - rate * slope, 0, 1)

        weights = jax.tree.map(moved, personal["weights"], slopes)
        return {**variables, OWN: {**personal, "weights": weights}}, state, loss

    weighing = LocalStep(lambda variables: (), update)

    def weighed_and_trained(
        step: LocalStep, received: Received, variables: Variables, state: PyTree, batches: Batch,
        key: jax.Array, load: Load | None = None,
    ) -> Trained:  # fmt: skip
        epoch, own_key = first_epoch(batches, local_epochs), stream(key, "weights of last layers")
        variables = run_steps(weighing, received, variables, (), epoch, own_key, load).variables
        # Training starts at the weighed model.
        variables |= _weighed(variables, variables[OWN]["weights"])
        trained = train(step, received, variables, state, batches, key, load)
        # What the client has trained is its own model in the next round.
        return trained._replace(variables=with_model(trained.variables, trained.variables))

    return weighed_and_trained
