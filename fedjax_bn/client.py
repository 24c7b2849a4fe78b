"""What one client does in a round, as a pure function: a scan over its steps.

Four seams, each a plain function or a pair of them, from the narrowest to the widest:

    objective(variables, batch, received, key) -> (value, (loss, moved))
    gradient(variables, batch, received, key) -> (gradients, (loss, moved))
    LocalStep: update(variables, state, batch, received, key) -> (variables, state, loss)
    Client: run(received, batches, key) -> LocalUpdate

An *objective* is what a client minimizes: it returns the value to differentiate, the loss to report
(both f[], means over valid samples) and the collections that the pass moved, such as `batch_stats`.
A *gradient* is that of an objective by default (`differentiate`), with respect to `params` and
perhaps other collections, and may be corrected or replaced. A *local step* is one descent along it
by default (`gradient_step`), and may be several. A *client* makes local steps over the round's
batches by default (`train_locally`).

`batch` is {"image": [B, ...], "label": i32[B] or a tree, "valid": bool[B], "last_epoch": bool[]};
the last says whether the step belongs to the client's last local epoch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.backend import wait_for_all
from fedjax_bn.batches import blank_padding
from fedjax_bn.sharing import Variables, join

PyTree = Any
Batch = dict[str, PyTree]
# load(source, batch, key) -> batch: what a step does to its batch before all else
Load = Callable[[PyTree, Batch, jax.Array], Batch]
_LOADING = 2**31  # what the key of a step is folded with for `load`


class Received(NamedTuple):
    """What a client starts a round with.

    Attributes:
      shared: the shared leaves as the server sent them, None elsewhere.
      personal: the client's personal leaves at the start of the round, None elsewhere.
      memory: what the method remembers of this client.
      server: what the server sends besides the shared leaves.
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


class LocalUpdate(NamedTuple):
    """A client's round.

    Attributes:
      variables: the leaves that it keeps and uploads.
      memory: what it remembers.
      message: what it uploads besides its shared leaves, a tree of arrays.
      losses: f[S], the loss of each step; 0 for a step without valid samples.
      counts: i32[S], valid samples of each step.
    """

    variables: Variables
    memory: PyTree
    message: PyTree
    losses: jax.Array
    counts: jax.Array


class Client(NamedTuple):
    """What a client remembers and does, as a pair of pure functions.

    Attributes:
      init: `init(shared, personal) -> memory`, before the first round, from the common start.
      run: `run(received, batches, key) -> LocalUpdate`; batches are one client's, [S, B, ...],
        with "last_epoch" bool[S].
      epochs: S steps are this many equal local epochs.
    """

    init: Callable[[PyTree, PyTree], PyTree]
    run: Callable[[Received, Batch, jax.Array], LocalUpdate]
    epochs: int = 1


class Memory(NamedTuple):
    """What a client of `train_locally` remembers.

    Attributes:
      method: the method's own.
      step: the state of the local step, () where it starts afresh each round.
    """

    method: PyTree
    step: PyTree = ()


Objective = Callable[
    [Variables, Batch, Received, jax.Array], tuple[jax.Array, tuple[jax.Array, PyTree]]
]
Gradient = Callable[
    [Variables, Batch, Received, jax.Array], tuple[Variables, tuple[jax.Array, PyTree]]
]
Finish = Callable[[Received, Trained], tuple[Variables, PyTree, PyTree]]
Train = Callable[..., Trained]


def differentiate(objective: Objective, collections: tuple[str, ...] = ("params",)) -> Gradient:
    """The gradient of an objective with respect to whole collections, {collection: tree}."""

    def gradient(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, tuple[jax.Array, PyTree]]:
        def value(trained: Variables) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
            return objective({**variables, **trained}, batch, received, key)

        trained = {name: variables[name] for name in collections}
        (_, reported), gradients = jax.value_and_grad(value, has_aux=True)(trained)
        return gradients, reported

    return gradient


def gradient_step(
    gradient: Gradient,
    optimizer: optax.GradientTransformation,
    collections: tuple[str, ...] = ("params",),
) -> LocalStep:
    """The step of FedAvg: the optimizer moves whole collections along their gradient.

    Args:
      gradient: usually `differentiate(objective, collections)`, perhaps corrected.
      optimizer: any optax transformation, of {collection: tree}.
      collections: those that the gradient is of.
    """

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        gradients, (loss, moved) = gradient(variables, batch, received, key)
        trained, state = descend(optimizer, gradients, state, variables)
        return {**variables, **moved, **trained}, state, loss

    def init(variables: Variables) -> PyTree:
        return optimizer.init({name: variables[name] for name in collections})

    return LocalStep(init, update)


def descend(
    optimizer: optax.GradientTransformation,
    gradients: Variables,
    state: PyTree,
    variables: Variables,
) -> tuple[Variables, PyTree]:
    """One step of an optimizer: the moved collections of `gradients`, and its new state."""
    trained = {name: variables[name] for name in gradients}
    with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
        updates, state = optimizer.update(wait_for_all(gradients), state, trained)
    return optax.apply_updates(trained, updates), state


def no_memory(shared: PyTree, personal: PyTree) -> PyTree:
    """A client remembers nothing but its personal leaves."""
    del shared, personal
    return ()


def plain_finish(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """A client uploads its trained leaves and nothing else; its memory stays as it was."""
    return trained.variables, received.memory, ()


def train_locally(
    step: LocalStep,
    *,
    memory: Callable[[PyTree, PyTree], PyTree] = no_memory,
    finish: Finish = plain_finish,
    local_epochs: int = 1,
    keep_optimizer: bool = False,
    load: Load | None = None,
    train: Train | None = None,
) -> Client:
    """The usual client: it trains for S steps, and then decides what it keeps and uploads.

    Args:
      step: the local step, usually a `gradient_step`.
      memory: `memory(shared, personal)` -> what the method remembers of a client before the first
        round, from the common start.
      finish: `finish(received, trained) -> (variables, memory, message)`, a client's last act of a
        round: the leaves that it keeps and uploads, its new memory, and a message to the server
        (a tree of arrays).
      local_epochs: S steps are this many equal epochs; at least 1.
      keep_optimizer: whether clients keep the local step's state between rounds.
      load: `load(source, batch, key) -> batch`, what every step does to its batch before all else:
        it finds samples in the client's source, augments, and may move labels. By default
        `look_up`.
      train: local training over a round's steps, such as `selection.best_of_round(...)`.

    Raises:
      ValueError: `local_epochs` is below 1.
    """
    if local_epochs < 1:
        raise ValueError(f"local_epochs={local_epochs} must be at least 1")
    train = train or run_steps

    def init(shared: PyTree, personal: PyTree) -> Memory:
        state = step.init(join(shared, personal)) if keep_optimizer else ()
        return Memory(memory(shared, personal), state)

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        own, received = received.memory, received._replace(memory=received.memory.method)
        variables = join(received.shared, received.personal)
        state = own.step if keep_optimizer else step.init(variables)
        trained = train(step, received, variables, state, batches, key, load)
        variables, mine, message = finish(received, trained)
        kept = Memory(mine, trained.state if keep_optimizer else ())
        return LocalUpdate(variables, kept, message, trained.losses, trained.counts)

    return Client(init, run, local_epochs)


def look_up(source: PyTree, batch: Batch, key: jax.Array) -> Batch:
    """The batch; where there is a source [N, ...], its images are those of the batch's numbers."""
    del key
    return batch if source is None else batch | {"image": source[batch["image"]]}


def augmenting(augment: Callable[[jax.Array, jax.Array], jax.Array] | None) -> Load:
    """The `load` that looks samples up and changes their images by `augment(key, images)`."""

    def load(source: PyTree, batch: Batch, key: jax.Array) -> Batch:
        batch = look_up(source, batch, key)
        return batch if augment is None else batch | {"image": augment(key, batch["image"])}

    return load


def run_steps(
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
      batches: {"image": [S, B, ...], "label": i32[S, B] or a tree, "valid": bool[S, B],
        "last_epoch": bool[S]}, perhaps with "source" [N, ...].
      key: random key of this client and round, or a key of each step [S].
      load: as in `train_locally`.
    """
    load, source = load or look_up, batches.get("source")
    steps = {name: leaf for name, leaf in batches.items() if name != "source"}
    keys = key if key.ndim else jax.random.split(key, steps["valid"].shape[0])

    def scanned(carry: tuple, inputs: tuple) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        batch, key = inputs
        batch = blank_padding(load(source, batch, jax.random.fold_in(key, _LOADING)))
        *new, loss = step.update(*carry, batch, received, key)
        count = batch["valid"].sum(dtype=jnp.int32)
        return where_tree(count > 0, tuple(new), carry), (jnp.where(count > 0, loss, 0), count)

    (variables, state), (losses, counts) = jax.lax.scan(scanned, (variables, state), (steps, keys))
    return Trained(variables, state, losses, counts)


def where_tree(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """`yes` where the condition bool[] holds, else `no`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
