"""Local training of one client as a pure function: a scan over its steps.

Three seams, each a plain function or a pair of them, from the narrowest to the widest:

    objective(variables, batch, received, key) -> (value, (loss, moved))
    gradient(variables, batch, received, key) -> (gradients, (loss, moved))
    LocalStep: update(variables, state, batch, received, key) -> (variables, state, loss)

An *objective* is what a client minimizes: it returns the value to differentiate, the loss to report
(both f[], means over valid samples) and the collections that the forward pass moved, such as
`batch_stats`. A *gradient* of the parameters is that of an objective by default (`differentiate`),
and may be corrected or replaced. A *local step* is one descent along it by default
(`gradient_step`), and may be several, with whatever state they carry from step to step.

`batch` is {"image": [B, ...], "label": i32[B], "valid": bool[B], "last_epoch": bool[]}; the last
says whether the step belongs to the client's last local epoch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_bn.data.pixels.images import Prepare, standardize
from fedjax_bn.dtypes import promote
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import Variables

PyTree = Any
Batch = dict[str, jax.Array]


class Received(NamedTuple):
    """What a client starts a round with.

    Attributes:
      shared: the shared leaves as the server sent them, None elsewhere.
      personal: the client's personal leaves at the start of the round, None elsewhere.
      memory: the client's part of the method state.
      server: the server's part of the method state, the same for all clients.
      validation: the client's part of the round's `batches["validation"]`, () where there is none.
    """

    shared: PyTree
    personal: PyTree
    memory: PyTree = ()
    server: PyTree = ()
    validation: PyTree = ()


class Trained(NamedTuple):
    """What local training returns.

    Attributes:
      variables: the trained collections.
      state: the local step's state after the last step, such as an optimizer's.
      losses: f[S], the loss of each step; 0 for a step without valid samples.
      counts: i32[S], valid samples of each step.
      chosen: i32[], the steps behind `variables`; None for all S.
    """

    variables: Variables
    state: PyTree
    losses: jax.Array
    counts: jax.Array
    chosen: jax.Array | None = None

    @property
    def steps(self) -> jax.Array:
        """tau_k i32[], the real number of steps behind `variables`: those with a valid sample."""
        real = self.counts > 0
        if self.chosen is not None:
            real &= jnp.arange(len(real)) < self.chosen
        return real.sum(dtype=jnp.int32)


class LocalStep(NamedTuple):
    """One step of local training, as a pair of pure functions.

    Attributes:
      init: `init(variables) -> state`, before the first step.
      update: `update(variables, state, batch, received, key) -> (variables, state, loss f[])`.
    """

    init: Callable[[Variables], PyTree]
    update: Callable[
        [Variables, PyTree, Batch, Received, jax.Array], tuple[Variables, PyTree, jax.Array]
    ]


Objective = Callable[
    [Variables, Batch, Received, jax.Array], tuple[jax.Array, tuple[jax.Array, Variables]]
]
Load = Callable[[jax.Array, jax.Array], jax.Array]
LOADING = 2**31  # what the key of a step is folded with for `load`
Gradient = Callable[
    [Variables, Batch, Received, jax.Array], tuple[PyTree, tuple[jax.Array, Variables]]
]


def cross_entropy(model: nn.Module, prepare: Prepare | None = None) -> Objective:
    """The objective of FedAvg: mean cross entropy over the valid samples of a batch.

    Args:
      model: linen module, images f[B, ...] -> logits f[B, classes].
      prepare: turns stored images into what the model reads, see `data.images.standardize`; by
        default bytes are standardized with mean and standard deviation 0.5.
    """
    prepare = prepare or standardize()

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        del received
        images = prepare(batch["image"], parameter_dtype(variables))
        output = forward(model, variables, images, train=True, valid=batch["valid"], key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(output.outputs, batch["label"])
        loss = masked_mean(losses, batch["valid"])
        return loss, (loss, output.moved)

    return objective


def differentiate(objective: Objective) -> Gradient:
    """The gradient of an objective with respect to all parameters, by reverse differentiation."""

    def gradient(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[PyTree, tuple[jax.Array, Variables]]:
        def value(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
            return objective({**variables, "params": params}, batch, received, key)

        (_, reported), gradients = jax.value_and_grad(value, has_aux=True)(variables["params"])
        return gradients, reported

    return gradient


def gradient_step(gradient: Gradient, optimizer: optax.GradientTransformation) -> LocalStep:
    """The step of FedAvg: the optimizer moves all parameters along their gradient.

    Args:
      gradient: usually `differentiate(objective)`, perhaps corrected.
      optimizer: any optax transformation.
    """

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        gradients, (loss, moved) = gradient(variables, batch, received, key)
        gradients, params = wait_for_all(gradients), variables["params"]
        with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
            updates, state = optimizer.update(gradients, state, params)
        return {**variables, **moved, "params": optax.apply_updates(params, updates)}, state, loss

    return LocalStep(init=lambda variables: optimizer.init(variables["params"]), update=update)


def wait_for_all(gradients: PyTree) -> PyTree:
    """The same gradients, none of which is ready before all are.

    Without it XLA:CPU copies a large weight in every step, because its update might run before the
    last reader of the old value (10 % of a step of DigitCNN, and 51 MB).
    """
    floating = [g for g in jax.tree.leaves(gradients) if g.size]
    if not floating:
        return gradients
    dtype = promote(*{g.dtype for g in floating})
    largest = jnp.stack([g.ravel()[0].astype(dtype) for g in floating]).max()
    never = largest > jnp.inf  # a comparison that no compiler folds, NaN included
    return jax.tree.map(lambda g: jnp.where(never, 0, g), gradients)


def train(
    step: LocalStep,
    received: Received,
    variables: Variables,
    state: PyTree,
    batches: Batch,
    key: jax.Array,
    load: Load | None = None,
) -> Trained:
    """Trains one client for S steps.

    A step without any valid sample (padding of a client with fewer batches) changes nothing.

    Args:
      step: the local step.
      received: what the client starts the round with.
      variables: the collections to train, usually `join(received.shared, received.personal)`.
      state: the local step's state before the first step.
      batches: {"image": [S, B, ...], "label": i32[S, B], "valid": bool[S, B],
        "last_epoch": bool[S]}.
      key: random key of this client and round.
      load: `load(key, image)`, what a step does to `image` [B, ...] of its batch before all else.
    """
    keys = jax.random.split(key, batches["valid"].shape[0])
    return run_steps(step, received, variables, state, batches, keys, load)


def run_steps(
    step: LocalStep,
    received: Received,
    variables: Variables,
    state: PyTree,
    batches: Batch,
    keys: jax.Array,
    load: Load | None = None,
) -> Trained:
    """As `train`, with a random key for each step, [S]."""

    def scanned(carry: tuple, inputs: tuple) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        batch, key = inputs
        if load:
            batch = batch | {"image": load(jax.random.fold_in(key, LOADING), batch["image"])}
        *new, loss = step.update(*carry, batch, received, key)
        count = batch["valid"].sum(dtype=jnp.int32)
        return select(count > 0, tuple(new), carry), (jnp.where(count > 0, loss, 0), count)

    (variables, state), (losses, counts) = jax.lax.scan(
        scanned, (variables, state), (batches, keys)
    )
    return Trained(variables, state, losses, counts)


def last_epoch(valid: jax.Array, local_epochs: int) -> jax.Array:
    """bool[S]: the steps of a client's last local epoch, the last one with a valid sample.

    A client that makes fewer local epochs than others has epochs without valid samples.

    Args:
      valid: bool[S, B], S steps of `local_epochs` equal epochs.
      local_epochs: number of epochs.
    """
    real = valid.reshape(local_epochs, -1).any(1)
    last = local_epochs - 1 - jnp.argmax(real[::-1])
    return jnp.arange(valid.shape[0]) // (valid.shape[0] // local_epochs) == last


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
