"""Local training of one client as a pure function: a scan over its steps.

What a client minimizes is an *objective*, a function

    objective(variables, batch, received, key) -> (value, (loss, moved))

of its variables (linen collections), one batch, the model as it received it and a random key. It
returns the value to differentiate, the loss to report (both f[], means over valid samples) and the
collections that the forward pass moved, such as `batch_stats`.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_bn.data.images import Prepare
from fedjax_bn.dtypes import promote
from fedjax_bn.normalization import normalize_with
from fedjax_bn.sharing import STATISTICS, Variables

PyTree = Any
Batch = dict[str, jax.Array]


class Received(NamedTuple):
    """What a client starts a round with.

    Attributes:
      shared: the shared leaves as the server sent them, None elsewhere.
      personal: the client's personal leaves at the start of the round, None elsewhere.
      memory: the client's part of the method state.
    """

    shared: PyTree
    personal: PyTree
    memory: PyTree


class Trained(NamedTuple):
    """What local training returns.

    Attributes:
      variables: the trained collections.
      optimizer_state: the local optimizer's state after the last step.
      losses: f[S], the loss of each step; 0 for a step without valid samples.
      counts: i32[S], valid samples of each step.
    """

    variables: Variables
    optimizer_state: PyTree
    losses: jax.Array
    counts: jax.Array


Objective = Callable[
    [Variables, Batch, Received, jax.Array], tuple[jax.Array, tuple[jax.Array, Variables]]
]


def cross_entropy(model: nn.Module, prepare: Prepare) -> Objective:
    """The objective of FedAvg: mean cross entropy over the valid samples of a batch.

    Args:
      model: linen module, images f[B, ...] -> logits f[B, classes].
      prepare: turns stored images into what the model reads, see `data.images.standardize`.
    """

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        del received
        images = prepare(batch["image"], parameter_dtype(variables))
        logits, moved = forward(model, variables, images, batch["valid"], key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        loss = masked_mean(losses, batch["valid"])
        return loss, (loss, moved)

    return objective


def forward(
    model: nn.Module, variables: Variables, images: jax.Array, valid: jax.Array, key: jax.Array
) -> tuple[jax.Array, Variables]:
    """One training pass: logits f[B, classes] and the moved `batch_stats`.

    Batch norms see the valid samples only. A model whose `__call__` takes `train` is told so, and
    `key` feeds its dropout.
    """
    options = {"train": True} if "train" in inspect.signature(model.__call__).parameters else {}
    with normalize_with(valid=valid):
        return model.apply(
            variables, images, mutable=[STATISTICS], rngs={"dropout": key}, **options
        )


def train(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    received: Received,
    variables: Variables,
    optimizer_state: PyTree,
    batches: Batch,
    key: jax.Array,
) -> Trained:
    """Trains one client for S steps.

    A step without any valid sample (padding of a client with fewer batches) changes nothing.

    Args:
      objective: see the module's docstring.
      optimizer: the local optimizer, applied to `params`.
      received: what the client starts the round with.
      variables: the collections to train, usually `join(received.shared, received.personal)`.
      optimizer_state: its state before the first step.
      batches: {"image": [S, B, ...], "label": i32[S, B], "valid": bool[S, B]}.
      key: random key of this client and round.
    """

    def step(carry: tuple, inputs: tuple) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        variables, state = carry
        batch, key = inputs

        def value(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
            return objective({**variables, "params": params}, batch, received, key)

        (_, (loss, moved)), gradients = jax.value_and_grad(value, has_aux=True)(variables["params"])
        with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
            updates, new_state = optimizer.update(gradients, state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        count = batch["valid"].sum(dtype=jnp.int32)
        new = ({**variables, **moved, "params": params}, new_state)
        return select(count > 0, new, carry), (jnp.where(count > 0, loss, 0), count)

    keys = jax.random.split(key, batches["valid"].shape[0])
    (variables, optimizer_state), (losses, counts) = jax.lax.scan(
        step, (variables, optimizer_state), (batches, keys)
    )
    return Trained(variables, optimizer_state, losses, counts)


def select(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """`yes` where the condition bool[] holds, else `no`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def masked_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean f[] of `values` f[N] with weights (or a mask) [N]; 0 where all weights are 0."""
    weights = weights.astype(values.dtype)
    values = jnp.where(weights > 0, values, 0)
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1)


def parameter_dtype(variables: Variables) -> Any:
    """The dtype of a model's parameters, in which it is fed."""
    return promote(*{leaf.dtype for leaf in jax.tree.leaves(variables["params"])})
