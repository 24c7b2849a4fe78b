"""Data that do not fit on the device: batches read on the host by `grain`, in parallel and ahead.

What is read when is a pure function of the round, so a run that was stopped goes on exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.data.domain import Split
from fedjax_bn.data.label_trees import stored
from fedjax_bn.data.sampling import Draw
from fedjax_bn.engine.batches import Batches
from fedjax_bn.run.evaluation.scoring_data import TestData, batch_places, read_batch, shared_out
from fedjax_bn.run.processes.mesh import over_all, own_rows

_THREADS = 8


def _import_grain() -> Any:
    """The package `grain`.

    Raises:
      ImportError: it is not installed.
    """
    try:
        import grain
    except ImportError as error:
        raise ImportError(
            "data larger than data.device_megabytes are streamed by grain, which is not installed: "
            "pip install 'fedjax_bn[data]', or raise data.device_megabytes"
        ) from error
    return grain


def megabytes(splits: Sequence[Split]) -> float:
    """Memory of the samples of all splits as they are stored, a shared one counted once."""
    return sum(split.images.nbytes for split in {id(s): s for s in splits}.values()) / 2**20


def stream_rounds(
    splits: Sequence[Split],
    draw: Callable[[int], tuple[jax.Array, Draw]],
    first: int,
    rounds: int,
    own: Sequence[int] | None = None,
) -> Iterator[Batches]:
    """The batches of rounds `first` to `rounds` - 1, as NumPy arrays.

    They are those that the device-resident way gathers: same samples, same order. While a round
    trains, the next one is read.

    Args:
      splits: training samples of the K clients.
      draw: `draw(round) -> (client i32[C], Draw)` says which samples of which clients, see
        `data.sampling`.
      first: rounds already done.
      rounds: of the whole run.
      own: which of the C rows are wanted; by default all. Of the others no sample is read.

    Yields:
      {"image": [C, S, B, ...], "label": i32[C, S, B] or a tree, "valid": bool[C, S, B],
      "size": i32[C]}. A row with a number that no client has is empty.
    """
    grain = _import_grain()
    drawn = lru_cache(2)(lambda number: jax.tree.map(np.asarray, draw(number)))
    given, steps, batch_size = drawn(first)[1].index.shape
    own = np.arange(given) if own is None else np.asarray(own)
    rows, form = len(own), splits[0].images
    sizes = np.array([*(len(split.images) for split in splits), 0], np.int32)

    def empty(leaf: np.ndarray) -> np.ndarray:
        return np.zeros((batch_size, *leaf.shape[1:]), stored(leaf))

    def read(place: int) -> dict[str, np.ndarray]:
        number, rest = divmod(place, rows * steps)
        row, step = own[rest // steps], rest % steps
        client, draw = drawn(number)
        index, valid = draw.index[row, step], draw.valid[row, step]
        if client[row] >= len(splits):
            images = np.zeros((batch_size, *form.shape[1:]), form.dtype)
            labels = jax.tree.map(empty, splits[0].labels)
            return {"image": images, "label": labels, "valid": valid}
        split, index = splits[client[row]], np.where(valid, index, 0)
        labels = jax.tree.map(partial(_valid_rows, index=index, valid=valid), split.labels)
        images = np.asarray(split.images[index])
        return {"image": images, "label": labels, "valid": valid}

    places = grain.MapDataset.range(first * rows * steps, rounds * rows * steps)
    batches = places.map(read).batch(rows * steps)
    options = grain.ReadOptions(
        num_threads=_THREADS, prefetch_buffer_size=max(2 * rows * steps, _THREADS)
    )
    for number, one in enumerate(batches.to_iter_dataset(options), first):
        yield jax.tree.map(lambda leaf: leaf.reshape(rows, steps, *leaf.shape[1:]), one) | {
            "size": sizes[np.minimum(drawn(number)[0][own], len(splits))]
        }


def _valid_rows(leaf: np.ndarray, index: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """leaf[index], zeros where `valid` bool[B] is False."""
    rows = leaf[index]
    return np.where(valid.reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0).astype(stored(leaf))


def stream_tests(
    splits: Sequence[Split],
    batch_size: int,
    limit_megabytes: float,
    mesh: Mesh | None = None,
    by_client: bool = True,
) -> Iterator[TestData]:
    """The batches of `stack_batches` in blocks of one shape, read ahead on the host.

    On a mesh a block holds those of this process's devices, one device's behind another's.
    """
    grain = _import_grain()
    batch_size = min(batch_size, max(len(split.images) for split in splits))
    parts = shared_out(batch_places(splits, batch_size), len(splits), mesh, by_client)
    own = [0] if mesh is None else own_rows(mesh.size, over_all(mesh)).tolist()
    longest, one = max(map(len, parts)), splits[0].images[:1].nbytes * batch_size / 2**20
    length = max(1, min(longest, int(limit_megabytes / 4 / max(one, 1e-9))))

    def read(number: int) -> TestData:
        block, rest = divmod(number, len(own) * length)
        device, position = own[rest // length], block * length + rest % length
        there = position < len(parts[device])
        # Behind the last batch any is read, and counts for nothing.
        client, split, start = parts[device][position] if there else (-1, splits[0], 0)
        images, labels, valid = read_batch(split, start, batch_size)
        client, batch = np.int32(client), np.int32(rest % length)
        return TestData(images, labels, valid & there, client, batch)

    size = len(own) * length
    numbers = grain.MapDataset.range(-(-longest // length) * size).map(read)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=max(2 * size, _THREADS))
    yield from numbers.batch(size).to_iter_dataset(options)
