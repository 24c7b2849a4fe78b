"""A population: far more clients than take part in a round, whose own parts lie on the disk.

`config.population` says where the clients' own parts of the state are kept (personal leaves, method
memory, what a weighing rule remembers). On the device it is a row a client. On the disk a
`RowStore` has them, and a run carries a `Held` in place of the `FederatedState`.
"""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.adaptation import ensemble
from fedjax_bn.arguments.text import brief
from fedjax_bn.federation import FederatedState
from fedjax_bn.run.errors import CheckpointError, ConfigError
from fedjax_bn.run.experiment.availability import Cohort
from fedjax_bn.run.processes.together import by_first
from fedjax_bn.run.training.row_store import SLOTS, UNTOUCHED, RowStore

PyTree = Any
# A client's own part, by files of its own: evaluation reads personal leaves alone.
PARTS = ("personal", "memory", "weighing")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("state", "first", "client", "slots"),
    meta_fields=("store",),
)
@dataclasses.dataclass(frozen=True)
class Held:
    """What a run of a population carries from round to round, and what its checkpoints hold.

    Attributes:
      state: what is not by client, in the form of a federation of one, whose personal leaves are
        the mean over the last round that counted: what an unseen client receives.
      first: part -> the row that a client has before it trains, a tree without leading axis.
      client: i32[C], who was drawn in the last round.
      slots: u8[N], where in the store each client's row is; 255 for one that has never trained.
      store: the rows.
    """

    state: FederatedState
    first: dict[str, PyTree]
    client: np.ndarray
    slots: np.ndarray
    store: RowStore

    # What reads a federation's state reads these: a federation of one client.
    round = property(lambda self: self.state.round)
    shared = property(lambda self: self.state.shared)
    server = property(lambda self: self.state.server)
    weights = property(lambda self: self.state.weights)
    personal = property(lambda self: self.state.personal)
    memory = property(lambda self: jax.tree.map(lambda leaf: leaf[None], self.first["memory"]))


def start_held(
    config: ConfigDict, start: Callable[[], FederatedState], folder: Path, num_clients: int
) -> Callable[[], FederatedState | Held]:
    """`start`, or where the clients' rows lie on the disk a function that makes the first `Held`.

    Args:
      config: the run's.
      start: makes the first state; of one client where the rows lie on the disk.
      folder: the workdir.
      num_clients: N.
    """
    if not on_disk(config, num_clients):
        return start
    form = jax.eval_shape(start)
    rows = {part: _one_row(getattr(form, part)) for part in PARTS}
    store = RowStore(folder / "population", rows, num_clients)

    def hold() -> Held:
        state = start()
        first = {part: jax.tree.map(lambda x: x[0], getattr(state, part)) for part in PARTS}
        nobody = np.zeros(config.clients_per_round, np.int32)
        slots = np.full(num_clients, UNTOUCHED, np.uint8)
        return Held(state._replace(memory=(), weighing=()), first, nobody, slots, store)

    return hold


def on_disk(config: ConfigDict, num_clients: int) -> bool:
    """Whether the rows of clients lie on the disk.

    Args:
      config: `population`; `auto` takes the disk for more than `MOST_ON_DEVICE` clients of which
        some take part (`clients_per_round`).
      num_clients: K.
    """
    some = 0 < config.clients_per_round < num_clients
    large = config.population == "auto" and num_clients > MOST_ON_DEVICE
    return config.population == "disk" or (some and large)


MOST_ON_DEVICE = 1000  # clients, with population=auto
MOST_DRAWN = 1000  # rounds that are drawn beforehand, to know who will train


def check_population(config: ConfigDict, num_clients: int) -> None:
    """Raises ConfigError where rows on the disk do not go with what else is configured."""
    if config.population == "disk" and not 0 < config.clients_per_round < num_clients:
        raise ConfigError(
            f"config.population='disk' keeps clients off the device that sit out, but with "
            f"clients_per_round={config.clients_per_round} all {num_clients} take part: lower "
            "clients_per_round, or set population=device"
        )
    if not on_disk(config, num_clients):
        return
    refuse_ensemble(config.adaptations)


def refuse_ensemble(adaptations: Iterable[str]) -> None:
    """Raises ConfigError where an adaptation needs the models of all clients at once."""
    for text in adaptations:
        if text.partition(":")[0] == ensemble.__name__:
            raise ConfigError(
                f"config.adaptations has {brief(text)}, which holds the models of all clients at "
                "once, but those of this population lie on the disk: leave it out, or set "
                "population=device"
            )


def disk_note(
    config: ConfigDict,
    start: Callable[[], FederatedState | Held],
    cohort_of: Callable[[jax.Array], Cohort],
) -> str:
    """A sentence on the disk that the clients' rows will take; empty where they lie elsewhere.

    Args:
      config: the run's.
      start: as `start_held` returns it.
      cohort_of: who is drawn for a round i32[], and who of them takes part; traceable.

    Raises:
      ConfigError: the disk has not that much.
    """
    held = jax.eval_shape(start)
    if not isinstance(held, Held):
        return ""
    store, drawn = held.store, config.clients_per_round
    free, taken = _free_bytes(store.folder), store.taken_bytes()
    # Who has trained needs a row, and who will train follows from the seed.
    train = who_trains(cohort_of, store.num_clients, min(config.rounds, MOST_DRAWN))
    least = store.row_bytes * int(train.sum())
    most = store.row_bytes * min(drawn * config.rounds, SLOTS * store.num_clients)
    if max(0, least - taken) > free:
        raise ConfigError(
            f"the own parts of {store.num_clients:,} clients of {config.method}, "
            f"{_size(store.row_bytes)} each, will take {_size(least)} in {store.folder}, but its "
            f"disk has {_size(free)} free: give a --workdir on a larger disk, train fewer clients "
            "or rounds, or choose a smaller model or a method that remembers no model for a client"
        )
    return (
        f"{store.num_clients:,} clients, {_size(store.row_bytes)} each, lie in {store.folder}, "
        f"{drawn} at a time on the device; they will take {_size(least)} to {_size(most)} of "
        f"the disk, which has {_size(free)} free"
    )


def who_trains(
    cohort_of: Callable[[jax.Array], Cohort], num_clients: int, rounds: int
) -> jax.Array:
    """bool[N], who takes part in at least one of the first rounds, by `disk_note`'s `cohort_of`."""

    def also(number: jax.Array, train: jax.Array) -> jax.Array:
        cohort = cohort_of(number)
        present = True if cohort.participates is None else cohort.participates
        return train.at[cohort.client].max(present)

    def draw() -> jax.Array:
        return jax.lax.fori_loop(0, rounds, also, jnp.zeros(num_clients, bool))

    return jax.jit(draw)()


def protect_rows(folder: Path, state: FederatedState | Held) -> None:
    """Keeps the rows that a workdir's checkpoints name from being written to.

    Where there are no checkpoints, the files are made.

    Raises:
      WorkdirError: the files cannot be made.
    """
    if not isinstance(state, Held):
        return
    from fedjax_bn.run.files import checkpoint  # Orbax takes long to import

    named = {}
    for kind in ("latest", "selected"):
        with checkpoint.open_folder(folder / "checkpoints" / kind, keep=2) as manager:
            steps = by_first(lambda manager=manager: checkpoint.steps(manager))
            named[kind] = [_slots_of(manager, state, step) for step in steps]
    if not any(named.values()):
        by_first(state.store.make)
    state.store.going_on(
        {kind: [s for s in slots if s is not None] for kind, slots in named.items()}
    )


def _slots_of(manager: Any, like: Held, step: int) -> np.ndarray | None:
    from fedjax_bn.run.files import checkpoint

    try:
        return checkpoint.restore(manager, like, step).slots
    except CheckpointError:  # nobody can go on from it, so it names nothing
        return None


def keep_rows(kind: str, state: FederatedState | Held) -> None:
    """Before a checkpoint is saved: the disk has the rows that it names, and they stay."""
    if isinstance(state, Held):
        state.store.keep(kind, np.asarray(state.slots))


def num_clients(state: FederatedState | Held) -> int:
    """K, or N of a population."""
    return len(state.slots) if isinstance(state, Held) else state.weights.shape[0]


def rows_of_clients(held: Held, client: np.ndarray, parts: tuple[str, ...] = PARTS) -> dict:
    """part -> rows [C, ...] of some clients."""
    slots = np.asarray(held.slots)
    return {part: held.store.read(part, slots, client, held.first[part]) for part in parts}


def _one_row(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def _free_bytes(folder: Path) -> int:
    """Of the disk that a folder will lie on."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def _size(count: float) -> str:
    """Bytes for people."""
    for unit, power in (("GB", 30), ("MB", 20), ("KB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.3g} {unit}"
    return f"{count:.0f} bytes"
