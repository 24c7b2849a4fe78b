"""Builds the server's side without a network: its state and its step."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.adding import Adding
from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.engine.weighing import in_dtypes_of, weighted
from fedjax_bn.federation import FederatedState, Upload, broadcast_of, own_of, traffic
from fedjax_bn.flower.accept import Accepted
from fedjax_bn.flower.messages import Order
from fedjax_bn.flower.settings import Run
from fedjax_bn.flower.site import deployed, sent_personal
from fedjax_bn.run.experiment.build import Experiment, assemble, choose_participation
from fedjax_bn.run.experiment.method import local_epochs
from fedjax_bn.run.experiment.start import prepare
from fedjax_bn.run.files.finished import dataset_of
from fedjax_bn.task import Task
from fedjax_bn.training.availability import Participation, read_trace
from fedjax_bn.training.start import Keys, batches_of_one, make_start, partition_table

PyTree = Any
_Add = Callable[[Any, Accepted], Any]
_Finish = Callable[["Kept", Any, np.ndarray], tuple["Kept", jax.Array, jax.Array]]
_Served = tuple[FederatedState, jax.Array]
_ALIGNED = 64  # bytes; XLA on CPU uses arrays without a copy if their address is a multiple of it


class Kept(NamedTuple):
    """What the server keeps between rounds; the content of its checkpoints.

    Attributes:
      state: the federation's state, [K] where it is by client; the clients' own parts are ().
      served: the mean of the personal leaves that an unseen client receives, from the last round in
        which a client of positive weight took part; () if clients do not send them.
      taken: i32[K], for each client the number of rounds finished when its last accepted upload was
        added; 0 before.
    """

    state: FederatedState
    served: PyTree
    taken: jax.Array

    round = property(lambda self: self.state.round)


class Host(NamedTuple):
    """What a server builds before its first round, from `config` and `run`.

    Attributes:
      config: the configuration.
      run: the run config.
      keys: the run's random keys.
      alone: makes the start of a federation of one client, the form of what is served.
      start: makes the `Kept` before the first round.
      order: the header of the server's messages, with begin=0.
      form: the form of all clients' samples, as JSON.
      upload: the form of one client's upload.
      personal: the form of the personal leaves that are sent (`sent_personal`); () for none.
      notes: messages for the log: which leaves are shared, how many bytes travel.
      participation: the rule by which clients take part in a round.
      task: what the clients learn, whose score they report.
      add: `add(total, accepted) -> total` adds an upload to the total of a round, which is None
        before the first. The total is sums or, if weights need all uploads, client -> upload.
      step: `step(kept, total, rows) -> (kept, weights f[K], finite bool[])`, the end of a round;
        `rows` i32[C] are all drawn clients, also those without an upload. The weights are those of
        the round: all 0 if no client counts. A server's step that is not finite is dropped.
    """

    config: ConfigDict
    run: Run
    keys: Keys
    alone: Callable[[], FederatedState]
    start: Callable[[], Kept]
    order: Order
    form: str
    upload: Upload
    personal: PyTree
    notes: tuple[str, ...]
    participation: Participation
    task: Task
    add: _Add
    step: _Finish


def open_host(config: ConfigDict, run: Run, order: Order, form: str) -> Host:
    """Returns the server's side for a configuration; the arguments are fields of `Host`.

    Raises:
      ConfigError: the configuration is wrong, or does not suit the number of clients.
    """
    epochs, count = local_epochs(config), run.clients
    if len(epochs) > 1 and len(epochs) != count:
        raise ConfigError(
            f"config.client_epochs has {len(epochs)} numbers for the {count} clients of the "
            "run config: give one for each"
        )
    if config.clients_per_round > count:
        raise ConfigError(
            f"config.clients_per_round={config.clients_per_round} is more than the {count} "
            "clients of the run config: use 0 for all of them"
        )
    alone = deployed(config)
    alone.target = ""  # the server has no domains that it could leave out
    internal = dataset_of(json.loads(form) | {"dataset": "federation", "clients": ["federation"]})
    trace = read_trace(config.participation.trace, count)
    who = choose_participation(config, count)._replace(trace=trace)

    def make(config: ConfigDict) -> Experiment:
        # `prepare` traces the server's step with as many uploads as a round has.
        drawn = who._replace(on_host=False)
        return assemble(config, internal, ())._replace(participation=drawn)

    experiment, keys, make_alone = prepare(alone, make, clients=count)
    rows = make_start(experiment, keys, rows=count, clients=count)

    def start() -> Kept:
        state = make_alone()
        # Compiled, because XLA then drops the unused rows of the clients' own parts, [K, ...].
        weights, weighing = jax.jit(lambda: (rows().weights, rows().weighing))()
        personal_row = jax.tree.map(lambda leaf: leaf[0], state.personal)
        served = sent_personal(personal_row) if run.serve_unseen else ()
        state = state._replace(weights=weights, weighing=weighing, personal=(), memory=())
        return Kept(state, served, jnp.zeros(count, jnp.int32))

    like = jax.eval_shape(make_alone)
    personal_part = jax.eval_shape(lambda state: own_of(state, 0), like)
    batches = batches_of_one(experiment)
    batches["population"] = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(jax.random.key, 0)
    personal = sent_personal(personal_part.personal) if run.serve_unseen else ()
    method = experiment.method
    _, upload = jax.eval_shape(method.client, broadcast_of(like), personal_part, batches, key)
    sent = traffic(method, like, batches)
    notes = (
        *experiment.notes,
        partition_table(experiment, jax.eval_shape(rows)),
        "a client and round: {down:,} bytes down, {up:,} bytes up".format(**sent),
    )
    if method.adding:
        add, step = _by_sums(method.adding, count, upload, personal)
    else:
        add, step = _by_stack(method.checked_server, upload, personal)
    served = make_start(experiment, keys, rows=1, clients=1)
    fields = config, run, keys, served, start, order, form, upload, personal, notes, who
    return Host(*fields, experiment.task, add, step)


def _by_sums(
    adding: Adding, clients: int, upload: Upload, personal: PyTree
) -> tuple[_Add, _Finish]:
    """Returns `add` and `step`, see `Host`, which hold sums and one upload at a time."""

    @partial(jax.jit, donate_argnums=0)
    def put(total: PyTree, upload: Upload, part: PyTree) -> PyTree:
        running, parts = total
        running = adding.add(running, upload)
        part = weighted(part, running.weights[upload.client])
        return running, jax.tree.map(jnp.add, parts, part)

    @jax.jit
    def end(server: Kept, total: PyTree) -> tuple[Kept, jax.Array, jax.Array]:
        (running, parts), taken = total, jnp.where(total[0].counts, server.round + 1, server.taken)
        state, weights, finite = _weighed(server.state, lambda state: adding.end(state, running))
        mean = jax.tree.map(lambda x: x / running.sums.weight.astype(x.dtype), parts)
        served = _served(server, in_dtypes_of(mean, personal), weights.any())
        return Kept(state, served, taken), weights, finite

    @jax.jit
    def begin() -> PyTree:
        form = jax.eval_shape(partial(weighted, weight=jnp.zeros(())), personal)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)
        return adding.begin(clients, upload), zeros

    def add(total: PyTree, accepted: Accepted) -> PyTree:
        # The arrays are views of the message, which can be freed only after they were read.
        return jax.block_until_ready(put(total or begin(), accepted.upload, accepted.personal))

    return add, lambda server, total, rows: end(server, total or begin())


def _weighed(
    state: FederatedState, serve: Callable[[FederatedState], _Served]
) -> tuple[FederatedState, jax.Array, jax.Array]:
    """Returns what `serve` returns, and between them the weights of this round alone."""
    # If no client counts, a server keeps the weights that it is given.
    after, finite = serve(state._replace(weights=jnp.zeros_like(state.weights)))
    weights = after.weights
    next_weights = jnp.where(weights.sum() == 0, state.weights, weights)
    return after._replace(weights=next_weights), weights, finite


def _served(server: Kept, mean: PyTree, counts: jax.Array) -> PyTree:
    """Returns the mean that unseen clients receive, or the last one if no client counts."""
    if not jax.tree.leaves(server.served):
        return server.served
    return jax.tree.map(
        lambda average, served: jnp.where(counts, average, served), mean, server.served
    )


def _by_stack(
    serve: Callable[[FederatedState, Upload], _Served], form: Upload, personal: PyTree
) -> tuple[_Add, _Finish]:
    """Returns `add` and `step`, see `Host`, for the method's server step on all uploads at once."""

    @jax.jit
    def step(server: Kept, uploads: Upload, parts: PyTree) -> tuple[Kept, jax.Array, jax.Array]:
        client = uploads.client
        state, weights, finite = _weighed(server.state, lambda state: serve(state, uploads))
        # Clients of weight 0 are not in the mean, as in the simulation's `global_variables`.
        counts = uploads.participates & (weights[client] > 0)
        mean = server.served and weighted_mean(parts, jnp.where(counts, weights[client], 0))
        taken = jnp.where(uploads.participates, state.round, server.taken[client])
        taken = server.taken.at[client].set(taken)
        return Kept(state, _served(server, mean, counts.any()), taken), weights, finite

    stack = _side_by_side((form, personal))
    # The upload of a client that sits out: broadcast zeros, which take no memory and do not count.
    zeros = partial(jax.tree.map, lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape))
    absent, nothing = zeros(form)._replace(finite=np.ones((), bool)), zeros(personal)

    def add(total: dict[int, Accepted] | None, accepted: Accepted) -> dict[int, Accepted]:
        return (total or {}) | {int(accepted.upload.client): accepted}

    def take(
        server: Kept, total: dict[int, Accepted] | None, rows: np.ndarray
    ) -> tuple[Kept, jax.Array, jax.Array]:
        parts, population = [], np.int32(len(server.taken))
        for k in rows:
            blank = absent._replace(client=np.int32(k), population=population)
            taken = (total or {}).get(k)
            parts.append((taken.upload, taken.personal) if taken else (blank, nothing))
        # `stack` reuses its arrays in the next round, so this step must have read them before.
        return jax.block_until_ready(step(server, *stack(parts)))

    return add, take


def _side_by_side(like: PyTree) -> Callable[[Sequence[PyTree]], PyTree]:
    """Returns `stack(trees) -> tree [C, ...]`, which writes into the same aligned arrays each time.

    So a round allocates no memory for the uploads, and XLA on CPU does not copy them. The caller
    must have finished with the last result before the next call. `like` is the form of one tree.
    """
    form, leaves = jax.tree.structure(like), jax.tree.leaves(like)
    rows: list[np.ndarray] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        space = np.empty(size + _ALIGNED, np.uint8)
        begin = -space.ctypes.data % _ALIGNED
        return space[begin : begin + size].view(dtype).reshape(shape)

    def stack(trees: Sequence[PyTree]) -> PyTree:
        if not rows or len(rows[0]) != len(trees):
            rows[:] = [empty((len(trees), *leaf.shape), leaf.dtype) for leaf in leaves]
        for k, tree in enumerate(trees):
            for row, leaf in zip(rows, form.flatten_up_to(tree), strict=True):
                row[k] = leaf
        return form.unflatten(rows)

    return stack
