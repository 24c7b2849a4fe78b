"""Defines what a client minimizes, along which gradient, and one step of its training.

Four seams, from the narrowest to the widest:

    objective(variables, batch, received, key) -> (value, (loss, moved))
    gradient(variables, batch, received, key) -> (gradients, (loss, moved))
    LocalStep: update(variables, state, batch, received, key) -> (variables, state, loss)
    client.Client: run(received, batches, key) -> LocalUpdate

An *objective* returns the value to differentiate, the loss to report (both f[], means over valid
samples) and the collections that the forward pass updated, such as `batch_stats`. A *gradient* by
default differentiates an objective with respect to `params` (`differentiate`); a method may correct
or replace it. A *local step* by default makes one descent along the gradient (`gradient_step`).

`batch` is {"image": [B, ...], "label": i32[B] or a tree, "valid": bool[B], "last_epoch": bool[]};
"last_epoch" is True in the steps of the client's last local epoch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from fedjax_bn.engine.backend import wait_for_all
from fedjax_bn.engine.optimizers import by_round as by_round
from fedjax_bn.engine.optimizers import check_optimizer, check_rounds, descend, start
from fedjax_bn.sharing import FROZEN, Variables, filled, trainable
from fedjax_bn.state import Received

PyTree = Any
Batch = dict[str, PyTree]
# What objectives and gradients return: (value f[] or {collection: tree}, (loss f[], moved)).
Value = tuple[jax.Array, tuple[jax.Array, PyTree]]
Grads = tuple[Variables, tuple[jax.Array, PyTree]]
_Stepped = tuple[Variables, PyTree, jax.Array]  # with the loss f[]
Objective = Callable[[Variables, Batch, Received, jax.Array], Value]
Gradient = Callable[[Variables, Batch, Received, jax.Array], Grads]


class LocalStep(NamedTuple):
    """One step of local training, as a pair of pure functions.

    Attributes:
      init: `init(variables) -> state`, the state before the first step.
      update: `update(variables, state, batch, received, key) -> (variables, state, loss f[])`.
      check: `check(variables, keep)` raises ValueError if the step cannot work over rounds; `keep`
        is whether a client keeps the step's state between rounds.
    """

    init: Callable[[Variables], PyTree]
    update: Callable[[Variables, PyTree, Batch, Received, jax.Array], _Stepped]
    check: Callable[[Variables, bool], None] = lambda variables, keep: None


def differentiate(objective: Objective, collections: tuple[str, ...] = ("params",)) -> Gradient:
    """Returns the gradient of an objective with respect to whole collections, {collection: tree}.

    On CPU no part of it is used before all of it is computed (see `backend.wait_for_all`). A
    method's correction comes later, so that XLA computes it in the optimizer's pass through the
    weights.
    """

    def gradient(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Grads:
        frozen = variables.get(FROZEN)
        variables = trainable(variables)  # complete if an objective calls this

        def value(trained: Variables) -> Value:
            # Complete, because an objective may call `model.apply` itself.
            return objective(filled({**variables, **trained}, frozen), batch, received, key)

        trained = {name: variables[name] for name in collections}
        # The minimized value is not reported: a method's loss may differ from it.
        (_, reported), gradients = jax.value_and_grad(value, has_aux=True)(trained)
        return wait_for_all(gradients), reported

    return gradient


def gradient_step(
    gradient: Gradient,
    optimizer: optax.GradientTransformation,
    collections: tuple[str, ...] = ("params",),
) -> LocalStep:
    """Returns the step of FedAvg: the optimizer moves whole collections along their gradient.

    Args:
      gradient: usually `differentiate(objective, collections)`, possibly corrected.
      optimizer: an optax transformation of {collection: tree}, see `fedjax_bn.engine.optimizers`;
        if `params` is the only collection, masks and labels may match the parameters.
      collections: the collections that the gradient covers.

    Raises:
      ValueError: `optimizer` is not an optax transformation.
    """
    check_optimizer(optimizer)

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> _Stepped:
        gradients, (loss, moved) = gradient(variables, batch, received, key)
        # An optimizer that starts afresh each round cannot count rounds, so it is given this one.
        trained, state = descend(optimizer, gradients, state, variables, received.round, loss)
        # The forward pass updates collections such as batch_stats, the optimizer the trained ones.
        moved = trainable(moved, variables.get(FROZEN))
        return {**variables, **moved, **trained}, state, loss

    def trained_of(variables: Variables) -> Variables:
        return {name: variables[name] for name in collections}

    return LocalStep(
        lambda variables: start(optimizer, trained_of(variables)),
        update,
        lambda variables, keep: check_rounds(optimizer, trained_of(variables), keep),
    )


def minimizing(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    collections: tuple[str, ...] = ("params",),
) -> LocalStep:
    """Returns the `gradient_step` along the gradient of an objective by `differentiate`."""
    return gradient_step(differentiate(objective, collections), optimizer, collections)


def in_turn(*steps: LocalStep) -> LocalStep:
    """Returns the step that makes several steps on one batch and reports the loss of the first."""

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> _Stepped:
        states, losses = [], []
        for step, step_state in zip(steps, state, strict=True):
            variables, after, loss = step.update(variables, step_state, batch, received, key)
            states.append(after)
            losses.append(loss)
        return variables, tuple(states), losses[0]

    def check(variables: Variables, keep: bool) -> None:
        for step in steps:
            step.check(variables, keep)

    return LocalStep(lambda variables: tuple(step.init(variables) for step in steps), update, check)
