"""The rounds of a run as compiled programs: data on the devices, or streamed from the host.

On a mesh batches have rows of padding up to a multiple of its clients axis. Their numbers are those
of no client. Each device holds and gets its own clients' rows.
"""

from collections.abc import Callable
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
    point_to,
    rows_of,
    validation_batches,
)
from fedjax_bn.engine.backend import compile_quickly
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.devices import padded
from fedjax_bn.federation import FederatedState, put_rows, take_rows
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.availability import Cohort, draw_cohort
from fedjax_bn.run.experiment.build import Experiment
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
from fedjax_bn.run.training.stream import forms_of, megabytes, stream_rounds

# The metrics of clients that were not drawn for a round.
ABSENT = {"loss": np.nan, "risk": 0.0, "weights": 0.0, "finite": True}
Round = Callable[[FederatedState], tuple[FederatedState, dict[str, jax.Array]]]
# feed(number, data, keys) -> the batches of a round, of all clients or of its cohort
_Feed = Callable[[jax.Array, Any, Any], Batches]


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
    compile: Callable[[FederatedState], Round]


def open_rounds(
    config: ConfigDict, experiment: Experiment, keys: Any, state: FederatedState
) -> Rounds:
    """Puts the training data on the device if they fit, and otherwise opens a stream.

    Both ways train on the same samples in the same order.

    Args:
      config: the run's.
      experiment: what it names.
      keys: with the random keys `data`, `method` and `participation`.
      state: before the next round.

    Raises:
      ConfigError: validation samples that training needs do not fit on the device.
    """
    splits, mesh = [domain.train for domain in experiment.internal.domains], experiment.mesh
    over, longest = clients_of(mesh), max(len(split.images) for split in splits)
    needed, limit = _padded_megabytes(splits, mesh), config.data.device_megabytes
    size = f"{megabytes(splits):.0f} MB of training samples"
    kept = _validation_data(config, experiment)
    program = partial(_compile_round, config, experiment, place_copies(keys, mesh), kept)
    if needed <= limit:
        read = partial(client_rows, splits, longest)
        data = place_rows(read, padded(len(splits), mesh), over)
        feed = partial(_resident_batches, config, experiment, longest)

        def compile(state: FederatedState) -> Round:
            run = program(feed, state, data)
            return lambda state: run(state, data)

        note = f"{size} stay on the device (data.device_megabytes={limit})"
        like = jax.eval_shape(feed, state.round, data, keys) | kept
        return Rounds(note, jax.tree.map(one_row, like), compile)

    draw = partial(jax.jit(partial(draw_round, config, experiment, longest)), keys)
    shape = jax.eval_shape(draw, state.round)[1].index.shape
    rows = own_rows(shape[0], over)
    stream = stream_rounds(splits, draw, int(state.round), config.rounds, rows)
    batches = map(partial(place_own, rows, shape[0], over), stream)

    def compile_streamed(state: FederatedState) -> Round:
        first = next(batches, None)
        if first is None:  # the last round is done
            return lambda state: (state, {})
        run = program(lambda number, data, keys: data, state, first)
        waiting = [first]
        return lambda state: run(state, waiting.pop() if waiting else next(batches))

    note = (
        f"{size} are streamed, because {needed:.0f} MB pass data.device_megabytes={limit}; a "
        f"round's batches take {splits[0].images[:1].nbytes * np.prod(shape) / 2**20:.0f} MB of "
        "the device"
    )
    like = forms_of(splits[0], shape[1:]) | jax.tree.map(one_row, kept)
    return Rounds(note, like, compile_streamed)


def one_row(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the form of an array without its leading axis."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def cohort_of(config: ConfigDict, experiment: Experiment, keys: Any, number: jax.Array) -> Cohort:
    """Returns who is drawn for a round, and who of them takes part.

    Args:
      config: the run's.
      experiment: with its clients, and the trace of who is available.
      keys: with the random key `participation`.
      number: i32[], of the round, from 0.
    """
    sizes = np.array([len(domain.train.images) for domain in experiment.internal.domains])
    return draw_cohort(experiment.participation, sizes, keys.participation, number)


def draw_round(
    config: ConfigDict, experiment: Experiment, longest: int, keys: Any, number: jax.Array
) -> tuple[jax.Array, Draw]:
    """Draws who takes part in a round and on which samples, on the device as for a stream.

    Returns:
      Numbers of clients i32[C], in rows of padding from K on, and their samples; padding has none.
    """
    splits = [domain.train for domain in experiment.internal.domains]
    sizes = jnp.asarray([len(split.images) for split in splits], jnp.int32)
    client = cohort_of(config, experiment, keys, number).client
    client = jnp.arange(len(splits), dtype=jnp.int32) if client is None else client
    client = _with_padding(client, len(splits), experiment.mesh)
    key = jax.random.fold_in(keys.data, number)
    draw = experiment.sampler()(sizes[client], client, longest, key)
    return client, draw._replace(valid=draw.valid & (client < len(splits))[:, None, None])


def _with_padding(client: jax.Array, num_clients: int, mesh: Mesh | None) -> jax.Array:
    """Returns i32[P]: numbers of a round's clients, and K in rows of padding after them."""
    missing = padded(len(client), mesh) - len(client)
    return jnp.pad(client, (0, missing), constant_values=num_clients)


def absent_in_padding(mesh: Mesh | None, participates: jax.Array) -> jax.Array:
    """Returns bool[P]: who takes part, and False in rows of padding."""
    return jnp.pad(participates, (0, padded(len(participates), mesh) - len(participates)))


def _resident_batches(
    config: ConfigDict,
    experiment: Experiment,
    longest: int,
    number: jax.Array,
    data: ClientData,
    keys: Any,
) -> Batches:
    """Returns the batches of a round: numbers of samples in the data on the device."""
    client, draw = draw_round(config, experiment, longest, keys, number)
    everybody = cohort_of(config, experiment, keys, number).client is None
    return point_to(data if everybody else _rows_on(data, client, experiment.mesh), draw)


def _rows_on(data: Any, client: jax.Array, mesh: Mesh | None) -> Any:
    """Returns arrays [P, ...] of a round's clients, each on the device that trains it."""
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
    """Compiles sampling, look-up, augmentation and the method's round as one program.

    Returns:
      `run(state, data) -> (state, metrics)`, of all clients [K, ...].
    """
    num_clients, mesh = len(experiment.internal.domains), experiment.mesh
    method = experiment.method

    def round(state: FederatedState, data: Any, kept: Batches, keys: Any) -> tuple:
        cohort = cohort_of(config, experiment, keys, state.round)
        present = jax.tree.map(partial(absent_in_padding, mesh), cohort.entries())
        client = cohort.client
        if client is None:
            return method.round(state, feed(state.round, data, keys) | kept | present, keys.method)
        rows = _with_padding(client, num_clients, mesh)
        batches = feed(state.round, data, keys) | _rows_on(kept, rows, mesh) | present
        batches |= {"client": rows, "population": jnp.asarray(num_clients, jnp.int32)}
        after, metrics = method.round(take_rows(state, client), batches, keys.method)
        told = {"server_finite": metrics["server_finite"]}
        for name, value in ABSENT.items():
            everybody = jnp.full(num_clients, value, metrics[name].dtype)
            told[name] = everybody.at[client].set(metrics[name])
        return put_rows(state, after, client), told

    spread = None if mesh is None else (shardings_of(state, mesh), everywhere(mesh))
    program = jax.jit(round, donate_argnums=0, out_shardings=spread)
    # Keys are arguments: runs with other seeds find this program in JAX's compilation cache.
    compiled = compile_quickly(program.lower(state, data, kept, keys))
    return lambda state, data: compiled(state, data, kept, keys)


def _validation_data(config: ConfigDict, experiment: Experiment) -> Batches:
    """Returns {"validation": the clients' samples on the device} if training needs them, else {}.

    Raises:
      ConfigError: they do not fit.
    """
    if not what_validates(config):
        return {}
    splits, mesh = [d.validation for d in experiment.internal.domains], experiment.mesh
    _check_validation_fits(config, splits, mesh)
    read = partial(validation_batches, splits, config.eval_batch_size)
    return {"validation": place_rows(read, padded(len(splits), mesh), clients_of(mesh))}


def _check_validation_fits(config: ConfigDict, splits: list[Split], mesh: Mesh | None) -> None:
    size, limit = _padded_megabytes(splits, mesh), config.data.device_megabytes
    if size > limit:
        raise ConfigError(
            f"{what_validates(config)} keeps the clients' {size:.0f} MB of validation samples on "
            f"the device, more than config.data.device_megabytes={limit}: raise it, lower "
            "config.data.validation, or leave that key out"
        )


def _padded_megabytes(splits: list[Split], mesh: Mesh | None) -> float:
    """Returns the memory of one device's samples, if each client has as many as the largest."""
    longest = max(len(split.images) for split in splits)
    each = padded(len(splits), mesh) // padded(1, mesh)
    return splits[0].images[:1].nbytes * longest * each / 2**20
