"""Compiles the rounds of a run, with data on the devices or streamed from the host.

The batches of a round are a pure function of its number, so a stopped run continues exactly. On a
mesh they are padded with rows of the number K, which no client has.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.arguments.errors import NotFiniteError, RiskError
from fedjax_bn.data.domain import Split
from fedjax_bn.data.labels import stored
from fedjax_bn.data.sampling import Draw, client_rows, point_to, rows_of, validation_batches
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.devices import over_devices, padded
from fedjax_bn.engine.programs import compile_round
from fedjax_bn.engine.risk_extrapolation import check_risks
from fedjax_bn.federation import FederatedMethod, FederatedState, put_rows, take_rows
from fedjax_bn.state import unseen_personal
from fedjax_bn.training.availability import draw_cohort
from fedjax_bn.training.experiment import Experiment, LocalWork, Participation
from fedjax_bn.training.loop import Round
from fedjax_bn.training.mesh import (
    clients_of,
    copies_on,
    gathered,
    memories,
    own_rows,
    place_copies,
    place_own,
    place_rows,
    shardings_of,
)
from fedjax_bn.training.population import PARTS, AnyState, PopulationState
from fedjax_bn.training.programs import made_once
from fedjax_bn.training.records import Record, round_record

# The metrics of clients that were not drawn for a round.
_ABSENT = {"loss": np.nan, "risk": 0.0, "weights": 0.0, "finite": True, "norm": np.nan}
_PADDED, _WHOLE = ("personal", "memory"), ("weighing",)  # with padding rows, and without
_THREADS = 8


class Rounds(NamedTuple):
    """How the rounds of a run get their data."""

    note: str  # a message on where the data are, and why
    # `compile(state) -> round`, where `round(state) -> (state, metrics)` is the next round and
    # donates the state
    compile: Callable[[Any], Callable[[Any], tuple]]


def recorded_round(round: Callable[[Any], tuple], experiment: Experiment) -> Round:
    """Returns `round(state) -> (state, record)` of a `Rounds.compile`d round."""
    plan, names = experiment.plan, [domain.name for domain in experiment.internal.domains]

    def make(state: Any) -> tuple[Any, Record]:
        number, start = int(state.round) + 1, time.perf_counter()
        state, metrics = jax.block_until_ready(round(state))
        metrics, seconds = jax.device_get(metrics), time.perf_counter() - start
        record = round_record(names, metrics, number, seconds, plan.clients_named)
        _require_finite(record, metrics, names, plan.on_nonfinite == "stop")
        return state, record

    return make


def _require_finite(
    record: Record, metrics: dict[str, np.ndarray], names: list[str], stop: bool
) -> None:
    """Raises NotFiniteError or RiskError if a run must not continue after a round."""
    round, failed = f"round {record['round']}", record.get("not_finite")
    counts = np.isfinite(metrics["loss"]) & metrics["finite"]
    if (failed or "server_finite" in record) if stop else (failed and not counts.any()):
        culprit = f"the update of {', '.join(failed)}" if failed else "the server's step (eta)"
        raise NotFiniteError(
            f"{round}: {culprit} is not finite: lower optimizer.learning_rate, look at the data, "
            "or set on_nonfinite=drop to leave out some, not all"
        )
    if not np.isfinite(metrics["weights"]).all():
        fault = "the weighing rule gave weights that are not finite"
        try:
            check_risks(counts, metrics["risk"], names)
        except ValueError as error:
            fault = str(error)
        raise RiskError(f"{round}: {fault}")


def open_rounds(experiment: Experiment, keys: Any, state: AnyState) -> Rounds:
    """Puts the training data on the device if they fit, else opens a stream of the same samples."""
    splits, mesh = [domain.train for domain in experiment.internal.domains], experiment.mesh
    size = f"{megabytes(splits):.0f} MB of training samples"
    if isinstance(state, PopulationState):
        compile = _open_cohorts(experiment, keys, state)
        return Rounds(f"{size} are streamed, as those of a population", compile)
    rows, over = padded(len(splits), mesh), clients_of(mesh)
    drawing, facts = _drawing_of(experiment)
    validation_rows = {}
    if experiment.validates:
        validation = [domain.validation for domain in experiment.internal.domains]
        read = partial(validation_batches, validation, experiment.evaluation.batch_size)
        validation_rows = {"validation": place_rows(read, rows, over)}
    common = place_copies((facts, keys), mesh)
    longest, limit = max(experiment.train_sizes()), experiment.plan.device_megabytes
    # In one memory, with each client padded to the largest.
    needed = splits[0].images[:1].nbytes * longest * (rows // memories(over)) / 2**20
    resident = needed <= limit
    if resident:
        batches = repeat(place_rows(partial(client_rows, splits, longest), rows, over))
        note = f"{size} stay on the device (data.device_megabytes={limit})"
    else:
        drawn, local, stream = _open_stream(experiment, keys, state)
        count = len(drawn(int(state.round))[1])
        batches = map(partial(place_own, local, count, over), stream)
        note = f"{size} are streamed: {needed:.0f} MB exceed data.device_megabytes={limit}"

    def compile(state: FederatedState) -> Callable[[FederatedState], tuple]:
        waiting = [next(batches)]
        arguments = state, waiting[0], validation_rows, common
        run = _compile_round(experiment.method, drawing, mesh, resident, *arguments)
        # Popped, so that the first batches do not stay on the device.
        return lambda state: run(
            state, waiting.pop() if waiting else next(batches), validation_rows, common
        )

    return Rounds(note, compile)


def _drawing_of(experiment: Experiment) -> tuple[tuple, tuple]:
    """Returns the first two arguments of `_draw`, of which runs of the same sizes have one."""
    sizes, who = experiment.train_sizes(), experiment.participation
    trace = None if who.trace is None else jnp.asarray(who.trace)
    drawing = who._replace(trace=None), experiment.work, min(sizes), max(sizes), experiment.mesh
    return drawing, (jnp.asarray(sizes, jnp.int32), trace)


def _draw(
    drawing: tuple[Participation, LocalWork, int, int, Mesh | None],
    facts: tuple,
    keys: Any,
    number: jax.Array,
) -> tuple[jax.Array | None, jax.Array, Draw, dict[str, jax.Array]]:
    """Draws the clients and the samples of a round, a pure function of its number from 0."""
    # `facts` are i32[K] training samples of the clients, from `smallest` to `longest`, and the
    # trace or None. Returns the clients i32[C] in order, None for all K; the client i32[P] of each
    # row of batches, K for padding; the samples of each row; and {"participates": bool[P]}, {} if
    # all do.
    (who, work, smallest, longest, mesh), (sizes, trace) = drawing, facts
    who = who._replace(trace=trace)
    client, participates = draw_cohort(who, sizes, keys.participation, number)
    rows = jnp.arange(len(sizes), dtype=jnp.int32) if client is None else client
    padding = 0, padded(len(rows), mesh) - len(rows)
    rows = jnp.pad(rows, padding, constant_values=len(sizes))
    key = jax.random.fold_in(keys.data, number)
    samples = work.sampler(smallest, longest)(sizes[rows], rows, longest, key)
    # Padding rows have no client, so none of their samples is valid.
    samples = samples._replace(valid=samples.valid & (rows < len(sizes))[:, None, None])
    present = {} if participates is None else {"participates": jnp.pad(participates, padding)}
    return client, rows, samples, present


def _open_stream(
    experiment: Experiment, keys: Any, state: AnyState
) -> tuple[Callable[[int], tuple], np.ndarray, Iterator[Batches]]:
    """Returns `_draw` by number, the rows of this process, and a stream of their batches."""
    drawing, facts = _drawing_of(experiment)
    draw = made_once(("draw", drawing), lambda: jax.jit(partial(_draw, drawing)))
    # Of several rounds, because samples of the next one are read before all of this one are taken.
    cached_draw = lru_cache(4)(lambda number: jax.device_get(draw(facts, keys, number)))
    lock = threading.Lock()

    def drawn(number: int) -> tuple:
        with lock:  # many threads ask, and each round is drawn once
            return cached_draw(number)

    start_round, rounds = int(state.round), experiment.plan.rounds
    local = own_rows(len(drawn(start_round)[1]), clients_of(experiment.mesh))
    splits = [domain.train for domain in experiment.internal.domains]
    stream = stream_rounds(splits, lambda n: drawn(n)[1:3], start_round, rounds, local)
    return drawn, local, stream


def _rows_on(data: Any, client: jax.Array, mesh: Mesh | None) -> Any:
    rows = rows_of(data, client)
    return rows if mesh is None else jax.lax.with_sharding_constraint(rows, clients_of(mesh))


def _compile_round(
    method: FederatedMethod, drawing: tuple, mesh: Mesh | None, resident: bool, *arguments: Any
) -> Callable[..., tuple]:
    """Compiles drawing, look-up, augmentation and a round as one program."""
    # `data` are all samples if `resident`, else the batches of the next round. Facts and keys are
    # arguments, so that runs with other seeds use the program too.

    def round(state: FederatedState, data: Any, validation_rows: Batches, common: tuple) -> tuple:
        facts, keys = common
        client, numbers, samples, present = _draw(drawing, facts, keys, state.round)
        if resident:
            rows = data if client is None else _rows_on(data, numbers, mesh)
            data = point_to(rows, samples)
        batches = data | present
        if client is None:
            return method.round(state, batches | validation_rows, keys.method)
        num_clients = len(facts[0])
        batches |= _rows_on(validation_rows, numbers, mesh)
        batches |= {"client": numbers, "population": jnp.asarray(num_clients, jnp.int32)}
        after, metrics = method.round(take_rows(state, client), batches, keys.method)
        of_all = {"server_finite": metrics["server_finite"]}
        for name in [name for name in _ABSENT if name in metrics]:
            everybody = jnp.full(num_clients, _ABSENT[name], metrics[name].dtype)
            of_all[name] = everybody.at[client].set(metrics[name])
        return put_rows(state, after, client), of_all

    spread = None if mesh is None else (shardings_of(arguments[0], mesh), copies_on(mesh))
    program = jax.jit(round, donate_argnums=0, out_shardings=spread)
    return _compiled(("round", method.round, drawing, resident), program, arguments, mesh)


def _compiled(
    key: tuple, program: Any, arguments: tuple, mesh: Mesh | None
) -> Callable[..., tuple]:
    def compiled() -> jax.stages.Compiled:
        with over_devices(mesh):
            return compile_round(program.trace(*arguments))

    return made_once(key, compiled, arguments)


def _open_cohorts(
    experiment: Experiment, keys: Any, state: PopulationState
) -> Callable[[PopulationState], Callable[[PopulationState], tuple]]:
    """Returns `Rounds.compile` of a population whose clients' own parts are on the host."""
    domains, mesh, over = experiment.internal.domains, experiment.mesh, clients_of(experiment.mesh)
    drawn, local, stream = _open_stream(experiment, keys, state)
    sizes, key = (len(domains), len(state.cohort)), place_copies(keys.method, mesh)

    def inputs(state: PopulationState, batches: Batches) -> tuple[np.ndarray, tuple]:
        """Returns the next cohort's numbers, and the arguments of the compiled round."""
        client, numbers, _, present = drawn(int(state.round))
        clients = np.minimum(numbers[local], len(domains) - 1)  # padding rows have the number N
        present = {name: leaf[local] for name, leaf in present.items()}
        batches = batches | present | {"client": numbers[local]}
        if experiment.validates:
            longest = max(len(domain.validation.images) for domain in domains)
            of_cohort = [domains[k].validation for k in clients], experiment.evaluation.batch_size
            batches["validation"] = validation_batches(*of_cohort, longest=longest)
        parts = state.rows_of(clients, _PADDED), batches
        rows, batches = place_own(local, len(numbers), over, parts)
        rows |= place_copies(state.rows_of(client, _WHOLE), mesh)
        return client, (state.state, rows, batches, key)

    def compile(state: PopulationState) -> Callable[[PopulationState], tuple]:
        waiting, copies = next(stream), copies_on(mesh)
        arguments, batches = inputs(state, waiting)[1], chain([waiting], stream)
        by_row = dict.fromkeys(_PADDED, over) | dict.fromkeys(_WHOLE, copies)
        spread = None if mesh is None else (copies, by_row, copies)
        cohort = partial(cohort_round, experiment.method, *sizes)
        program = jax.jit(cohort, donate_argnums=(0, 1), out_shardings=spread)
        name = "cohort", experiment.method.round, mesh, sizes
        program = _compiled(name, program, arguments, mesh)

        def round(state: PopulationState) -> tuple[PopulationState, dict[str, np.ndarray]]:
            client, arguments = inputs(state, next(batches))
            common, rows, metrics = program(*arguments)
            several = jax.process_count() > 1  # each has rows that the others do not see
            rows, metrics = jax.device_get(gathered((rows, metrics), mesh if several else None))
            # Clients that sat out, or whose update is not finite, keep their rows.
            trained = np.flatnonzero(np.isfinite(metrics["loss"]) & metrics["finite"])
            state.put_rows(client[trained], jax.tree.map(lambda leaf: leaf[trained], rows))
            of_all = {"server_finite": metrics["server_finite"]}
            for name in [name for name in _ABSENT if name in metrics]:
                of_all[name] = np.full(len(domains), _ABSENT[name], metrics[name].dtype)
                of_all[name][client] = metrics[name]
            return PopulationState(common, state.rows, client, state.trained), of_all

        return round

    return compile


def cohort_round(
    method: FederatedMethod,
    num_clients: int,
    drawn: int,
    state: FederatedState,
    rows: dict[str, Any],
    batches: Batches,
    key: jax.Array,
) -> tuple[FederatedState, dict[str, Any], dict[str, jax.Array]]:
    """Returns the next `PopulationState.state`, rows (part -> [P, ...]) and metrics of a cohort."""
    cohort = state._replace(weights=jnp.zeros_like(state.weights, shape=drawn), **rows)
    population = jnp.asarray(num_clients, jnp.int32)
    after, metrics = method.round(cohort, batches | {"population": population}, key)
    weights = metrics["weights"]
    # If no client counts, an unseen client receives what it received before.
    counted = weights.sum() > 0
    mean = unseen_personal(jax.tree.map(lambda leaf: leaf[:drawn], after.personal), weights)
    mean = jax.tree.map(
        lambda mean_leaf, before: jnp.where(counted, mean_leaf, before[0])[None],
        mean,
        state.personal,
    )
    rows = {part: getattr(after, part) for part in PARTS}
    after = after._replace(weights=state.weights, personal=mean, memory=(), weighing=())
    return after, rows, {n: x for n, x in metrics.items() if n in (*_ABSENT, "server_finite")}


def megabytes(splits: Sequence[Split]) -> float:
    """Returns the megabytes of the samples of all splits; a shared split is counted once."""
    return sum(split.images.nbytes for split in {id(s): s for s in splits}.values()) / 2**20


def stream_rounds(
    splits: Sequence[Split],
    draw: Callable[[int], tuple[jax.Array, Draw]],
    start_round: int,
    rounds: int,
    row_numbers: np.ndarray,
) -> Iterator[Batches]:
    """Yields the batches of rounds `start_round` to `rounds` - 1, as NumPy arrays, read ahead.

    They have "image" [C, S, B, ...], "label" i32[C, S, B] or a tree, "valid" bool[C, S, B], and
    "size" i32[C], 0 for padding. `draw(round) -> (client i32[P], Draw)` chooses samples of the K
    clients; `row_numbers` i[C] are those of the P rows to read.
    """
    import grain  # takes a second, and most runs do not stream

    steps = draw(start_round)[1].index.shape[1]
    count = len(row_numbers) * steps  # batches of a round
    sizes = np.array([*(len(split.images) for split in splits), 0], np.int32)

    def read(place: int) -> Batches:
        number, position = divmod(place, count)
        row, step = row_numbers[position // steps], position % steps
        client, samples = draw(number)
        split = splits[min(client[row], len(splits) - 1)]  # padding rows have the number K
        valid = np.asarray(samples.valid[row, step])
        index = np.where(valid, samples.index[row, step], 0)

        def labels_of(leaf: np.ndarray) -> np.ndarray:
            rows = leaf[index]
            mask = valid.reshape(-1, *(1,) * (rows.ndim - 1))
            return np.where(mask, rows, 0).astype(stored(leaf))

        labels = jax.tree.map(labels_of, split.labels)
        return {"image": np.asarray(split.images[index]), "label": labels, "valid": valid}

    numbers = grain.MapDataset.range(start_round * count, rounds * count).map(read).batch(count)
    ahead = max(2 * count, _THREADS)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=ahead)
    for number, batches in enumerate(numbers.to_iter_dataset(options), start_round):
        batches = jax.tree.map(
            lambda leaf: leaf.reshape(len(row_numbers), steps, *leaf.shape[1:]), batches
        )
        yield batches | {"size": sizes[draw(number)[0][row_numbers]]}
