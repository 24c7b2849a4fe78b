"""Compiles the rounds of a run, with data on the devices or streamed from the host.

On a mesh, batches are padded with rows up to a multiple of the mesh's clients axis. Padding rows
have the number K, which no client has. Each device gets and holds only its own clients' rows.

If the clients' own parts are in the host's memory (`population`), the device holds what the clients
share and the rows of one cohort; padding rows repeat those of the population's last client. The
batches of the next cohort are read while this one trains. Its rows are taken afterwards, because a
client may be in both cohorts. Each process has the rows of all clients.
"""

import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Split
from fedjax_bn.data.sampling import Draw, client_rows, point_to, rows_of, validation_batches
from fedjax_bn.engine.backend import compile_quickly
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.devices import padded
from fedjax_bn.federation import FederatedMethod, FederatedState, put_rows, take_rows
from fedjax_bn.state import unseen_personal
from fedjax_bn.training.availability import Participation, draw_cohort
from fedjax_bn.training.experiment import Experiment, LocalWork
from fedjax_bn.training.loop import Round
from fedjax_bn.training.mesh import (
    clients_of,
    copies_on,
    gathered,
    own_rows,
    place_copies,
    place_own,
    place_rows,
    shardings_of,
)
from fedjax_bn.training.population import PARTS, AnyState, PopulationState
from fedjax_bn.training.programs import form_of, made_once
from fedjax_bn.training.records import Record, require_usable, round_record
from fedjax_bn.training.stream import forms_of, megabytes, stream_rounds

# The metrics of clients that were not drawn for a round.
_ABSENT = {"loss": np.nan, "risk": 0.0, "weights": 0.0, "finite": True, "norm": np.nan}
_PADDED, _WHOLE = ("personal", "memory"), ("weighing",)  # with padding rows, and without


class Rounds(NamedTuple):
    """How the rounds of a run get their data.

    Attributes:
      note: a message on where the data are, and why.
      batches: the form of one client's batches, `jax.ShapeDtypeStruct`s [S, B, ...].
      compile: `compile(state) -> round`, where `round(state) -> (state, metrics)` is the next round
        and donates the state.
    """

    note: str
    batches: Batches
    compile: Callable[[Any], Callable[[Any], tuple]]


def recorded(round: Callable[[Any], tuple], experiment: Experiment) -> Round:
    """Returns `round(state) -> (state, record)`, the round that `training.loop.train` runs.

    Args:
      round: `round(state) -> (state, metrics)`, as `Rounds.compile` returns it.
      experiment: the run's.

    Raises:
      NotFiniteError, RiskError: by the round, see `records.require_usable`.
    """
    plan, names = experiment.plan, [domain.name for domain in experiment.internal.domains]

    def make(state: Any) -> tuple[Any, Record]:
        number, start = int(state.round) + 1, time.perf_counter()
        state, metrics = jax.block_until_ready(round(state))
        metrics = jax.device_get(metrics)
        seconds = time.perf_counter() - start
        record = round_record(names, metrics, number, seconds, plan.clients_named)
        require_usable(record, metrics, names, plan.on_nonfinite)
        return state, record

    return make


class _Drawn(NamedTuple):
    """The clients drawn for a round, and their samples.

    Attributes:
      client: i32[C], numbers of the clients in order; None for all K.
      rows: i32[P], the client number of each row of batches; K for padding rows.
      samples: of each row; padding rows have no valid ones.
      present: {"participates": bool[P]}, which of the rows take part; {} if all do.
    """

    client: jax.Array | None
    rows: jax.Array
    samples: Draw
    present: dict[str, jax.Array]


class _Drawing(NamedTuple):
    """Draws the clients and the samples of a round; equal for all runs of the same sizes.

    Attributes:
      participation: who takes part, without the trace.
      work: what a client does in a round.
      smallest, longest: numbers of samples of the smallest and the largest client.
      mesh: the devices; None for one.
    """

    participation: Participation
    work: LocalWork
    smallest: int
    longest: int
    mesh: Mesh | None

    def __call__(self, facts: "_Facts", keys: Any, number: jax.Array) -> _Drawn:
        """Returns what is drawn for a round, a pure function of its number from 0."""
        total = len(facts.sizes)
        sample = self.work.sampler(self.smallest, self.longest)
        participation = self.participation._replace(trace=facts.trace)
        cohort = draw_cohort(participation, facts.sizes, keys.participation, number)
        client = cohort.client
        rows = jnp.arange(total, dtype=jnp.int32) if client is None else client
        missing = padded(len(rows), self.mesh) - len(rows)
        rows = jnp.pad(rows, (0, missing), constant_values=total)
        key = jax.random.fold_in(keys.data, number)
        samples = sample(facts.sizes[rows], rows, self.longest, key)
        # Padding rows have no client, so none of their samples is valid.
        samples = samples._replace(valid=samples.valid & (rows < total)[:, None, None])
        present = jax.tree.map(lambda leaf: jnp.pad(leaf, (0, missing)), cohort.entries())
        return _Drawn(client, rows, samples, present)


class _Facts(NamedTuple):
    """What a drawing needs to know of the clients, as arguments of its program.

    Attributes:
      sizes: i32[K], their training samples.
      trace: as `availability.read_trace` returns it; None for none.
    """

    sizes: jax.Array
    trace: jax.Array | None


def drawing_of(experiment: Experiment) -> tuple[_Drawing, _Facts]:
    """Returns how the clients and samples of a run's rounds are drawn, and of what."""
    sizes = [len(domain.train.images) for domain in experiment.internal.domains]
    participation = experiment.participation
    trace = None if participation.trace is None else jnp.asarray(participation.trace)
    participation = participation._replace(trace=None)
    drawing = _Drawing(participation, experiment.work, min(sizes), max(sizes), experiment.mesh)
    return drawing, _Facts(jnp.asarray(sizes, jnp.int32), trace)


def open_rounds(experiment: Experiment, keys: Any, state: AnyState) -> Rounds:
    """Puts the training data on the device if they fit, and otherwise opens a stream.

    Both ways train on the same samples in the same order. A population's data are always streamed.

    Args:
      experiment: the run's.
      keys: the run's random keys, of which `data`, `method` and `participation` are used.
      state: before the next round.

    Raises:
      ConfigError: validation samples that training needs do not fit on the device.
    """
    if isinstance(state, PopulationState):
        return _open_cohorts(experiment, keys, state)
    splits, mesh = [domain.train for domain in experiment.internal.domains], experiment.mesh
    over, limit = clients_of(mesh), experiment.plan.device_megabytes
    needed, size = _padded_megabytes(splits, mesh), f"{megabytes(splits):.0f} MB"
    (drawing, facts), validation_rows = drawing_of(experiment), {}
    if validating_key := experiment.validates:
        validation = [domain.validation for domain in experiment.internal.domains]
        if (validation_megabytes := _padded_megabytes(validation, mesh)) > limit:
            raise ConfigError(
                f"{validating_key} keeps the clients' {validation_megabytes:.0f} MB of "
                "validation samples on the device, more than "
                f"config.data.device_megabytes={limit}: raise it, lower "
                "config.data.validation, or leave that key out"
            )
        read = partial(validation_batches, validation, experiment.evaluation.batch_size)
        validation_rows = {"validation": place_rows(read, padded(len(splits), mesh), over)}
    common = place_copies((facts, keys), mesh)
    program = partial(_compile_round, experiment.method, drawing, mesh)
    if needed <= limit:
        read = partial(client_rows, splits, max(len(split.images) for split in splits))
        data = place_rows(read, padded(len(splits), mesh), over)

        def compile(state: FederatedState) -> Callable[[FederatedState], tuple]:
            run = program(True, state, data, validation_rows, common)
            return lambda state: run(state, data, validation_rows, common)

        note = f"{size} of training samples stay on the device (data.device_megabytes={limit})"
        like = jax.eval_shape(
            lambda data: _gathered(drawing(facts, keys, state.round), data, mesh), data
        )
        return Rounds(note, jax.tree.map(_one_row, like | validation_rows), compile)

    # `[1:3]` are `rows` and `samples`.
    draw = made_once(("draw", drawing), lambda: jax.jit(drawing.__call__))

    def drawn_rows(number: int) -> tuple[jax.Array, Draw]:
        return draw(facts, keys, number)[1:3]

    shape = jax.eval_shape(drawn_rows, state.round)[1].index.shape
    rows = own_rows(shape[0], over)
    stream = stream_rounds(splits, drawn_rows, int(state.round), experiment.plan.rounds, rows)
    batches = map(partial(place_own, rows, shape[0], over), stream)

    def compile_streamed(state: FederatedState) -> Callable[[FederatedState], tuple]:
        first_batches = next(batches, None)
        if first_batches is None:  # the last round is done
            return lambda state: (state, {})
        run = program(False, state, first_batches, validation_rows, common)
        waiting = [first_batches]
        return lambda state: run(
            state, waiting.pop() if waiting else next(batches), validation_rows, common
        )

    note = (
        f"{size} of training samples are streamed, because {needed:.0f} MB exceed "
        f"data.device_megabytes={limit}; a round's batches take "
        f"{splits[0].images[:1].nbytes * np.prod(shape) / 2**20:.0f} MB of the device"
    )
    like = forms_of(splits[0], shape[1:]) | jax.tree.map(_one_row, validation_rows)
    return Rounds(note, like, compile_streamed)


def _one_row(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the form of an array without its leading axis."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def _rows_on(data: Any, client: jax.Array, mesh: Mesh | None) -> Any:
    """Returns arrays [P, ...] of a round's clients, each row on the device that trains it."""
    rows = rows_of(data, client)
    return rows if mesh is None else jax.lax.with_sharding_constraint(rows, clients_of(mesh))


def _padded_megabytes(splits: list[Split], mesh: Mesh | None) -> float:
    """Returns the megabytes of one device's samples, each client padded to the largest."""
    longest = max(len(split.images) for split in splits)
    clients_per_device = padded(len(splits), mesh) // padded(1, mesh)
    return splits[0].images[:1].nbytes * longest * clients_per_device / 2**20


def _gathered(drawn: _Drawn, data: Any, mesh: Mesh | None) -> Batches:
    """Returns the batches of a round from data of all clients on the device."""
    return point_to(
        data if drawn.client is None else _rows_on(data, drawn.rows, mesh), drawn.samples
    )


def _compile_round(
    method: FederatedMethod, drawing: _Drawing, mesh: Mesh | None, resident: bool, *arguments: Any
) -> Callable[..., tuple]:
    """Compiles drawing, look-up, augmentation and a round as one program.

    Args:
      method, drawing, mesh: of the run.
      resident: whether `data` has all samples of all clients, or the batches of the next round.
      *arguments: of the program: state, data, what each client keeps for its training, and facts
        and keys. These are arguments, so that runs with other seeds use the same program.
    """

    def round(state: FederatedState, data: Any, validation_rows: Batches, common: tuple) -> tuple:
        facts, keys = common
        drawn = drawing(facts, keys, state.round)
        batches = (_gathered(drawn, data, mesh) if resident else data) | drawn.present
        if drawn.client is None:
            return method.round(state, batches | validation_rows, keys.method)
        num_clients = len(facts.sizes)
        batches |= _rows_on(validation_rows, drawn.rows, mesh)
        batches |= {"client": drawn.rows, "population": jnp.asarray(num_clients, jnp.int32)}
        after, metrics = method.round(take_rows(state, drawn.client), batches, keys.method)
        of_all = {"server_finite": metrics["server_finite"]}
        for name, value in _absent(metrics):
            everybody = jnp.full(num_clients, value, metrics[name].dtype)
            of_all[name] = everybody.at[drawn.client].set(metrics[name])
        return put_rows(state, after, drawn.client), of_all

    def compile() -> Callable[..., tuple]:
        spread = None if mesh is None else (shardings_of(arguments[0], mesh), copies_on(mesh))
        program = jax.jit(round, donate_argnums=0, out_shardings=spread)
        return compile_quickly(program.lower(*arguments))

    return made_once(("round", method.round, drawing, resident, form_of(arguments)), compile)


def _open_cohorts(experiment: Experiment, keys: Any, state: PopulationState) -> Rounds:
    """Returns the rounds of a population whose clients' own parts are on the host."""
    domains, mesh, over = experiment.internal.domains, experiment.mesh, clients_of(experiment.mesh)
    splits, num_clients, lock = [d.train for d in domains], len(domains), threading.Lock()
    drawing, facts = drawing_of(experiment)
    draw = partial(made_once(("draw", drawing), lambda: jax.jit(drawing.__call__)), facts, keys)
    cached_draw = lru_cache(4)(lambda number: jax.device_get(draw(number)))

    def drawn(number: int) -> _Drawn:
        with lock:  # many threads ask, and each round is drawn once
            return cached_draw(number)

    def validation(client: np.ndarray) -> Batches:
        """Returns {"validation": samples of some clients} if training needs them, else {}."""
        if not experiment.validates:
            return {}
        longest = max(len(domain.validation.images) for domain in domains)
        chosen, size = [domains[k].validation for k in client], experiment.evaluation.batch_size
        return {"validation": validation_batches(chosen, size, longest=longest)}

    shape = jax.eval_shape(draw, state.round).samples.index.shape
    local, rounds_done = own_rows(shape[0], over), int(state.round)
    streamed = stream_rounds(
        splits, lambda n: drawn(n)[1:3], rounds_done, experiment.plan.rounds, local
    )

    def compile(state: PopulationState) -> Callable[[PopulationState], tuple]:
        """Returns the next round as `round(state) -> (state, metrics [N])`."""
        waiting = next(streamed, None)
        if waiting is None:  # the last round is done
            return lambda state: (state, {})
        key = place_copies(keys.method, mesh)

        def inputs(state: PopulationState, batches: Batches) -> tuple[np.ndarray, tuple]:
            """Returns the next cohort's numbers, and the arguments of the compiled round."""
            client, numbers, _, present = drawn(int(state.round))
            clients = np.minimum(numbers[local], num_clients - 1)  # padding rows have the number N
            batches = batches | {name: leaf[local] for name, leaf in present.items()}
            batches |= {"client": numbers[local]} | validation(clients)
            parts = state.rows_of(clients, _PADDED), batches
            rows, batches = place_own(local, len(numbers), over, parts)
            rows |= place_copies(state.rows_of(client, _WHOLE), mesh)
            return client, (state.state, rows, batches, key)

        arguments = inputs(state, waiting)[1]

        def compiled(*arguments: Any) -> Callable[..., tuple]:
            copies = copies_on(mesh)
            by_row = dict.fromkeys(_PADDED, over) | dict.fromkeys(_WHOLE, copies)
            program = jax.jit(
                partial(cohort_round, experiment.method, num_clients, len(state.cohort)),
                donate_argnums=(0, 1),
                out_shardings=None if mesh is None else (copies, by_row, copies),
            )
            return compile_quickly(program.lower(*arguments))

        sizes = num_clients, len(state.cohort)
        program = made_once(
            ("cohort", experiment.method.round, mesh, sizes, form_of(arguments)),
            partial(compiled, *arguments),
        )

        def round(state: PopulationState) -> tuple[PopulationState, dict[str, np.ndarray]]:
            nonlocal waiting
            batches, waiting = waiting if waiting is not None else next(streamed), None
            client, arguments = inputs(state, batches)
            common, rows, metrics = program(*arguments)
            several = jax.process_count() > 1  # each has rows that the others do not see
            rows, metrics = jax.device_get(gathered((rows, metrics), mesh if several else None))
            # Clients that sat out, or whose update is not finite, keep their rows.
            trained = np.flatnonzero(np.isfinite(metrics["loss"]) & metrics["finite"])
            state.put_rows(client[trained], jax.tree.map(lambda leaf: leaf[trained], rows))
            of_all = {"server_finite": metrics["server_finite"]}
            for name, value in _absent(metrics):
                of_all[name] = np.full(num_clients, value, metrics[name].dtype)
                of_all[name][client] = metrics[name]
            return PopulationState(common, state.rows, client, state.trained), of_all

        return round

    like = forms_of(splits[0], shape[1:]) | jax.tree.map(_one_row, validation(np.arange(1)))
    note = f"{megabytes(splits):.0f} MB of training samples are streamed, as those of a population"
    return Rounds(note, like, compile)


def cohort_round(
    method: FederatedMethod,
    num_clients: int,
    drawn: int,
    state: FederatedState,
    rows: dict[str, Any],
    batches: Batches,
    key: jax.Array,
) -> tuple[FederatedState, dict[str, Any], dict[str, jax.Array]]:
    """Returns the next state, new rows and metrics of a cohort of `drawn` clients, out of N.

    The state has the form of `PopulationState.state`; `rows` are part -> tree [P, ...], with
    padding rows.
    """
    before = state.personal
    cohort = state._replace(weights=jnp.zeros_like(state.weights, shape=drawn), **rows)
    population = jnp.asarray(num_clients, jnp.int32)
    after, metrics = method.round(cohort, batches | {"population": population}, key)
    weights = metrics["weights"]
    # If no client counts, an unseen client receives what it received before.
    counted = weights.sum() > 0
    mean = unseen_personal(jax.tree.map(lambda leaf: leaf[:drawn], after.personal), weights)
    mean = jax.tree.map(
        lambda mean_leaf, before_leaf: jnp.where(counted, mean_leaf, before_leaf[0])[None],
        mean,
        before,
    )
    rows = {part: getattr(after, part) for part in PARTS}
    next_state = after._replace(weights=state.weights, personal=mean, memory=(), weighing=())
    return (
        next_state,
        rows,
        {n: x for n, x in metrics.items() if n in _ABSENT or n == "server_finite"},
    )


def _absent(metrics: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the names of the metrics of single clients, with the values of absent clients."""
    return [(name, value) for name, value in _ABSENT.items() if name in metrics]
