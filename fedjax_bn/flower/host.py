"""Builds the server's side without a network: its state and its step."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.aggregation import weighted_mean
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.engine.weighing import in_dtypes_of, weighted
from fedjax_bn.federation import FederatedState, Upload, broadcast_of, own_of, traffic
from fedjax_bn.flower.members import Accepted
from fedjax_bn.flower.messages import Order
from fedjax_bn.flower.site import deployed, sent_personal
from fedjax_bn.incremental_aggregation import Adding
from fedjax_bn.run.config.choices import participation_of
from fedjax_bn.run.experiment.build import Experiment, assemble, choose_participation, prepare
from fedjax_bn.run.experiment.method import local_epochs
from fedjax_bn.run.files.finished_run import dataset_of
from fedjax_bn.training.availability import read_trace
from fedjax_bn.training.start import batches_of_one, make_start, partition_table

PyTree = Any
_Add = Callable[[Any, Accepted], Any]
_Finish = Callable[["Kept", Any, np.ndarray], tuple["Kept", jax.Array, jax.Array]]
_ALIGNED = 64  # bytes; XLA on CPU uses arrays without a copy if their address is a multiple of it


class Kept(NamedTuple):
    """What the server keeps between rounds; the content of its checkpoints."""

    # the federation's state, [K] where it is by client; the clients' own parts are ()
    state: FederatedState
    # the mean of the personal leaves that an unseen client receives, from the last round in which a
    # client of positive weight took part; () if clients do not send them
    served: PyTree
    # i32[K], for each client the number of rounds finished when its last accepted upload was added;
    # 0 before
    taken: jax.Array

    round = property(lambda self: self.state.round)


class Host:
    """What a server builds before its first round, without a network.

    Attributes:
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

    def __init__(self, config: ConfigDict, order: Order, form: str) -> None:
        """Raises ConfigError if the configuration is wrong or does not suit the clients' number."""
        self.config, self.order, self.form = config, order, form
        epochs, count = local_epochs(config), order.population
        if len(epochs) not in (1, count) or config.clients_per_round > count:
            raise ConfigError(
                f"the run config has {count} clients, config.client_epochs {len(epochs)} numbers "
                f"and config.clients_per_round={config.clients_per_round}: give a number of epochs "
                "for each client, and at most as many clients a round"
            )
        participation = choose_participation(config, count)
        trace = read_trace(participation_of(config).trace, count)
        self.participation = participation._replace(trace=trace)
        form_of_one = json.loads(form) | {"dataset": "federation", "clients": ["federation"]}
        internal = dataset_of(form_of_one)

        def make(config: ConfigDict) -> Experiment:
            # `prepare` traces the server's step with as many uploads as a round has.
            drawn = self.participation._replace(on_host=False)
            return assemble(config, internal, ())._replace(participation=drawn)

        alone = deployed(config)
        alone.target = ""  # the server has no domains that it could leave out
        experiment, self.keys, make_alone = prepare(alone, make, clients=count)
        self.alone = make_start(experiment, self.keys, rows=1, clients=1)
        rows = make_start(experiment, self.keys, rows=count, clients=count)

        def start() -> Kept:
            state = make_alone()
            # Compiled, because XLA then drops the unused rows of the clients' own parts, [K, ...].
            weights, weighing = jax.jit(lambda: (rows().weights, rows().weighing))()
            personal_row = jax.tree.map(lambda leaf: leaf[0], state.personal)
            served = sent_personal(personal_row) if order.serve_unseen else ()
            state = state._replace(weights=weights, weighing=weighing, personal=(), memory=())
            return Kept(state, served, jnp.zeros(count, jnp.int32))

        self.start, self.task, method = start, experiment.task, experiment.method
        like = jax.eval_shape(make_alone)
        own = jax.eval_shape(lambda state: own_of(state, 0), like)
        batches = batches_of_one(experiment)
        batches["population"] = jax.ShapeDtypeStruct((), jnp.int32)
        key = jax.eval_shape(jax.random.key, 0)
        self.personal = sent_personal(own.personal) if order.serve_unseen else ()
        _, self.upload = jax.eval_shape(method.client, broadcast_of(like), own, batches, key)
        bytes_sent = traffic(method, like, batches)
        self.notes = (
            *experiment.notes,
            partition_table(experiment, jax.eval_shape(rows)),
            "a client and round: {down:,} bytes down, {up:,} bytes up".format(**bytes_sent),
        )
        if method.adding:
            self.add, self.step = by_sums(method.adding, count, self.upload, self.personal)
        else:
            self.add, self.step = by_stack(method.checked_server, self.upload, self.personal)


def by_sums(adding: Adding, clients: int, upload: Upload, personal: PyTree) -> tuple[_Add, _Finish]:
    """Returns `add` and `step`, see `Host`, which hold sums and one upload at a time."""

    @partial(jax.jit, donate_argnums=0)
    def put(total: PyTree, upload: Upload, part: PyTree) -> PyTree:
        running, parts = total
        running = adding.add(running, upload)
        part = weighted(part, running.weights[upload.client])
        return running, jax.tree.map(jnp.add, parts, part)

    @jax.jit
    def end(server: Kept, total: PyTree) -> tuple[Kept, jax.Array, jax.Array]:
        running, parts = total
        taken = jnp.where(running.counts, server.round + 1, server.taken)
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


def by_stack(serve: Callable, form: Upload, personal: PyTree) -> tuple[_Add, _Finish]:
    """Returns `add` and `step`, see `Host`, for the method's server step on all uploads at once."""

    @jax.jit
    def end(server: Kept, uploads: Upload, parts: PyTree) -> tuple[Kept, jax.Array, jax.Array]:
        client = uploads.client
        state, weights, finite = _weighed(server.state, lambda state: serve(state, uploads))
        # Clients of weight 0 are not in the mean, as in the simulation's `global_variables`.
        counts = uploads.participates & (weights[client] > 0)
        mean = server.served and weighted_mean(parts, jnp.where(counts, weights[client], 0))
        taken = jnp.where(uploads.participates, state.round, server.taken[client])
        taken = server.taken.at[client].set(taken)
        return Kept(state, _served(server, mean, counts.any()), taken), weights, finite

    # The upload of a client that sits out: broadcast zeros, which take no memory and do not count.
    zeros = partial(jax.tree.map, lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape))
    absent, nothing = zeros(form)._replace(finite=np.ones((), bool)), zeros(personal)

    def step(
        server: Kept, total: dict[int, Accepted] | None, rows: np.ndarray
    ) -> tuple[Kept, jax.Array, jax.Array]:
        parts, population = [], np.int32(len(server.taken))
        for k in rows:
            blank = absent._replace(client=np.int32(k), population=population)
            accepted = (total or {}).get(k, Accepted(blank, nothing, 0.0))
            parts.append((accepted.upload, accepted.personal))
        return end(server, *jax.tree.map(_stacked, *parts))

    return lambda total, accepted: (total or {}) | {int(accepted.upload.client): accepted}, step


def _weighed(
    state: FederatedState, serve: Callable[[FederatedState], tuple[FederatedState, jax.Array]]
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
    return jax.tree.map(lambda new, served: jnp.where(counts, new, served), mean, server.served)


def _stacked(*leaves: np.ndarray) -> np.ndarray:
    """Returns the leaves [...] as an array [C, ...], which XLA on CPU uses without a copy."""
    shape, dtype = (len(leaves), *leaves[0].shape), leaves[0].dtype
    size = len(leaves) * leaves[0].size * dtype.itemsize
    space = np.empty(size + _ALIGNED, np.uint8)
    begin = -space.ctypes.data % _ALIGNED
    return np.stack(leaves, out=space[begin : begin + size].view(dtype).reshape(shape))
