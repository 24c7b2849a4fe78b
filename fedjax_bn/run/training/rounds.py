"""The rounds of a run as compiled programs: data on the devices, or streamed from the host.

On a mesh batches have rows of padding up to a multiple of its clients axis, with numbers that no
client has; each device holds and gets its own clients' rows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn.data.domain import Split
from fedjax_bn.data.sampling import (
    ClientData,
    Draw,
    client_rows,
    label_forms,
    point_to,
    rows_of,
    validation_batches,
)
from fedjax_bn.engine.backend import compile_quickly
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.devices import padded
from fedjax_bn.federation import FederatedMethod, FederatedState, put_rows, take_rows
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.availability import Cohort, draw_cohort
from fedjax_bn.run.experiment.build import Experiment, sampler
from fedjax_bn.run.experiment.method import what_validates
from fedjax_bn.run.processes.mesh import (
    clients_of,
    everywhere,
    over_clients,
    own_rows,
    place_copies,
    place_own,
    place_rows,
    shardings_of,
)
from fedjax_bn.run.training.stream import megabytes, stream_rounds

Round = Callable[[FederatedState], tuple[FederatedState, dict[str, jax.Array]]]
# feed(number, data, keys) -> the batches of a round, of all clients or of its cohort
_Feed = Callable[[jax.Array, Any, Any], Batches]


class Rounds(NamedTuple):
    """How the rounds of a run get their data.

    Attributes:
      note: a sentence on which way was taken, and why.
      batches: the form of one client's batches, `jax.ShapeDtypeStruct`s [S, B, ...].
      compile: `compile(state) -> round`, where `round(state) -> (state, metrics)` is the next round
        and donates the state.
    """

    note: str
    batches: Batches
    compile: Callable[[FederatedState], Round]


def open_rounds(
    config: ConfigDict, experiment: Experiment, keys: Any, state: FederatedState
) -> Rounds:
    """Puts the training data on the device where they fit, and else opens a stream.

    Both ways train on the same samples in the same order.

    Args:
      config: the run's.
      experiment: what it names.
      keys: with the random keys `data`, `method` and `participation`.
      state: before the next round.
    """
    splits, mesh = [domain.train for domain in experiment.internal.domains], experiment.mesh
    over = clients_of(mesh)
    longest = max(len(split.images) for split in splits)
    needed, limit = _padded_megabytes(splits, mesh), config.data.device_megabytes
    size = f"{megabytes(splits):.0f} MB of training samples"
    kept = _validation_data(config, experiment)
    keys_there = place_copies(keys, mesh)
    program = partial(_compile_round, config, experiment, keys_there, kept)
    if needed <= limit:
        rows = padded(len(splits), mesh)
        data = place_rows(partial(client_rows, splits, longest), rows, over)
        note = f"{size} stay on the device (data.device_megabytes={limit})"
        feed = partial(_resident_batches, config, experiment, longest)
        like = jax.eval_shape(feed, state.round, data, keys) | kept
        return Rounds(note, _one_client(like), partial(_resident_rounds, program, feed, data))
    draw = partial(jax.jit(partial(draw_round, config, experiment, longest)), keys)
    index, images = jax.eval_shape(draw, state.round)[1].index, splits[0].images
    note = (
        f"{size} are streamed, because {needed:.0f} MB pass data.device_megabytes={limit}; "
        f"a round's batches take {images[:1].nbytes * index.size / 2**20:.0f} MB of the device"
    )
    rows = own_rows(index.shape[0], over)
    rounds = stream_rounds(splits, draw, int(state.round), config.rounds, rows)
    put = partial(place_own, rows, index.shape[0], over)
    image = jax.ShapeDtypeStruct(
        (*index.shape, *splits[0].images.shape[1:]), splits[0].images.dtype
    )
    label = label_forms(splits[0], index.shape)
    like = {"image": image, "label": label, "valid": jax.ShapeDtypeStruct(index.shape, bool)} | kept
    return Rounds(note, _one_client(like), partial(_streamed_rounds, program, map(put, rounds)))


def _one_client(batches: Batches) -> Batches:
    """The form of batches without their leading axis."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batches)


def draw_round(
    config: ConfigDict, experiment: Experiment, longest: int, keys: Any, number: jax.Array
) -> tuple[jax.Array, Draw]:
    """Who takes part in a round and on which samples; the same on the device and for a stream.

    Returns:
      Numbers of clients i32[C], from K on of rows of padding, and their samples, of those none.
    """
    splits = [domain.train for domain in experiment.internal.domains]
    sizes = jnp.asarray([len(split.images) for split in splits], jnp.int32)
    client = cohort_of(config, experiment, keys, number).client
    client = jnp.arange(len(splits), dtype=jnp.int32) if client is None else client
    client = _with_padding(client, len(splits), experiment.mesh)
    key = jax.random.fold_in(keys.data, number)
    draw = sampler(config, experiment.internal)(sizes[client], client, longest, key)
    return client, draw._replace(valid=draw.valid & (client < len(splits))[:, None, None])


def _with_padding(client: jax.Array, num_clients: int, mesh: Mesh | None) -> jax.Array:
    """i32[P], numbers of a round's clients and behind them K in rows of padding."""
    missing = padded(len(client), mesh) - len(client)
    return jnp.pad(client, (0, missing), constant_values=num_clients)


def absent_in_padding(mesh: Mesh | None, participates: jax.Array) -> jax.Array:
    """bool[P], who takes part, and False in rows of padding."""
    return jnp.pad(participates, (0, padded(len(participates), mesh) - len(participates)))


def cohort_of(config: ConfigDict, experiment: Experiment, keys: Any, number: jax.Array) -> Cohort:
    """Who is drawn for a round, and who of them takes part.

    Args:
      config: the run's.
      experiment: with its clients, and the trace of who is available.
      keys: with the random key `participation`.
      number: i32[], of the round, from 0.
    """
    sizes = np.array([len(domain.train.images) for domain in experiment.internal.domains])
    return draw_cohort(config, experiment.trace, sizes, keys.participation, number)


def _resident_batches(
    config: ConfigDict,
    experiment: Experiment,
    longest: int,
    number: jax.Array,
    data: ClientData,
    keys: Any,
) -> Batches:
    """The batches of a round, numbers of samples in the data that lie on the device."""
    client, draw = draw_round(config, experiment, longest, keys, number)
    everybody = cohort_of(config, experiment, keys, number).client is None
    return point_to(data if everybody else _rows_on(data, client, experiment.mesh), draw)


def _rows_on(data: Any, client: jax.Array, mesh: Mesh | None) -> Any:
    """Arrays [P, ...] of a round's clients, each on the device that trains it."""
    rows = rows_of(data, client)
    return rows if mesh is None else jax.lax.with_sharding_constraint(rows, over_clients(mesh))


def _compile_round(
    config: ConfigDict,
    experiment: Experiment,
    keys: Any,
    kept: Batches,
    feed: _Feed,
    state: FederatedState,
    data: Any,
) -> Callable[[FederatedState, Any], tuple]:
    """Sampling, look-up, augmentation and the method's round as one program of (state, data)."""
    num_clients, mesh = len(experiment.internal.domains), experiment.mesh

    def round(state: FederatedState, data: Any, kept: Batches, keys: Any) -> tuple:
        cohort = cohort_of(config, experiment, keys, state.round)
        client = cohort.client
        rows = None if client is None else _with_padding(client, num_clients, mesh)
        present = jax.tree.map(partial(absent_in_padding, mesh), cohort.entries())
        mine = kept if client is None else _rows_on(kept, rows, mesh)
        batches = feed(state.round, data, keys) | mine | present
        return _run_cohort(experiment.method, state, batches, client, rows, keys.method)

    spread = None if mesh is None else (shardings_of(state, mesh), everywhere(mesh))
    program = jax.jit(round, donate_argnums=0, out_shardings=spread)
    # Keys are arguments: runs with other seeds find this program in JAX's compilation cache.
    compiled = compile_quickly(program.lower(state, data, kept, keys))
    return lambda state, data: compiled(state, data, kept, keys)


def _run_cohort(
    method: FederatedMethod,
    state: FederatedState,
    batches: Batches,
    client: jax.Array | None,
    rows: jax.Array | None,
    key: jax.Array,
) -> tuple[FederatedState, dict[str, jax.Array]]:
    """A round over a cohort, with state and metrics of all clients [K, ...].

    Args:
      method: the method.
      state: of all K clients.
      batches: of the cohort and of rows of padding, [P, ...].
      client: i32[C], who it is; None for all.
      rows: i32[P], the same with a number for every row; None for all.
      key: the run's.
    """
    if client is None:
        return method.round(state, batches, key)
    population = state.weights.shape[0]
    cohort = take_rows(state, client)
    who = {"client": rows, "population": jnp.asarray(population, jnp.int32)}
    after, metrics = method.round(cohort, batches | who, key)
    absent = {"loss": jnp.nan, "risk": 0.0, "weights": 0.0, "finite": True}
    metrics = {
        name: jnp.full(population, value, metrics[name].dtype).at[client].set(metrics[name])
        for name, value in absent.items()
    } | {"server_finite": metrics["server_finite"]}
    return put_rows(state, after, client), metrics


def _resident_rounds(program: Callable, feed: _Feed, data: Any, state: FederatedState) -> Round:
    """Rounds whose data lie on the device."""
    run = program(feed, state, data)
    return lambda state: run(state, data)


def _streamed_rounds(program: Callable, batches: Iterator[Batches], state: FederatedState) -> Round:
    """Rounds whose batches come from the host."""
    first = next(batches, None)
    if first is None:  # the last round is done
        return lambda state: (state, {})
    run = program(lambda number, data, keys: data, state, first)
    waiting = [first]

    def round(state: FederatedState) -> tuple:
        return run(state, waiting.pop() if waiting else next(batches))

    return round


def _validation_data(config: ConfigDict, experiment: Experiment) -> Batches:
    """{"validation": the clients' samples on the device}, where training needs them; else {}.

    Raises:
      ConfigError: they do not fit.
    """
    if not what_validates(config):
        return {}
    splits, mesh = [d.validation for d in experiment.internal.domains], experiment.mesh
    check_validation_fits(config, splits, mesh)
    read = partial(validation_batches, splits, config.eval_batch_size)
    return {"validation": place_rows(read, padded(len(splits), mesh), clients_of(mesh))}


def check_validation_fits(
    config: ConfigDict, splits: list[Split], mesh: Mesh | None = None
) -> None:
    """Raises ConfigError where the clients' validation samples do not fit on the device."""
    size, limit = _padded_megabytes(splits, mesh), config.data.device_megabytes
    if size > limit:
        raise ConfigError(
            f"{what_validates(config)} keeps the clients' {size:.0f} MB of "
            f"validation samples on the device, more than config.data.device_megabytes={limit}: "
            "raise it, lower config.data.validation, or leave that key out"
        )


def _padded_megabytes(splits: list[Split], mesh: Mesh | None) -> float:
    """Memory of the samples of one device, of each of its clients as many as the largest has."""
    longest = max(len(split.images) for split in splits)
    each = padded(len(splits), mesh) // padded(1, mesh)
    return splits[0].images[:1].nbytes * longest * each / 2**20
