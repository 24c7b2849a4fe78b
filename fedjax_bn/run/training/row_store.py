"""Rows of many clients in sparse files, of which only a cohort's are ever read.

A file is `.npy`, [slots, N] of records with a field for each array of a client (`numpy.load` with
`mmap_mode="r"` shows it). What was never written takes no disk. A client's new row goes to a slot
that no checkpoint names, so that the rows of every checkpoint stay as they are; a checkpoint holds
the slot of each client, u8[N]. The files know nothing else: whatever else was written before a kill
is room for new rows.
"""

import errno
import io
import math
import os
import zlib
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from fedjax_bn.data.regular_files import Refused, open_regular
from fedjax_bn.run.errors import CheckpointError, WorkdirError
from fedjax_bn.run.files.workdir import faults_named, sync

PyTree = Any
UNTOUCHED = 255  # the slot of a client that has no row yet
# Of checkpoints that one may go on from: committed or being written.
_NAMED = {"latest": 3, "selected": 2}
SLOTS = sum(_NAMED.values()) + 1
_CHECK = "crc32"


class RowStore:
    """What N clients keep for themselves, in files of a folder, which is made when it is written.

    Only the owner of a workdir writes (`ownership.owned`); after `going_on`, rows that checkpoints
    name are never written to.

    Args:
      folder: for the files.
      parts: name -> one client's tree, of `jax.ShapeDtypeStruct`; a file each, unless it is empty.
      num_clients: N.
    """

    def __init__(self, folder: Path, parts: dict[str, PyTree], num_clients: int) -> None:
        self.folder, self.num_clients = folder, num_clients
        self._parts = parts
        self._named = {kind: deque(maxlen=count) for kind, count in _NAMED.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of one client."""
        return sum(_record_of(part).itemsize for part in self._parts.values() if _has_leaves(part))

    def taken_bytes(self) -> int:
        """Bytes of the disk that the files take now."""
        paths = [path for path in map(self._path, self._parts) if path.exists()]
        return sum(path.stat().st_blocks * 512 for path in paths)

    def make(self) -> None:
        """Makes the files that are not there, which take no disk yet.

        Raises:
          WorkdirError: they cannot be made, or the file system takes none of their size.
        """
        for part in filter(lambda part: _has_leaves(self._parts[part]), self._parts):
            self._make(part)

    def read(self, part: str, slots: np.ndarray, client: np.ndarray, first: PyTree) -> PyTree:
        """The rows [C, ...] of some clients i[C], in one part.

        Args:
          part: its name.
          slots: u8[N].
          client: their numbers.
          first: the row of a client that has none yet, a tree without the leading axis.

        Raises:
          CheckpointError: a row is not what was written, or its file is gone.
          WorkdirError: the file cannot be read.
        """
        like, path = self._parts[part], self._path(part)
        if not _has_leaves(like):
            return like
        rows = np.repeat(_packed(jax.tree.map(lambda x: np.asarray(x)[None], first)), len(client))
        have = np.flatnonzero(slots[client] != UNTOUCHED)
        rows[have] = np.zeros((), rows.dtype)  # whose checksum is wrong, if the file ends before
        if len(have):
            if not path.exists():
                raise CheckpointError(
                    f"{path} is gone, which holds the rows that the checkpoints in "
                    f"{path.parents[1]} name: put it back, or give another --workdir"
                )
            try:
                with faults_named(path), open_regular(path, math.inf) as file:
                    for row in have:
                        file.seek(self._place(part, slots[client[row]], client[row]))
                        file.readinto(_bytes_of(rows[row : row + 1]))
            except Refused as error:
                raise CheckpointError(str(error)) from error
        _check(rows[have], client[have], path)
        return _unpacked(rows, like)

    def new_slots(self, slots: np.ndarray, client: np.ndarray) -> np.ndarray:
        """u8[N], where rows shall lie once those i[C] of some clients, unlike each other, are new.

        Theirs are slots that no checkpoint names.
        """
        new = slots.copy()
        new[client] = self._free(client)
        return new

    def write(self, slots: np.ndarray, client: np.ndarray, rows: dict[str, PyTree]) -> None:
        """Writes new rows of some clients.

        Args:
          slots: u8[N], as `new_slots` gives them.
          client: numbers i[C].
          rows: part -> tree of arrays [C, ...].

        Raises:
          WorkdirError: they could not be written.
        """
        for part, tree in rows.items():
            if not len(client) or not _has_leaves(self._parts[part]):
                continue
            records, path = _packed(tree), self._path(part)
            self._make(part)
            with faults_named(path), open(path, "r+b") as file:
                for row, k in enumerate(client):
                    file.seek(self._place(part, slots[k], k))
                    file.write(_bytes_of(records[row : row + 1]))

    def keep(self, kind: str, slots: np.ndarray) -> None:
        """Waits until the disk has all rows, and keeps those that a checkpoint is going to name.

        Args:
          kind: of checkpoint, latest or selected.
          slots: u8[N] that it will hold.

        Raises:
          WorkdirError: they could not be written.
        """
        for part in self._parts:
            if self._path(part).exists():
                sync(self._path(part))
        self._named[kind].append(slots.copy())

    def going_on(self, named: dict[str, list[np.ndarray]]) -> None:
        """Keeps the rows that a folder's checkpoints name: kind -> slots of each, oldest first."""
        for kind, all_slots in named.items():
            self._named[kind].extend(np.asarray(slots) for slots in all_slots)

    def _free(self, client: np.ndarray) -> np.ndarray:
        """u8[C]: for each client the first slot that no checkpoint names."""
        taken = np.zeros((len(client), SLOTS), bool)
        for slots in (one for several in self._named.values() for one in several):
            mine = slots[client]
            has = mine != UNTOUCHED
            taken[np.flatnonzero(has), mine[has]] = True
        return taken.argmin(1).astype(np.uint8)

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.npy"

    def _place(self, part: str, slot: int, client: int) -> int:
        """The byte at which a row begins."""
        size = _record_of(self._parts[part]).itemsize
        return len(_header(self._parts[part], self.num_clients)) + size * (
            int(slot) * self.num_clients + int(client)
        )

    def _make(self, part: str) -> None:
        """Makes the file of a part where there is none."""
        path = self._path(part)
        if path.exists():
            return
        partial = path.with_name(f".{path.name}.partial")
        with faults_named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb") as file:
                file.write(_header(self._parts[part], self.num_clients))
                _reserve(file, self._place(part, SLOTS, 0))
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        sync(path.parent)
        sync(path.parent.parent)


def _reserve(file: BinaryIO, size: int) -> None:
    """Gives a sparse file its size in bytes.

    Raises:
      WorkdirError: the file system takes no file of that size.
    """
    try:
        file.truncate(size)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise WorkdirError(
            f"{Path(file.name).parent} lies on a file system that takes no file of {size:,} bytes, "
            "which the rows of all clients may need: give a --workdir on another one, train fewer "
            "clients, or choose a smaller model"
        ) from error


def _has_leaves(tree: PyTree) -> bool:
    return bool(jax.tree.leaves(tree))


def _names(tree: PyTree) -> list[str]:
    """Names of the leaves, which differ."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _record_of(like: PyTree) -> np.dtype:
    """A client's arrays one after the other, and their checksum."""
    leaves = zip(_names(like), jax.tree.leaves(like), strict=True)
    return np.dtype([*((n, x.dtype, x.shape) for n, x in leaves), (_CHECK, np.uint32)])


def _header(like: PyTree, num_clients: int) -> bytes:
    """What a `.npy` file begins with."""
    file = io.BytesIO()
    form = np.lib.format.dtype_to_descr(_record_of(like))
    about = {"descr": form, "fortran_order": False, "shape": (SLOTS, num_clients)}
    np.lib.format.write_array_header_2_0(file, about)
    return file.getvalue()


def _packed(rows: PyTree) -> np.ndarray:
    """Records [C] of arrays [C, ...], with their checksums."""
    leaves = jax.tree.map(np.asarray, jax.tree.leaves(rows))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    records = np.zeros(len(leaves[0]), _record_of(like))
    for name, leaf in zip(_names(rows), leaves, strict=True):
        records[name] = leaf
    records[_CHECK] = _checksums(records)
    return records


def _unpacked(records: np.ndarray, like: PyTree) -> PyTree:
    """The arrays [C, ...] of records [C]."""
    leaves = [np.ascontiguousarray(records[name]) for name in _names(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _bytes_of(records: np.ndarray) -> np.ndarray:
    """The records' own memory as u8[n]."""
    return records.view(np.uint8).reshape(-1)


def _checksums(records: np.ndarray) -> list[int]:
    size = records.dtype.itemsize - np.dtype(np.uint32).itemsize
    rows = _bytes_of(records).reshape(len(records), -1)
    return [zlib.crc32(row[:size]) for row in rows]


def _check(records: np.ndarray, client: np.ndarray, path: Path) -> None:
    """Raises CheckpointError where a record's checksum is another one."""
    records = np.ascontiguousarray(records)
    wrong = np.flatnonzero(records[_CHECK] != _checksums(records)) if len(records) else ()
    if len(wrong):
        raise CheckpointError(
            f"the row of client number {client[wrong[0]]} in {path} is damaged: delete the newest "
            f"folder in {path.parents[1] / 'checkpoints' / 'latest'} and run again to go on from "
            "an earlier checkpoint, or give another --workdir"
        )
