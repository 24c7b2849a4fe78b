"""Test samples of some clients as batches on the device, as `run.scoring` reads them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.domain import Split, select

PyTree = Any


class TestData(NamedTuple):
    """Test samples of some clients as batches, none of which mixes two clients.

    Clients of one domain may test on the same batches, so T client batches point to U stored ones.

    Attributes:
      images: u8[U, B, H, W, C] or f32[U, B, F].
      labels: i32[U, B], or a tree of arrays [U, B, ...].
      valid: bool[U, B].
      client: i32[T], whose batch it is.
      batch: i32[T], which of the U stored ones it is.
    """

    images: jax.Array
    labels: PyTree
    valid: jax.Array
    client: jax.Array
    batch: jax.Array


def stack_batches(splits: Sequence[Split], batch_size: int) -> TestData:
    """Cuts each client's split into batches in order, the last one padded, and stacks them all.

    A split that several clients have (the same object) is stored once.
    """
    batch_size = min(batch_size, max(len(split.images) for split in splits))
    places = batch_places(splits, batch_size)
    stored = list(dict.fromkeys((id(split), start) for _, split, start in places))
    number = {place: i for i, place in enumerate(stored)}
    by_id = {id(split): split for split in splits}
    batches = [read_batch(by_id[name], start, batch_size) for name, start in stored]
    images, labels, valid = jax.tree.map(lambda *parts: np.stack(parts), *batches)
    client = np.array([k for k, _, _ in places], np.int32)
    batch = np.array([number[id(split), start] for _, split, start in places], np.int32)
    return jax.tree.map(jnp.asarray, TestData(images, labels, valid, client, batch))


def batch_places(splits: Sequence[Split], batch_size: int) -> list[tuple[int, Split, int]]:
    """(client, its split, number of the first sample) of every batch, client after client."""
    return [
        (k, split, start)
        for k, split in enumerate(splits)
        for start in range(0, len(split.images), batch_size)
    ]


def read_batch(split: Split, start: int, batch_size: int) -> tuple[np.ndarray, PyTree, np.ndarray]:
    """Images [B, ...], labels [B, ...] and valid bool[B] from a sample on, zeros behind the last.

    Whole numbers among the labels become i32.
    """
    images = np.asarray(split.images[start : start + batch_size])
    count = len(images)

    def padded(rows: np.ndarray) -> np.ndarray:
        return np.pad(rows, [(0, batch_size - count)] + [(0, 0)] * (rows.ndim - 1))

    def label(rows: np.ndarray) -> np.ndarray:
        part = np.asarray(rows[start : start + batch_size])
        return padded(part.astype(np.int32) if np.issubdtype(part.dtype, np.integer) else part)

    return padded(images), jax.tree.map(label, split.labels), np.arange(batch_size) < count


def as_stream(split: Split, batch_size: int, order: int = 0) -> TestData:
    """A client's samples as one stream of batches, the last one padded.

    Args:
      split: the samples.
      batch_size: at least 1.
      order: as in `in_order`.
    """
    return stack_batches([in_order(split, order)], batch_size)


def in_order(split: Split, order: int) -> Split:
    """The split in the random order of a seed.

    -1 leaves it in the order in which it lies, often sorted by class, which no tracked or batch
    statistics bear.
    """
    if order < 0:
        return split
    return select(split, np.random.default_rng(order).permutation(len(split.images)))
