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
from fedjax_bn.data.sampling import Draw, client_rows, point_to, rows_of, validation_batches
from fedjax_bn.engine.backend import compile_quickly
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.devices import padded
from fedjax_bn.federation import FederatedMethod, FederatedState, put_rows, take_rows
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.availability import draw_cohort
from fedjax_bn.run.experiment.build import Experiment
from fedjax_bn.run.experiment.method import what_validates
from fedjax_bn.run.processes.mesh import (
    clients_of,
    copies_on,
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


class Drawn(NamedTuple):
    """Who is drawn for a round, and on which samples.

    Attributes:
      client: i32[C], numbers of the clients in order; None for all K.
      rows: i32[P], the numbers of the clients that rows of batches have; K in rows of padding.
      samples: of the rows; those of padding have none.
      present: {"participates": bool[P]}, which of the rows take part; {} if all do.
    """

    client: jax.Array | None
    rows: jax.Array
    samples: Draw
    present: dict[str, jax.Array]


def drawing_of(experiment: Experiment) -> Callable[[Any, jax.Array], Drawn]:
    """Returns `draw(keys, number) -> Drawn`, a pure function of the round's number from 0."""
    mesh = experiment.mesh
    sizes = np.array([len(domain.train.images) for domain in experiment.internal.domains])
    total, longest = len(sizes), int(sizes.max())
    sample = experiment.sampler()

    def draw(keys: Any, number: jax.Array) -> Drawn:
        cohort = draw_cohort(experiment.participation, sizes, keys.participation, number)
        client = cohort.client
        rows = jnp.arange(total, dtype=jnp.int32) if client is None else client
        missing = padded(len(rows), mesh) - len(rows)
        rows = jnp.pad(rows, (0, missing), constant_values=total)
        key = jax.random.fold_in(keys.data, number)
        samples = sample(jnp.asarray(sizes, jnp.int32)[rows], rows, longest, key)
        samples = samples._replace(valid=samples.valid & (rows < total)[:, None, None])
        present = jax.tree.map(
            lambda one: jnp.pad(one, (0, padded(len(one), mesh) - len(one))), cohort.entries()
        )
        return Drawn(client, rows, samples, present)

    return draw


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
    over, limit = clients_of(mesh), config.data.device_megabytes
    needed, size = _padded_megabytes(splits, mesh), f"{megabytes(splits):.0f} MB"
    draw, kept = drawing_of(experiment), {}
    if why := what_validates(config):
        validation = [domain.validation for domain in experiment.internal.domains]
        if (more := _padded_megabytes(validation, mesh)) > limit:
            raise ConfigError(
                f"{why} keeps the clients' {more:.0f} MB of validation samples on the device, more "
                f"than config.data.device_megabytes={limit}: raise it, lower "
                "config.data.validation, or leave that key out"
            )
        read = partial(validation_batches, validation, config.eval_batch_size)
        kept = {"validation": place_rows(read, padded(len(splits), mesh), over)}
    method, placed = experiment.method, place_copies(keys, mesh)
    program = partial(_compile_round, method, mesh, len(splits), draw, placed, kept)
    if needed <= limit:
        read = partial(client_rows, splits, max(len(split.images) for split in splits))
        data = place_rows(read, padded(len(splits), mesh), over)

        def feed(drawn: Drawn, data: Any) -> Batches:
            own = data if drawn.client is None else _rows_on(data, drawn.rows, mesh)
            return point_to(own, drawn.samples)

        def compile(state: FederatedState) -> Round:
            run = program(feed, state, data)
            return lambda state: run(state, data)

        note = f"{size} of training samples stay on the device (data.device_megabytes={limit})"
        like = jax.eval_shape(lambda data: feed(draw(keys, state.round), data), data) | kept
        return Rounds(note, jax.tree.map(one_row, like), compile)

    drawn_rows = partial(jax.jit(lambda keys, number: draw(keys, number)[1:3]), keys)
    shape = jax.eval_shape(drawn_rows, state.round)[1].index.shape
    rows = own_rows(shape[0], over)
    stream = stream_rounds(splits, drawn_rows, int(state.round), config.rounds, rows)
    batches = map(partial(place_own, rows, shape[0], over), stream)

    def compile_streamed(state: FederatedState) -> Round:
        first = next(batches, None)
        if first is None:  # the last round is done
            return lambda state: (state, {})
        run = program(lambda drawn, data: data, state, first)
        waiting = [first]
        return lambda state: run(state, waiting.pop() if waiting else next(batches))

    note = (
        f"{size} of training samples are streamed, because {needed:.0f} MB pass "
        f"data.device_megabytes={limit}; a round's batches take "
        f"{splits[0].images[:1].nbytes * np.prod(shape) / 2**20:.0f} MB of the device"
    )
    like = forms_of(splits[0], shape[1:]) | jax.tree.map(one_row, kept)
    return Rounds(note, like, compile_streamed)


def one_row(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the form of an array without its leading axis."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def _rows_on(data: Any, client: jax.Array, mesh: Mesh | None) -> Any:
    """Returns arrays [P, ...] of a round's clients, each on the device that trains it."""
    rows = rows_of(data, client)
    return rows if mesh is None else jax.lax.with_sharding_constraint(rows, clients_of(mesh))


def _compile_round(
    method: FederatedMethod,
    mesh: Mesh | None,
    num_clients: int,
    draw: Callable[[Any, jax.Array], Drawn],
    keys: Any,
    kept: Batches,
    feed: Callable[[Drawn, Any], Batches],
    state: FederatedState,
    data: Any,
) -> Callable[[FederatedState, Any], tuple]:
    """Compiles sampling, look-up, augmentation and a round as one program, `run(state, data)`."""

    def round(state: FederatedState, data: Any, kept: Batches, keys: Any) -> tuple:
        drawn = draw(keys, state.round)
        batches = feed(drawn, data) | drawn.present
        if drawn.client is None:
            return method.round(state, batches | kept, keys.method)
        batches |= _rows_on(kept, drawn.rows, mesh)
        batches |= {"client": drawn.rows, "population": jnp.asarray(num_clients, jnp.int32)}
        after, metrics = method.round(take_rows(state, drawn.client), batches, keys.method)
        told = {"server_finite": metrics["server_finite"]}
        for name, value in ABSENT.items():
            everybody = jnp.full(num_clients, value, metrics[name].dtype)
            told[name] = everybody.at[drawn.client].set(metrics[name])
        return put_rows(state, after, drawn.client), told

    spread = None if mesh is None else (shardings_of(state, mesh), copies_on(mesh))
    program = jax.jit(round, donate_argnums=0, out_shardings=spread)
    # Keys are arguments: runs with other seeds find this program in JAX's compilation cache.
    compiled = compile_quickly(program.lower(state, data, kept, keys))
    return lambda state, data: compiled(state, data, kept, keys)


def _padded_megabytes(splits: list[Split], mesh: Mesh | None) -> float:
    """Returns the memory of one device's samples, if each client has as many as the largest."""
    longest = max(len(split.images) for split in splits)
    each = padded(len(splits), mesh) // padded(1, mesh)
    return splits[0].images[:1].nbytes * longest * each / 2**20
