"""FedALA (Zhang et al., AAAI 2023): clients weigh the global and their own last layers."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.arguments.text import names_in
from fedjax_bn.client import Load, Train, Trained, run_steps
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Gradient, LocalStep, differentiate, gradient_step
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.models.classifier import all_but_head
from fedjax_bn.rivals.own import of_shared, with_own
from fedjax_bn.sharing import FROZEN, OWN, Variables, everything, keeping, path_names, without
from fedjax_bn.state import Received

PyTree = Any


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
    round, where theirs reads 80 % of the samples, and in a client's second round repeats until its
    loss stands still; the last layers are named modules, the classifier by default, where theirs
    are the last arrays in the model's order.

    Args:
      model: images -> outputs.
      rate: learning rate of W, at least 0; 1 as in the authors' code.
      names: modules whose parameters are weighed, such as "layer4_1,head"; "" for the classifier,
        see `models.classifier.all_but_head`.
      optimizer, **options: as in `fedavg`.

    Raises:
      ValueError: the task has no classifier, and `names` is empty; at `init`, there is no such
        module, or the classifier is not found; at `round`, a module to weigh is frozen.
    """
    learned, rest = learning(model, classifier="" if names else "fedala", **options)
    gradient = differentiate(of_shared(supervised(learned)))

    def start(key: jax.Array, variables: Variables) -> Variables:
        del key
        chosen = _chosen(model, variables, names)
        leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
        found = {"/".join(path_names(path)): leaf for path, leaf in leaves}
        weights = {path: jnp.ones_like(found[path]) for path in chosen}
        return with_own(variables, weights=weights)

    epochs = rest.get("local_epochs", 1)
    rest["train"] = _weighed_first(rest.get("train") or run_steps, gradient, rate, epochs)
    return method_of(
        gradient_step(gradient, optimizer),
        share=keeping(rest.pop("share", everything), OWN),
        start=start,
        **rest,
    )


def _chosen(model: Any, variables: Variables, names: str) -> list[str]:
    """Returns the paths of the parameters that are weighed, such as "head/kernel"."""
    paths = [
        path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables["params"])
    ]
    if not names:
        shared = jax.tree.leaves(all_but_head(model)(variables)["params"])
        return ["/".join(path) for path, keep in zip(paths, shared, strict=True) if not keep]
    chosen = []
    for name in names_in(names):
        inside = ["/".join(path) for path in paths if "/".join(path).startswith(f"{name}/")]
        if not inside:
            known = ", ".join(dict.fromkeys("/".join(path[:-1]) for path in paths))
            raise ValueError(
                f"fedala.names has {name!r}, but the model has no such module: name some of {known}"
            )
        chosen += inside
    return chosen


def _weighed(params: PyTree, own: PyTree) -> PyTree:
    """Returns w_k + (w - w_k) W where a parameter has weights, else w."""

    def one(path: tuple, w: jax.Array, mine: jax.Array) -> jax.Array:
        name = "/".join(path_names(path))
        # At weight 1 exactly w, which mine + (w - mine) is not.
        weight = own["weights"].get(name)
        return w if weight is None else w + (1 - weight) * (mine - w)

    return jax.tree_util.tree_map_with_path(one, params, own["model"]["params"])


def _weighed_first(train: Train, gradient: Gradient, rate: float, local_epochs: int) -> Train:
    """Returns local training that begins with the weights of a client's last layers."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        own, w = variables[OWN], variables["params"]
        at = {**variables, "params": _weighed(w, own)}
        gradients, (loss, _) = gradient(at, batch, received, key)
        by_path = {
            "/".join(path_names(path)): (g, w, mine)
            for (path, g), w, mine in zip(
                jax.tree_util.tree_leaves_with_path(gradients["params"]),
                jax.tree.leaves(w),
                jax.tree.leaves(own["model"]["params"]),
                strict=True,
            )
        }

        def moved(name: str, weight: jax.Array) -> jax.Array:
            if name not in by_path:
                raise ValueError(
                    f"fedala weighs {name}, which is frozen: give fedala.names without it"
                )
            g, w, mine = by_path[name]
            return jnp.clip(weight - rate * g * (w - mine), 0, 1)

        weights = {name: moved(name, weight) for name, weight in own["weights"].items()}
        return {**variables, OWN: {**own, "weights": weights}}, state, loss

    weighing = LocalStep(lambda variables: (), update)

    def trained(
        step: LocalStep,
        received: Received,
        variables: Variables,
        state: PyTree,
        batches: Batch,
        key: jax.Array,
        load: Load | None = None,
    ) -> Trained:
        epoch = batches["valid"].shape[0] // local_epochs
        first = {
            name: leaf if name == "source" else jax.tree.map(lambda x: x[:epoch], leaf)
            for name, leaf in batches.items()
        }
        own_key = stream(key, "weights of last layers")
        variables = run_steps(weighing, received, variables, (), first, own_key, load).variables
        own = variables[OWN]
        variables = {**variables, "params": _weighed(variables["params"], own)}
        done = train(step, received, variables, state, batches, key, load)
        own = {**own, "model": without(done.variables, OWN, FROZEN)}
        return done._replace(variables={**done.variables, OWN: own})

    return trained
