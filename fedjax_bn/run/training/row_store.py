"""Rows of many clients in sparse files, of which only a cohort's are ever read.

A file is `.npy`, [slots, N] of records with a field for each array of a client (`numpy.load` with
`mmap_mode="r"` shows it). What was never written takes no disk. A client's new row is written to a
slot that no checkpoint names, so that the rows of every checkpoint stay as they are. A checkpoint
holds the slot of each client, u8[N]; whatever else was written before a kill is room for new rows.
"""

import io
import math
import os
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_bn.data.regular_files import Refused, open_regular
from fedjax_bn.run.errors import CheckpointError
from fedjax_bn.run.files.workdir import faults_named, sync

PyTree = Any
UNTOUCHED = 255  # the slot of a client that has no row yet
# Of checkpoints that a run can continue from: committed or being written.
_NAMED = {"latest": 3, "selected": 2}
SLOTS = sum(_NAMED.values()) + 1
_CHECK = "crc32"


class RowStore:
    """What N clients keep for themselves, in files of a folder, which is made when it is written.

    Only the owner of a workdir writes (`ownership.owned`). Rows that checkpoints name (`keep`) are
    never written to.

    Args:
      folder: for the files.
      parts: name -> one client's tree, of `jax.ShapeDtypeStruct`; a file each, unless it is empty.
      num_clients: N.
    """

    def __init__(self, folder: Path, parts: dict[str, PyTree], num_clients: int) -> None:
        self.folder, self.num_clients, self._parts = folder, num_clients, parts
        full = {part: like for part, like in parts.items() if jax.tree.leaves(like)}
        self._records = {part: _record_of(like) for part, like in full.items()}
        self._headers = {part: _header_of(one, num_clients) for part, one in self._records.items()}
        self._named = {kind: deque(maxlen=count) for kind, count in _NAMED.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of one client."""
        return sum(record.itemsize for record in self._records.values())

    def taken_bytes(self) -> int:
        """Returns the bytes of the disk that the files take now."""
        paths = [path for path in map(self._path, self._records) if path.exists()]
        return sum(path.stat().st_blocks * 512 for path in paths)

    def make(self) -> None:
        """Makes the files that are missing, which take no disk yet.

        Raises:
          WorkdirError: they cannot be made, or the file system allows no files of their size.
        """
        for part in self._records:
            path = self._path(part)
            if path.exists():
                continue
            partial = path.with_name(f".{path.name}.partial")
            with faults_named(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(partial, "wb") as file:
                    file.write(self._headers[part])
                    file.truncate(self._place(part, SLOTS, 0))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
            sync(path.parent)
            sync(path.parent.parent)

    def read(self, part: str, slots: np.ndarray, client: np.ndarray, first: PyTree) -> PyTree:
        """Returns the rows [C, ...] of some clients i[C], in one part.

        Args:
          part: its name.
          slots: u8[N].
          client: their numbers.
          first: the row of a client that has none yet, a tree without the leading axis.

        Raises:
          CheckpointError: a row is not what was written, or its file is gone.
        """
        like, path = self._parts[part], self._path(part)
        if part not in self._records:
            return like
        one = jax.tree.map(lambda leaf: np.asarray(leaf)[None], first)
        rows = np.repeat(_packed(one, self._records[part]), len(client))
        have = np.flatnonzero(slots[client] != UNTOUCHED)
        rows[have] = np.zeros((), rows.dtype)  # whose checksum is wrong, if the file ends before
        if len(have):
            try:
                with open_regular(path, math.inf) as file:
                    for row in have:
                        file.seek(self._place(part, slots[client[row]], client[row]))
                        file.readinto(_bytes_of(rows[row : row + 1]))
            except (OSError, Refused) as error:
                raise CheckpointError(
                    f"cannot read {path} ({error.strerror}), which holds rows that the checkpoints "
                    f"in {path.parents[1]} name: put it back, or give another --workdir"
                ) from error
        wrong = have[rows[have][_CHECK] != _checksums(rows[have])]
        if len(wrong):
            raise CheckpointError(
                f"the row of client number {client[wrong[0]]} in {path} is damaged: delete the "
                f"newest folder in {path.parents[1] / 'checkpoints' / 'latest'} and run again to "
                "continue from an earlier checkpoint, or give another --workdir"
            )
        names = [name for name in rows.dtype.names if name != _CHECK]
        leaves = [np.ascontiguousarray(rows[name]) for name in names]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def new_slots(self, slots: np.ndarray, client: np.ndarray) -> np.ndarray:
        """Returns the slots u8[N] once some clients i[C], unlike each other, have new rows.

        Theirs are the first ones that no checkpoint names.
        """
        taken = np.zeros((len(client), SLOTS), bool)
        for named in (one for several in self._named.values() for one in several):
            has = np.flatnonzero(named[client] != UNTOUCHED)
            taken[has, named[client[has]]] = True
        new = slots.copy()
        new[client] = taken.argmin(1).astype(np.uint8)
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
        self.make()
        for part, record in self._records.items():
            if part not in rows or not len(client):
                continue
            records, path = _packed(rows[part], record), self._path(part)
            with faults_named(path), open(path, "r+b") as file:
                for row, k in enumerate(client):
                    file.seek(self._place(part, slots[k], k))
                    file.write(_bytes_of(records[row : row + 1]))

    def keep(self, kind: str, slots: np.ndarray) -> None:
        """Waits until the disk has all rows, and keeps those that a checkpoint names.

        Args:
          kind: of checkpoint, latest or selected.
          slots: u8[N] that it holds or will hold.

        Raises:
          WorkdirError: they could not be written.
        """
        for path in map(self._path, self._records):
            if path.exists():
                sync(path)
        self._named[kind].append(np.array(slots))

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.npy"

    def _place(self, part: str, slot: int, client: int) -> int:
        """Returns the byte at which a row begins."""
        row = int(slot) * self.num_clients + int(client)
        return len(self._headers[part]) + self._records[part].itemsize * row


def _record_of(like: PyTree) -> np.dtype:
    """Returns the record of a client's arrays, one after the other, and their checksum."""
    leaves = jax.tree.leaves_with_path(like)
    fields = [(jax.tree_util.keystr(path), leaf.dtype, leaf.shape) for path, leaf in leaves]
    return np.dtype([*fields, (_CHECK, np.uint32)])


def _header_of(record: np.dtype, num_clients: int) -> bytes:
    """Returns the beginning of a `.npy` file."""
    file, form = io.BytesIO(), np.lib.format.dtype_to_descr(record)
    about = {"descr": form, "fortran_order": False, "shape": (SLOTS, num_clients)}
    np.lib.format.write_array_header_2_0(file, about)
    return file.getvalue()


def _packed(rows: PyTree, record: np.dtype) -> np.ndarray:
    """Returns records [C] of arrays [C, ...], with their checksums."""
    leaves = jax.tree.leaves(rows)
    records = np.zeros(len(leaves[0]), record)
    for name, leaf in zip(record.names, leaves, strict=False):  # without the checksum
        records[name] = leaf
    records[_CHECK] = _checksums(records)
    return records


def _bytes_of(records: np.ndarray) -> np.ndarray:
    """Returns the records' own memory as u8[n]."""
    return records.view(np.uint8).reshape(-1)


def _checksums(records: np.ndarray) -> np.ndarray:
    size = records.dtype.itemsize - np.dtype(np.uint32).itemsize
    rows = _bytes_of(records).reshape(len(records), records.dtype.itemsize)
    return np.array([zlib.crc32(row[:size]) for row in rows], np.uint32)
