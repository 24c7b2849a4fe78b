"""Trains one client for a round, as a pure function: a scan over its local steps.

A *client* makes local steps over the round's batches by default (`train_locally`). It is the widest
of the four seams that `fedjax_bn.local_step` lists. `aggregation` implements the server's half.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Rounds, bounded
from fedjax_bn.engine.backend import all_finite, where_tree
from fedjax_bn.engine.batches import blank_padding, owned_samples
from fedjax_bn.engine.keys import step_keys, stream
from fedjax_bn.engine.packed_vectors import packing
from fedjax_bn.engine.privacy import Privacy, clipped, with_noise
from fedjax_bn.local_step import Batch, LocalStep
from fedjax_bn.sharing import Variables, join, split_like, with_frozen, without
from fedjax_bn.state import Broadcast, Own, Received, Upload
from fedjax_bn.task import masked_mean

PyTree = Any
# load(source, batch, key) -> batch, which every step first applies to its batch
Load = Callable[[PyTree, Batch, jax.Array], Batch]


class Trained(NamedTuple):
    """The result of local training.

    Attributes:
      variables: the trained collections.
      state: the local step's state after the last step, such as an optimizer's.
      losses: f[S], the loss of each step; 0 for a step without valid samples.
      counts: i32[S], valid samples of each step.
      chosen: i32[], the number of steps with a valid sample that led to `variables`; None for all.
    """

    variables: Variables
    state: PyTree
    losses: jax.Array
    counts: jax.Array
    chosen: jax.Array | None = None

    @property
    def steps(self) -> jax.Array:
        """Tau_k i32[], the number of steps with a valid sample that led to `variables`."""
        # Padding does not count, so a client with fewer batches has made fewer steps.
        made_steps = (self.counts > 0).sum(dtype=jnp.int32)
        return made_steps if self.chosen is None else self.chosen


class Begun(NamedTuple):
    """A client's training in a round, up to some step; see `methods.selection.in_pieces`.

    Attributes:
      trained: the result so far, with losses and counts of 0 in steps to come; None to begin.
      step: i32[], the number of steps made; None where no step is to be made.
    """

    trained: Trained | None = None
    step: jax.Array | None = None


class LocalUpdate(NamedTuple):
    """The result of a client's round.

    Attributes:
      variables: all its trained leaves, those it keeps and those it uploads.
      memory: what it keeps for its next round.
      message: what it uploads in addition to its shared leaves, a tree of arrays.
      losses, counts: of each step, as in `Trained`.
      trained: the training from which all of it was made; None if the client does not say.
    """

    variables: Variables
    memory: PyTree
    message: PyTree
    losses: jax.Array
    counts: jax.Array
    trained: Trained | None = None


class Client(NamedTuple):
    """A client's memory and its training, as a pair of pure functions.

    Attributes:
      init: `init(shared, personal) -> memory` before the first round, from the common start.
      run: `run(received, batches, key) -> LocalUpdate`; batches are one client's, [S, B, ...],
        with "last_epoch" bool[S].
      epochs: the number of equal local epochs in S steps.
    """

    init: Callable[[PyTree, PyTree], PyTree]
    run: Callable[[Received, Batch, jax.Array], LocalUpdate]
    epochs: int = 1


class _Memory(NamedTuple):
    """What a client of `train_locally` remembers: for the method, and of its local step if kept."""

    method: PyTree
    step: PyTree = ()


Finish = Callable[[Received, Trained], tuple[Variables, PyTree, PyTree]]
Train = Callable[..., Trained]


@bounded
def train_locally(
    step: LocalStep,
    *,
    memory: Callable[[PyTree, PyTree], PyTree] | None = None,
    finish: Finish | None = None,
    local_epochs: Rounds = 1,
    keep_optimizer: bool = False,
    load: Load | None = None,
    train: Train | None = None,
) -> Client:
    """Returns the usual client, which trains for S steps and then makes its upload.

    Args:
      step: the local step, usually a `gradient_step`.
      memory: `memory(shared, personal)` -> the method's memory of a client before the first round.
      finish: `finish(received, trained) -> (variables, memory, message)`, called after the last
        step of a round: all leaves that the client keeps or uploads, its new memory, and a message
        to the server (a tree of arrays).
      local_epochs: the number of equal epochs in S steps.
      keep_optimizer: whether clients keep the local step's state between rounds.
      load: `load(source, batch, key) -> batch`, called at the start of every step: it looks samples
        up in the client's source, augments them, and may change labels. By default `look_up`.
      train: local training over a round's steps, such as `methods.selection.best_of_round(...)`.

    Raises:
      ValueError: at `init`, the step cannot work over rounds (`LocalStep.check`).
    """
    train = train or run_steps

    def init(shared: PyTree, personal: PyTree) -> _Memory:
        variables = join(shared, personal)
        step.check(variables, keep_optimizer)
        state = step.init(variables) if keep_optimizer else ()
        return _Memory(memory(shared, personal) if memory else (), state)

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        memory_before, received = received.memory, received._replace(memory=received.memory.method)
        variables = join(received.shared, received.personal)
        # A client without `keep_optimizer` starts each round with a fresh optimizer (FedAvg).
        state = memory_before.step if keep_optimizer else step.init(variables)
        state = _with_keys_of(state, key)
        # Each step gets the frozen leaves from `received`, so that no loop carries them.
        variables = with_frozen(variables, None)
        trained = train(step, received, variables, state, batches, key, load)
        variables, method_memory, message = (
            finish(received, trained) if finish else (trained.variables, received.memory, ())
        )
        memory_after = _Memory(method_memory, trained.state if keep_optimizer else ())
        steps = trained.losses, trained.counts
        return LocalUpdate(variables, memory_after, message, *steps, trained)

    return Client(init, run, local_epochs)


def look_up(source: PyTree, batch: Batch, key: jax.Array) -> Batch:
    """Returns the batch; with a source [N, ...], the numbers in "image" become its images."""
    del key
    return batch if source is None else batch | {"image": source[batch["image"]]}


def load_first(load: Load | None, batches: Batch, key: jax.Array) -> Batch:
    """Returns a client's first batch of a round, loaded and with its padding blanked."""
    first_batch = jax.tree.map(lambda leaf: leaf[0], without(batches, "source"))
    return blank_padding((load or look_up)(batches.get("source"), first_batch, key))


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
      step, received, load: as in `train_locally`, and what the client starts the round with.
      variables: the collections to train, usually `join(received.shared, received.personal)`.
      state: the local step's state before the first step.
      batches: as `Client.run` takes them, optionally with "source" [N, ...].
      key: random key of this client and round, or one key for each step [S].
    """
    load, source = load or look_up, batches.get("source")
    # The source has no axis S: every step reads from it, so it is not scanned over.
    steps = without(batches, "source")
    # One key per step, so that part of a round draws the same random numbers as the whole round.
    keys = key if key.ndim else step_keys(key, steps["valid"])

    def scanned(carry: tuple, inputs: tuple) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        batch, key = inputs
        # Padding is blanked after `load`, because padded entries may point at any image of the
        # source. `load` has its own stream, so dropout draws the same with or without it.
        batch = blank_padding(load(source, batch, stream(key, "load")))
        variables, state = unpack(carry)
        complete = received.with_frozen(variables)
        *stepped, loss = step.update(complete, state, batch, received, key)
        stepped[0] = with_frozen(stepped[0], None)
        count = batch["valid"].sum(dtype=jnp.int32)
        # A step of padding must not move an optimizer's momentum or a running statistic either.
        stepped = pack(tuple(stepped))
        return where_tree(count > 0, stepped, carry), (jnp.where(count > 0, loss, 0), count)

    pack, unpack = packing((variables, state))
    trained, (losses, counts) = jax.lax.scan(scanned, pack((variables, state)), (steps, keys))
    variables, state = unpack(trained)
    return Trained(variables, state, losses, counts)


def clipping(client: Client, privacy: Privacy) -> Client:
    """Returns the client with its upload clipped, and with noise added if clients add the noise.

    Its personal leaves stay as trained. ValueError at `run` if the client also sends a message.
    """

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        update = client.run(received, batches, key)
        if sent := len(jax.tree.leaves(update.message)):
            arrays = f"the {sent} arrays that this method sends beside leaves"
            remedy = "use a method such as fedbn"
            raise ValueError(f"privacy would neither clip nor noise {arrays}: {remedy}")
        shared, personal = split_like(update.variables, received.shared)
        # Clip before adding noise, because the noise is scaled to the clip.
        shared = clipped(shared, received.shared, privacy.clip)
        if privacy.at == "client":
            # The run's key is not secret: without the privacy seed anyone could subtract the noise.
            key = jax.random.fold_in(stream(key, "privacy"), privacy.seed)
            shared = with_noise(shared, key, privacy.noise * privacy.clip)
        return update._replace(variables=join(shared, personal))

    return client._replace(run=run)


def take_part(
    client: Client,
    broadcast: Broadcast,
    own: Own,
    batches: Batch,
    key: jax.Array,
    divided: bool = False,
    begun: Begun | None = None,
) -> tuple[Own, Upload, jax.Array]:
    """Trains one client and makes its upload.

    A client that sits out costs its device no time if clients are mapped one after another.

    Batches are one client's of a round, without the axis K and with "client" i32[]; `key` is the
    run's. With `divided` several devices share the client's samples while others train other
    clients. Then a client that sits out trains too, and the result is dropped: a reduction in a
    branch that only some devices take would wait for the others forever. `begun` is a training
    whose steps `take_steps` has made.

    Returns the client's new personal leaves and memory, its upload, and the losses of steps f[S].
    """
    who, size = batches["client"], owned_samples(batches, client.epochs)
    received, data, key = _start(client, broadcast, own, batches, key, begun)
    in_last_epoch, own = data["last_epoch"], own._replace(frozen=())

    @functools.partial(jax.jit, inline=True)  # traced once, although `idle` needs its shapes too
    def train(received: Received) -> tuple[Own, PyTree, LocalUpdate, jax.Array]:
        update = client.run(received, data, key)
        shared, personal = split_like(update.variables, broadcast.shared)
        trained = Own(personal, update.memory)
        finite = all_finite((shared, trained, update.message, update.losses))
        # Leaves and memory are in `shared` and `trained`, so they are not returned twice.
        update_alone = update._replace(variables={}, memory=(), trained=None)
        # A client whose update is not finite keeps its leaves; its upload is left out later.
        return where_tree(finite, trained, own), shared, update_alone, finite

    def idle(received: Received) -> tuple[Own, PyTree, LocalUpdate, jax.Array]:
        # Both branches of a `cond` must return the same structure, so this one uploads zeros.
        like = jax.eval_shape(train, received)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        # True, because a client that sits out has not failed.
        return own, *nothing[1:3], jnp.ones((), bool)

    participates = batches.get("participates")
    if participates is None:
        participates = jnp.ones((), bool)
        own, shared, update, finite = train(received)
    elif divided:
        own, shared, update, finite = where_tree(participates, train(received), idle(received))
    else:
        own, shared, update, finite = jax.lax.cond(participates, train, idle, received)
    losses, counts = update.losses, update.counts
    upload = Upload(
        shared=shared,
        message=update.message,
        size=size,
        risk=masked_mean(losses, jnp.where(in_last_epoch, counts, 0)),
        loss=masked_mean(losses, counts),
        finite=finite,
        participates=participates,
        client=who,
        population=batches.get("population"),
    )
    return own, upload, losses


def take_steps(client: Client, *start: Any) -> Trained | None:
    """Returns a client's training after its next steps, or before the first with `Begun()`.

    The arguments are those of `take_part` without `divided`; the client trains in pieces.
    """
    # What follows the training, such as the upload, is not used, so XLA does not compute it.
    return client.run(*_start(client, *start)).trained


def _start(
    client: Client,
    broadcast: Broadcast,
    own: Own,
    batches: Batch,
    key: jax.Array,
    begun: Begun | None,
) -> tuple[Received, Batch, jax.Array]:
    """Returns the arguments of `client.run` in a round."""
    # The client's number, not its row, so that a client draws the same in a cohort or without one.
    who = batches["client"]
    key = jax.random.fold_in(jax.random.fold_in(key, broadcast.round), who)
    read = ("image", "label", "valid", "source")
    data = {name: batches[name] for name in read if name in batches}
    data["last_epoch"] = _last_epoch(batches["valid"], client.epochs)
    start = (broadcast.shared, with_frozen(own.personal, own.frozen), own.memory)
    validation = batches.get("validation", ())
    server = broadcast.message, validation, broadcast.round
    return Received(*start, *server, who, begun), data, key


def _last_epoch(valid: jax.Array, epochs: int) -> jax.Array:
    """Returns bool[S], True in the last of E epochs of `valid` bool[S, B] that has samples."""
    # Counted from the end, because padding epochs follow the real ones.
    real = valid.reshape(epochs, -1).any(1)
    last_real = epochs - 1 - jnp.argmax(real[::-1])
    return jnp.arange(valid.shape[0]) // (valid.shape[0] // epochs) == last_real


def _with_keys_of(state: PyTree, key: jax.Array) -> PyTree:
    """Returns an optimizer's state whose random keys are those of a client and round."""
    # Without this all clients would draw the same noise, because their states start alike.

    def mixed(number: int, leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return leaf
        words = jax.random.key_data(leaf)
        part_key = jax.random.fold_in(stream(key, "local optimizer"), number)
        words ^= jax.random.bits(part_key, words.shape, words.dtype)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))

    leaves, form = jax.tree.flatten(state)
    return jax.tree.unflatten(form, [mixed(number, leaf) for number, leaf in enumerate(leaves)])
