"""A population: far more clients than take part in a round, whose own parts are on the disk.

`config.population` chooses where the clients' own parts of the state are kept (personal leaves,
method memory, what a weighing rule remembers). On the device each client has a row. On the disk a
`RowStore` has them, and a run carries a `Held`, not a `FederatedState`.
"""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn.adaptation import ensemble
from fedjax_bn.arguments.text import brief
from fedjax_bn.federation import FederatedState
from fedjax_bn.run.errors import CheckpointError, ConfigError
from fedjax_bn.run.processes.together import by_first
from fedjax_bn.run.training.row_store import SLOTS, UNTOUCHED, RowStore

PyTree = Any
# A client's own part, by files of its own: evaluation reads personal leaves alone.
PARTS = ("personal", "memory", "weighing")
_MOST_ON_DEVICE = 1000  # clients, with population=auto


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

    # Readers of a federation's state find these here: a federation of one client.
    round = property(lambda self: self.state.round)
    shared = property(lambda self: self.state.shared)
    server = property(lambda self: self.state.server)
    weights = property(lambda self: self.state.weights)
    personal = property(lambda self: self.state.personal)
    memory = property(lambda self: jax.tree.map(lambda leaf: leaf[None], self.first["memory"]))


def start_held(
    config: ConfigDict, start: Callable[[], FederatedState], folder: Path, num_clients: int
) -> Callable[[], FederatedState | Held]:
    """Returns `start`, or a function that makes the first `Held` if rows are kept on the disk.

    Args:
      config: the run's.
      start: makes the first state, of one client if rows are kept on the disk.
      folder: the workdir.
      num_clients: N.
    """
    if not on_disk(config, num_clients):
        return start
    form = jax.eval_shape(start)
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
        {part: getattr(form, part) for part in PARTS},
    )
    store = RowStore(folder / "population", rows, num_clients)

    def hold() -> Held:
        state = start()
        first = {part: jax.tree.map(lambda x: x[0], getattr(state, part)) for part in PARTS}
        nobody = np.zeros(config.clients_per_round, np.int32)
        slots = np.full(num_clients, UNTOUCHED, np.uint8)
        return Held(state._replace(memory=(), weighing=()), first, nobody, slots, store)

    return hold


def on_disk(config: ConfigDict, num_clients: int) -> bool:
    """Returns whether the rows of clients are kept on the disk.

    Args:
      config: `population`; `auto` takes the disk for more than 1000 clients if some of them sit
        out (`clients_per_round`).
      num_clients: K.
    """
    some = 0 < config.clients_per_round < num_clients
    large = config.population == "auto" and num_clients > _MOST_ON_DEVICE
    return config.population == "disk" or (some and large)


def check_population(config: ConfigDict, num_clients: int) -> None:
    """Raises ConfigError if rows on the disk do not go with what else is configured."""
    if config.population == "disk" and not 0 < config.clients_per_round < num_clients:
        raise ConfigError(
            f"config.population='disk' keeps clients off the device that sit out, but with "
            f"clients_per_round={config.clients_per_round} all {num_clients} take part: lower "
            "clients_per_round, or set population=device"
        )
    if on_disk(config, num_clients):
        refuse_ensemble(config.adaptations)


def refuse_ensemble(adaptations: Iterable[str]) -> None:
    """Raises ConfigError if an adaptation needs the models of all clients at once."""
    for text in adaptations:
        if text.partition(":")[0] == ensemble.__name__:
            raise ConfigError(
                f"config.adaptations has {brief(text)}, which holds the models of all clients at "
                "once, but those of this population are on the disk: leave it out, or set "
                "population=device"
            )


def disk_note(config: ConfigDict, start: Callable[[], FederatedState | Held]) -> str:
    """Returns a message on the disk that the clients' rows will take; "" without such rows.

    Args:
      config: the run's.
      start: as `start_held` returns it.

    Raises:
      ConfigError: the disk has less.
    """
    held = jax.eval_shape(start)
    if not isinstance(held, Held):
        return ""
    store, drawn, total = held.store, config.clients_per_round, held.store.num_clients
    place = store.folder.absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    # How many will have trained, on average, if all are drawn alike; each needs a row.
    least = store.row_bytes * total * (1 - (1 - drawn / total) ** config.rounds)
    most = store.row_bytes * min(drawn * config.rounds, SLOTS * total)
    if max(0, least - store.taken_bytes()) > free:
        raise ConfigError(
            f"the own parts of {total:,} clients of {config.method}, {_size(store.row_bytes)} "
            f"each, will take {_size(least)} in {store.folder}, but its disk has {_size(free)} "
            "free: give a --workdir on a larger disk, train fewer clients or rounds, or choose a "
            "smaller model or a method that remembers no model for a client"
        )
    return (
        f"{total:,} clients, {_size(store.row_bytes)} each, are kept in {store.folder}, {drawn} at "
        f"a time on the device; they will take {_size(least)} to {_size(most)} of the disk, which "
        f"has {_size(free)} free"
    )


def _size(count: float) -> str:
    """Returns bytes as people write them."""
    for unit, power in (("GB", 30), ("MB", 20), ("KB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.3g} {unit}"
    return f"{count:.0f} bytes"


def protect_rows(folder: Path, state: FederatedState | Held) -> None:
    """Keeps the rows that a workdir's checkpoints name from being written to.

    If there are no checkpoints, the files are made.

    Raises:
      WorkdirError: the files cannot be made.
    """
    if not isinstance(state, Held):
        return
    from fedjax_bn.run.files import checkpoint  # Orbax takes long to import

    none = True
    for kind in ("latest", "selected"):
        with checkpoint.open_folder(folder / "checkpoints" / kind, keep=2) as manager:
            for step in by_first(functools.partial(checkpoint.steps, manager)):
                none = False
                with suppress(CheckpointError):  # no run can continue from it
                    state.store.keep(kind, checkpoint.restore(manager, state, step).slots)
    if none:
        by_first(state.store.make)


def keep_rows(kind: str, state: FederatedState | Held) -> None:
    """Waits, before a checkpoint is saved, until the disk has the rows that it names."""
    if isinstance(state, Held):
        state.store.keep(kind, state.slots)


def num_clients(state: FederatedState | Held) -> int:
    """Returns K, or N of a population."""
    return len(state.slots) if isinstance(state, Held) else state.weights.shape[0]


def rows_of_clients(held: Held, client: np.ndarray, parts: tuple[str, ...] = PARTS) -> dict:
    """Returns part -> rows [C, ...] of some clients."""
    slots = np.asarray(held.slots)
    return {part: held.store.read(part, slots, client, held.first[part]) for part in parts}
