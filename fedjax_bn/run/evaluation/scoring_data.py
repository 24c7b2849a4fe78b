"""Test samples of clients as batches on the device, and the order in which samples are tested."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.data.domain import Split, select
from fedjax_bn.data.rows import Rows
from fedjax_bn.data.sets.folders import is_image
from fedjax_bn.engine.devices import CLIENTS, padded
from fedjax_bn.run.processes.mesh import over_all, place_rows

PyTree = Any


class TestData(NamedTuple):
    """Test samples of some clients as batches, none of which mixes two clients.

    Clients of one domain may test on the same batches, so T client batches point to U stored ones.

    Attributes:
      images: u8[U, B, H, W, C] or f32[U, B, F].
      labels: i32[U, B], or a tree of arrays [U, B, ...].
      valid: bool[U, B].
      client: i32[T], whose batch it is; -1 for padding, which counts for nothing.
      batch: i32[T], which of the batches stored on its device it is.
    """

    images: jax.Array
    labels: PyTree
    valid: jax.Array
    client: jax.Array
    batch: jax.Array


Place = tuple[int, Split, int]  # of a batch: client, its split, number of the first sample


def stack_batches(
    splits: Sequence[Split], batch_size: int, mesh: Mesh | None = None, by_client: bool = True
) -> TestData:
    """Cuts each client's split into batches in order, the last one padded, and stacks them all.

    A split that several clients have (the same object) is stored once, on each device.

    Args:
      splits: of the clients.
      batch_size: B at most.
      mesh: the devices over which the batches are shared out; None for one.
      by_client: as in `shared_out`.
    """
    batch_size = min(batch_size, max(len(split.images) for split in splits))
    parts = shared_out(batch_places(splits, batch_size), len(splits), mesh, by_client)
    stored = [list(dict.fromkeys((id(split), start) for _, split, start in part)) for part in parts]
    by_id, width = {id(split): split for split in splits}, max(map(len, stored))
    length, over = max(map(len, parts)), None if mesh is None else over_all(mesh)

    def read(start: int, stop: int) -> tuple:
        here = [(by_id[name], first) for name, first in stored[start // width]]
        here += [(splits[0], len(splits[0].images))] * (stop - start - len(here))
        batches = [read_batch(split, first, batch_size) for split, first in here]
        return jax.tree.map(lambda *rows: np.stack(rows), *batches)

    def point(start: int, stop: int) -> tuple[np.ndarray, ...]:
        part = parts[start // length]
        number = {place: i for i, place in enumerate(stored[start // length])}
        found = [(k, number[id(split), start]) for k, split, start in part]
        found += [(-1, 0)] * (stop - start - len(part))
        return tuple(np.array(column, np.int32) for column in zip(*found, strict=True))

    images, labels, valid = place_rows(read, len(parts) * width, over)
    return TestData(images, labels, valid, *place_rows(point, len(parts) * length, over))


def blocks_of_tests(
    splits: Sequence[Split], batch_size: int, length: int, rows: int, mesh: Mesh | None = None
) -> Iterator[TestData]:
    """Yields test batches on the device in blocks of one shape, whatever the clients have.

    Args:
      splits: of the clients.
      batch_size: B.
      length: batches of a block, on each device; the last block ends with empty ones.
      rows: of the state that answers, at least one per client.
      mesh: the devices over which these rows are shared out; None for one.
    """
    parts = shared_out(batch_places(splits, batch_size), rows, mesh, by_client=True)
    over = None if mesh is None else over_all(mesh)
    for start in range(0, max(map(len, parts)), length):

        def read(first: int, stop: int, start: int = start) -> TestData:
            some = parts[first // length][start : start + length]
            nothing = (0, splits[0], len(splits[0].images))
            filled = some + [nothing] * (stop - first - len(some))
            batches = [read_batch(split, place, batch_size) for _, split, place in filled]
            images, labels, valid = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
            client = np.array([k for k, _, _ in filled], np.int32)
            return TestData(images, labels, valid, client, np.arange(length, dtype=np.int32))

        yield place_rows(read, len(parts) * length, over)


def shared_out(
    places: Sequence[Place], num_clients: int, mesh: Mesh | None, by_client: bool
) -> list[list[Place]]:
    """Returns the batches of each device.

    Args:
      places: of all batches.
      num_clients: K.
      mesh: None for one device.
      by_client: whether a client's batches go to the device with its row of the state, in turn
        where several devices have it; else all devices get as many, in order.
    """
    if mesh is None:
        return [list(places)]
    if not by_client:
        size = -(-len(places) // mesh.size)
        return [list(places[d * size : (d + 1) * size]) for d in range(mesh.size)]
    each = padded(num_clients, mesh) // mesh.shape[CLIENTS]
    parts: list[list[Place]] = [[] for _ in range(mesh.size)]
    beside = mesh.size // mesh.shape[CLIENTS]
    for number, place in enumerate(places):
        parts[place[0] // each * beside + number % beside].append(place)
    return parts


def batch_places(splits: Sequence[Split], batch_size: int) -> list[Place]:
    """Returns (client, its split, number of the first sample) of every batch, by client."""
    return [
        (k, split, start)
        for k, split in enumerate(splits)
        for start in range(0, len(split.images), batch_size)
    ]


def read_batch(split: Split, start: int, batch_size: int) -> tuple[np.ndarray, PyTree, np.ndarray]:
    """Returns images [B, ...], labels [B, ...] and valid bool[B] from a sample on.

    Zeros fill the batch after the last sample. Whole numbers among the labels become i32.
    """
    images = np.asarray(split.images[start : start + batch_size])
    count = len(images)

    def fill(rows: np.ndarray) -> np.ndarray:
        return np.pad(rows, [(0, batch_size - count)] + [(0, 0)] * (rows.ndim - 1))

    def label(rows: np.ndarray) -> np.ndarray:
        part = np.asarray(rows[start : start + batch_size])
        return fill(part.astype(np.int32) if np.issubdtype(part.dtype, np.integer) else part)

    return fill(images), jax.tree.map(label, split.labels), np.arange(batch_size) < count


def as_stored(split: Split) -> Split:
    """Returns the split in the order of storage, in which `predict` reads the same samples.

    Image files come in the order of their paths, rows of an array in that of the array; any others
    keep their order.
    """
    images, _, names = split
    if names is not None and len(names) and is_image(str(names[0])):
        paths = [str(name).split("/") for name in names]
        return select(split, np.array(sorted(range(len(paths)), key=paths.__getitem__)))
    if isinstance(images, Rows):
        return select(split, np.argsort(images.index, kind="stable"))
    return split


def in_order(split: Split, order: int) -> Split:
    """Returns a split in the random order of a seed, see `adaptation.choice`; -1 keeps it."""
    return split if order < 0 else select(split, places_in_order(len(split.images), order))


def places_in_order(count: int, order: int) -> np.ndarray:
    """Returns i64[N]: which of N samples comes when, in the order of `in_order`."""
    return np.arange(count) if order < 0 else np.random.default_rng(order).permutation(count)
