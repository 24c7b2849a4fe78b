"""Builds the server's side without a network: its state, its step, and what it serves."""

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.engine.weighing import in_dtypes_of, weighted, weighted_mean
from fedjax_bn.federation import FederatedMethod, traffic
from fedjax_bn.flower.handshake import digest_of, facts_of
from fedjax_bn.flower.messages import BATCH, Order
from fedjax_bn.flower.settings import deployed
from fedjax_bn.flower.site import sent_personal
from fedjax_bn.incremental_aggregation import Adding
from fedjax_bn.run.config import flatten
from fedjax_bn.run.config.choices import participation_of
from fedjax_bn.run.experiment.build import assemble, choose_participation, describe_privacy, prepare
from fedjax_bn.run.experiment.method import local_epochs
from fedjax_bn.run.files.finished_run import dataset_of
from fedjax_bn.sharing import OWN
from fedjax_bn.state import FederatedState, Upload, broadcast_of, own_of
from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.availability import read_trace
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.records import select_round
from fedjax_bn.training.start import batches_of_one, make_start, partition_table
from fedjax_bn.training.workdir import Record

PyTree = Any
_Add = Callable[[Any, Upload, PyTree], Any]
_Finish = Callable[["Kept", Any, np.ndarray], tuple["Kept", jax.Array, jax.Array]]
_Pair = tuple[_Add, _Finish]
_ALIGNED = 64  # bytes; XLA on CPU uses arrays without a copy if their address is a multiple of it


class Kept(NamedTuple):
    """What the server keeps between rounds; the content of its checkpoints."""

    # the federation's state, [K] where it is by client; the clients' own parts are ()
    state: FederatedState
    # the mean of the personal leaves for unseen clients, from the last round in which a client of
    # positive weight took part; () if clients do not send them
    served: PyTree
    # i32[K], rounds finished when a client's last accepted upload was added; 0 before
    taken: jax.Array

    round = property(lambda self: self.state.round)


class Host:
    """What a server builds before its first round, without a network.

    Attributes:
      alone: makes the start of a federation of one client, the form of what is served.
      start: makes the `Kept` before the first round.
      order: the header of the server's questions, with begin=0 and its facts (`handshake`).
      form: the form of all clients' samples, as JSON.
      upload, personal: the forms of one client's upload, and of the personal leaves that it sends
        too (`sent_personal`); () for none.
      notes: messages for the log: which leaves are shared, how many bytes travel.
      add: `add(total, upload, personal) -> total` adds an upload to the total of a round, which is
        None before the first: sums or, if weights need all uploads, client -> (upload, personal).
      step: `step(kept, total, rows) -> (kept, weights f[K], finite bool[])`, the end of a round;
        `rows` i32[C] are all drawn clients. The weights are those of the round: all 0 if no client
        counts. A server's step that is not finite is dropped.
    """

    def __init__(self, config: ConfigDict, order: Order, form: str) -> None:
        """Raises ConfigError if the configuration is wrong or does not suit the clients' number."""
        self.config, self.form = config, form
        epochs, count = local_epochs(config), order.population
        if len(epochs) not in (1, count) or config.clients_per_round > count:
            numbers = f"config.client_epochs ({len(epochs)} of them)"
            if len(epochs) in (1, count):
                numbers = f"config.clients_per_round={config.clients_per_round}"
            raise ConfigError(f"{numbers} does not suit clients={count} of the run config")
        participation = choose_participation(config, count)
        trace = read_trace(participation_of(config).trace, count)
        self.participation = participation._replace(trace=trace)
        names = {"dataset": "federation", "clients": ["federation"]}
        internal = dataset_of(json.loads(form) | names)

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
        facts = facts_of(config, json.loads(form), like)
        self.order = order._replace(digest=digest_of(facts), facts=facts)
        own = jax.eval_shape(lambda state: own_of(state, 0), like)
        batches = batches_of_one(experiment)
        batches["population"] = jax.ShapeDtypeStruct((), jnp.int32)
        key = jax.eval_shape(jax.random.key, 0)
        self.personal = sent_personal(own.personal) if order.serve_unseen else ()
        _, self.upload = jax.eval_shape(method.client, broadcast_of(like), own, batches, key)
        text = "a client and round: {down:,} bytes down, {up:,} bytes up"
        bytes_sent = text.format(**traffic(method, like, batches))
        table = partition_table(experiment, jax.eval_shape(rows))
        self.notes = (*experiment.notes, table, bytes_sent)
        self.add, self.step = add_and_step(method, count, self.upload, self.personal)

    def summary(self, records: list[Record]) -> Record:
        """Returns the content of summary.json: scores of the selected round, or the last one."""
        evaluated = any("accuracy" in record for record in records)
        number = select_round(records) if evaluated else len(records)
        selected, last = (
            {"internal": record.get("accuracy", {"mean": None}), "unseen": {}}
            for record in (records[number - 1], records[-1])
        )
        return {
            "method": self.config.method,
            "dataset": self.order.federation,
            "seed": self.config.seed,
            "rounds": len(records),
            "selected_round": number,
            "tested_on": records[number - 1].get("tested_on", {}),
            "accuracy": selected,
            "last_round": last,
            **{key: scores for key, scores in records[number - 1].items() if key == BATCH},
            "seconds_per_round": median(record["seconds"] for record in records),
            # The server does not know the clients' compile times and numbers of samples.
            "compile_seconds": None,
            "samples_per_second": None,
            **({} if self.task.classifies else {"score": self.task.score.name}),
            **describe_privacy(deployed(self.config), self.order.population, len(records)),
        }

    def write_served(self, place: Path, app: str | Path, server: Kept, summary: Record) -> str:
        """Writes WORKDIR/served from the round that `summary` names; returns a note for the log.

        `app` is the app's folder, which may hold a user's own modules.
        """
        personal = sent_personal(jax.eval_shape(self.alone).personal)
        if jax.tree.leaves(personal) and not jax.tree.leaves(server.served):
            reason = "personal leaves stayed with the clients"
            remedy = "serve-unseen=true in the run config and each node config sends them"
            return f"an unseen client cannot be served, because {reason}: {remedy}"
        number = summary["selected_round"]
        with checkpoint.open_folder(place / "checkpoints" / "selected", keep=1) as manager:
            if number in checkpoint.steps(manager):
                server = checkpoint.restore(manager, jax.eval_shape(self.start), number)
        state = self.alone()
        mean = dict(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], server.served))
        # Zeros, so that the shared model predicts and not the own model of the start.
        own_model = {name: tree for name, tree in state.personal.items() if name == OWN}
        personal = {**state.personal, **jax.tree.map(jnp.zeros_like, own_model), **mean}
        # The server's part stays that of the start: only the next round would read it.
        sent = {name: getattr(server.state, name) for name in ("round", "shared", "frozen")}
        state = state._replace(personal=personal, **sent)
        config, name = deployed(self.config), self.order.federation
        config.target = ""
        about = {
            "config": dict(flatten(config)),
            "data": name,
            "form": {"dataset": name, "clients": ["federation"]} | json.loads(self.form),
            "started_in": str(Path(app).resolve()),
        }
        folder = place / "served"
        workdir.write_json(folder / "config.json", about)
        with checkpoint.open_folder(folder / "checkpoints" / "latest", keep=1) as manager:
            checkpoint.save(manager, number, state)
            checkpoint.settle(manager)
        # Last, because a folder with summary.json counts as finished.
        workdir.write_json(folder / "summary.json", summary)
        command = shlex.join(("fedjax-bn", "serve", "--workdir", str(folder), "--export", "FOLDER"))
        return f"round {number} can be served: {command}"


def add_and_step(method: FederatedMethod, clients: int, upload: Upload, personal: PyTree) -> _Pair:
    """Returns `add` and `step`, see `Host`, for the forms of an upload and of personal leaves."""
    if method.adding is not None:
        return _by_sums(method.adding, clients, upload, personal)
    return _by_stack(method.checked_server, upload, personal)


def _by_sums(adding: Adding, clients: int, upload: Upload, personal: PyTree) -> _Pair:
    """Returns `add` and `step`, which hold sums and one upload at a time."""

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

    def add(total: PyTree, upload: Upload, part: PyTree) -> PyTree:
        # The arrays are views of the message, which can be freed only after they were read.
        return jax.block_until_ready(put(total or begin(), upload, part))

    return add, lambda server, total, rows: end(server, total or begin())


def _by_stack(serve: Callable, form: Upload, personal: PyTree) -> _Pair:
    """Returns `add` and `step` for the method's server step on all uploads at once."""

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

    def add(total: PyTree, upload: Upload, part: PyTree) -> PyTree:
        return (total or {}) | {int(upload.client): (upload, part)}

    def step(server: Kept, total: PyTree, rows: np.ndarray) -> tuple[Kept, jax.Array, jax.Array]:
        blank = absent._replace(population=np.int32(len(server.taken)))
        blanks = {k: (blank._replace(client=np.int32(k)), nothing) for k in rows.tolist()}
        return end(server, *jax.tree.map(_stacked, *(blanks | (total or {})).values()))

    return add, step


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
