"""Keeps the clients' own parts on the disk, for far more clients than take part in a round.

`config.population` chooses where the clients' own parts of the state are kept (personal leaves,
method memory, what a weighing rule remembers). On the device each client has a row. On the disk a
`RowStore` has the rows, and the run's state is a `Held`, not a `FederatedState`.

A client's new row is written to a slot that no checkpoint names, so that the rows of every
checkpoint stay as they are. A checkpoint holds the slot of each client, u8[N]. Rows that no
checkpoint names, such as those written before a kill, may be overwritten.
"""

import dataclasses
import functools
import shutil
import textwrap
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_bn.adaptation import ensemble
from fedjax_bn.arguments.errors import CheckpointError, ConfigError
from fedjax_bn.arguments.text import brief
from fedjax_bn.federation import FederatedState
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.workdir import faults_named, sync

PyTree = Any
# Each part has an array of its own in the store, because evaluation reads only personal leaves.
PARTS = ("personal", "memory", "weighing")
UNTOUCHED = 255  # the slot of a client that has no row yet
# How many checkpoints a run may continue from, committed or being written.
_NAMED = {"latest": 3, "selected": 2}
_SLOTS = sum(_NAMED.values()) + 1  # one more, so that a new row always has a free slot


class RowStore:
    """Stores the own parts of N clients in a folder, which is made when the first row is written.

    Each part is an array u8[slots, N, bytes] in tensorstore (zarr 3). Each row is a chunk: a file
    with a checksum, which gets its name once the disk has all of it. A client that has never
    trained has no file. Only the owner of a workdir writes (`ownership.owned`). Rows that
    checkpoints name (`keep`) are never overwritten.

    Args:
      folder: for the arrays.
      parts: name -> one client's tree of `jax.ShapeDtypeStruct`s; each that is not empty gets an
        array.
      num_clients: N.
    """

    def __init__(self, folder: Path, parts: dict[str, PyTree], num_clients: int) -> None:
        self.folder, self.num_clients, self._parts = folder, num_clients, parts
        leaves = {part: jax.tree.leaves(like) for part, like in parts.items()}
        self._records = {
            part: np.dtype([(str(i), leaf.dtype, leaf.shape) for i, leaf in enumerate(some)])
            for part, some in leaves.items()
            if some
        }
        self._named = {kind: deque(maxlen=count) for kind, count in _NAMED.items()}
        self.row_bytes = sum(record.itemsize for record in self._records.values())  # of a client

    def taken_bytes(self) -> int:
        """Returns how many bytes of the disk the rows take now."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*"))

    def read(self, part: str, slots: np.ndarray, client: np.ndarray, first: PyTree) -> PyTree:
        """Returns the rows [C, ...] of some clients, in one part.

        Args:
          part: the part's name.
          slots: u8[N], the slot of each client.
          client: i[C], the numbers of the clients.
          first: the row of a client that has not trained yet, a tree without the leading axis.

        Raises:
          CheckpointError: a row is damaged, its file is missing, or an earlier version wrote it.
        """
        if part not in self._records:
            return self._parts[part]
        one = jax.tree.map(lambda leaf: np.asarray(leaf)[None], first)
        rows = np.repeat(self._packed(part, one), len(client), axis=0)
        have = np.flatnonzero(slots[client] != UNTOUCHED)
        if len(have):
            place, old = self.folder / part, self.folder / f"{part}.npy"
            numbers = slots[client[have]].astype(int), client[have].astype(int)
            files = [place / f"c.{slot}.{number}.0" for slot, number in zip(*numbers, strict=True)]
            if old.exists() and not all(path.exists() for path in files):
                raise CheckpointError(
                    f"{old} holds rows of clients in the form of an earlier version, which this "
                    "one cannot read: continue with the version that began the run, or give "
                    "another --workdir"
                )
            try:
                for path in files:  # tensorstore would never return from a named pipe
                    if path.exists() and not path.is_file():
                        raise ValueError(f"{path} must be a regular file")
                rows[have] = self._open(part).vindex[numbers].read().result()
            except (ValueError, OSError) as error:
                raise CheckpointError(
                    f"cannot read rows of clients in {place}, which the checkpoints in "
                    f"{self.folder.parent} name ({textwrap.shorten(str(error), 200)}): put them "
                    f"back, delete the newest folder in {self.folder.parent}/checkpoints/latest "
                    "to continue from an earlier checkpoint, or give another --workdir"
                ) from error
        records = rows.view(self._records[part])[:, 0]
        leaves = [np.ascontiguousarray(records[name]) for name in records.dtype.names]
        return jax.tree.unflatten(jax.tree.structure(self._parts[part]), leaves)

    def new_slots(self, slots: np.ndarray, client: np.ndarray) -> np.ndarray:
        """Returns the slots u8[N] after some clients i[C], all different, get new rows.

        Each of them gets the first slot in which no checkpoint names a row of this client.
        """
        taken = np.zeros((len(client), _SLOTS), bool)
        for named in (one for several in self._named.values() for one in several):
            has = np.flatnonzero(named[client] != UNTOUCHED)
            taken[has, named[client[has]]] = True
        new = slots.copy()
        new[client] = taken.argmin(1).astype(np.uint8)
        return new

    def write(self, slots: np.ndarray, client: np.ndarray, rows: dict[str, PyTree]) -> None:
        """Writes new rows of some clients, and waits until the disk has them.

        Args:
          slots: u8[N], as `new_slots` gives them.
          client: numbers i[C].
          rows: part -> tree of arrays [C, ...].

        Raises:
          WorkdirError: the rows could not be written.
        """
        for part in self._records.keys() & rows.keys() if len(client) else ():
            place, numbers = self.folder / part, (slots[client].astype(int), client.astype(int))
            with faults_named(place):
                if not place.exists():
                    place.mkdir(parents=True)
                    # tensorstore syncs only the names in its own folder.
                    sync(self.folder)
                    sync(self.folder.parent)
                try:
                    data = self._packed(part, rows[part])
                    self._open(part, create=True).vindex[numbers].write(data).result()
                except ValueError as error:  # tensorstore raises system errors as this
                    raise OSError(textwrap.shorten(str(error), 200)) from error

    def keep(self, kind: str, slots: np.ndarray) -> None:
        """Protects the rows that a checkpoint names from being overwritten.

        Args:
          kind: of checkpoint, latest or selected.
          slots: u8[N] that the checkpoint holds or will hold.
        """
        self._named[kind].append(np.array(slots))

    def _open(self, part: str, create: bool = False) -> Any:
        """Returns the array of a part in tensorstore."""
        import tensorstore  # comes with Orbax, and takes long to import

        size = self._records[part].itemsize
        chunks = {"name": "regular", "configuration": {"chunk_shape": [1, 1, size]}}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str((self.folder / part).absolute())},
            "metadata": {
                "shape": [_SLOTS, self.num_clients, size],
                "data_type": "uint8",
                "chunk_grid": chunks,
                # Files c.SLOT.CLIENT.0; by default each would be in a folder of its own.
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
                "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
            },
            # A missing row is an error, so rows of zeros need files too.
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
            "context": {"file_io_sync": True},  # a write ends when the disk has it
        }
        return tensorstore.open(spec, open=True, create=create).result()

    def _packed(self, part: str, rows: PyTree) -> np.ndarray:
        """Returns u8[C, bytes] of arrays [C, ...], one array after the other."""
        leaves = jax.tree.leaves(rows)
        records = np.zeros(len(leaves[0]), self._records[part])
        for name, leaf in zip(records.dtype.names, leaves, strict=True):
            records[name] = leaf
        return records.view(np.uint8).reshape(len(records), -1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("state", "first", "client", "slots"),
    meta_fields=("store",),
)
@dataclasses.dataclass(frozen=True)
class Held:
    """The state that a population's run carries between rounds and saves in its checkpoints.

    Attributes:
      state: all that is not kept per client, as the state of a federation of one client. Its
        personal leaves are the mean over the last round in which any client counted, which an
        unseen client receives.
      first: part -> the row that a client has before it trains, a tree without leading axis.
      client: i32[C], the clients drawn in the last round.
      slots: u8[N], where in the store each client's row is; 255 for one that has never trained.
      store: the rows.
    """

    state: FederatedState
    first: dict[str, PyTree]
    client: np.ndarray
    slots: np.ndarray
    store: RowStore

    # Code that reads a `FederatedState` finds these fields here, as of a federation of one.
    round = property(lambda self: self.state.round)
    shared = property(lambda self: self.state.shared)
    frozen = property(lambda self: self.state.frozen)
    server = property(lambda self: self.state.server)
    weights = property(lambda self: self.state.weights)
    personal = property(lambda self: self.state.personal)
    memory = property(lambda self: jax.tree.map(lambda leaf: leaf[None], self.first["memory"]))


def start_held(
    experiment: Experiment, start: Callable[[], FederatedState], folder: Path
) -> Callable[[], FederatedState | Held]:
    """Returns `start`, or a function that makes the first `Held` if rows are kept on the disk.

    In that case `start` must make a state of one client, and the rows are kept in `folder`.
    """
    if not experiment.participation.on_disk:
        return start
    num_clients = len(experiment.internal.domains)

    def first_rows(state: FederatedState) -> dict[str, PyTree]:
        return {part: jax.tree.map(lambda x: x[0], getattr(state, part)) for part in PARTS}

    rows = jax.eval_shape(lambda: first_rows(start()))
    store = RowStore(folder / "population", rows, num_clients)

    def hold() -> Held:
        state = start()
        first = first_rows(state)
        client = np.zeros(experiment.participation.drawn, np.int32)
        slots = np.full(num_clients, UNTOUCHED, np.uint8)
        return Held(state._replace(memory=(), weighing=()), first, client, slots, store)

    return hold


def refuse_ensemble(adaptations: Iterable[str]) -> None:
    """Raises ConfigError if an adaptation needs the models of all clients at once."""
    for text in adaptations:
        if text.partition(":")[0] == ensemble.__name__:
            raise ConfigError(
                f"config.adaptations has {brief(text)}, which holds the models of all clients at "
                "once, but those of this population are on the disk: leave it out, or set "
                "population=device"
            )


def disk_note(experiment: Experiment, start: Callable[[], FederatedState | Held]) -> str:
    """Returns a message on how much disk the clients' rows will take; "" without such rows.

    `start` is what `start_held` returns.

    Raises:
      ConfigError: the disk has too little room.
    """
    held = jax.eval_shape(start)
    if not isinstance(held, Held):
        return ""
    store, rounds = held.store, experiment.plan.rounds
    drawn, total = experiment.participation.drawn, store.num_clients
    place, size = store.folder.absolute(), _size(store.row_bytes)
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    # The expected number of clients that will have trained, if drawn uniformly; each needs a row.
    least = store.row_bytes * total * (1 - (1 - drawn / total) ** rounds)
    most = store.row_bytes * min(drawn * rounds, _SLOTS * total)
    if max(0, least - store.taken_bytes()) > free:
        raise ConfigError(
            f"the own parts of {total:,} clients of {experiment.plan.method}, {size} each, will "
            f"take {_size(least)} in {store.folder}, but its disk has {_size(free)} free: give a "
            "--workdir on a larger disk, train fewer clients or rounds, or choose a smaller model "
            "or a method that remembers no model for a client"
        )
    return (
        f"{total:,} clients, {size} each, are kept in {store.folder}, {drawn} at a time on the "
        f"device; they will take {_size(least)} to {_size(most)} of the disk, which has "
        f"{_size(free)} free"
    )


def _size(count: float) -> str:
    """Returns bytes as people write them."""
    for unit, power in (("GB", 30), ("MB", 20), ("KB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.3g} {unit}"
    return f"{count:.0f} bytes"


def num_clients(state: FederatedState | Held) -> int:
    """Returns the number of clients, K, or N of a population."""
    return len(state.slots) if isinstance(state, Held) else state.weights.shape[0]


def rows_of_clients(held: Held, client: np.ndarray, parts: tuple[str, ...] = PARTS) -> dict:
    """Returns part -> rows [C, ...] of some clients."""
    slots = np.asarray(held.slots)
    return {part: held.store.read(part, slots, client, held.first[part]) for part in parts}
