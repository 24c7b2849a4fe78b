"""Data that do not fit on the device: batches read on the host by `grain`, in parallel and ahead.

What is read when is a pure function of the round, so a run that was stopped goes on exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from fedjax_bn.batches import Batches
from fedjax_bn.data.domain import Split
from fedjax_bn.data.label_trees import stored
from fedjax_bn.data.sampling import Draw
from fedjax_bn.run.scoring_data import TestData, batch_places, read_batch

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

    Yields:
      {"image": [C, S, B, ...], "label": i32[C, S, B] or a tree, "valid": bool[C, S, B],
      "size": i32[C]}.
    """
    grain = _import_grain()
    drawn = lru_cache(2)(lambda number: jax.tree.map(np.asarray, draw(number)))
    rows, steps, _ = drawn(first)[1].index.shape
    sizes = np.array([len(split.images) for split in splits], np.int32)

    def read(place: int) -> dict[str, np.ndarray]:
        number, rest = divmod(place, rows * steps)
        row, step = divmod(rest, steps)
        client, draw = drawn(number)
        index, valid = draw.index[row, step], draw.valid[row, step]
        split, index = splits[client[row]], np.where(valid, index, 0)
        labels = jax.tree.map(partial(_valid_rows, index=index, valid=valid), split.labels)
        images = np.asarray(split.images[index])
        return {"image": images, "label": labels, "valid": valid}

    places = grain.MapDataset.range(first * rows * steps, rounds * rows * steps)
    batches = places.map(read).batch(rows * steps)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=2 * rows * steps)
    for number, one in enumerate(batches.to_iter_dataset(options), first):
        yield jax.tree.map(lambda leaf: leaf.reshape(rows, steps, *leaf.shape[1:]), one) | {
            "size": sizes[drawn(number)[0]]
        }


def _valid_rows(leaf: np.ndarray, index: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """leaf[index], zeros where `valid` bool[B] is False."""
    rows = leaf[index]
    return np.where(valid.reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0).astype(stored(leaf))


def stream_tests(
    splits: Sequence[Split], batch_size: int, limit_megabytes: float
) -> Iterator[TestData]:
    """The batches of `stack_batches` in blocks of one shape, read ahead on the host."""
    grain = _import_grain()
    batch_size = min(batch_size, max(len(split.images) for split in splits))
    places = batch_places(splits, batch_size)
    one = splits[0].images[:1].nbytes * batch_size / 2**20
    length = max(1, min(len(places), int(limit_megabytes / 4 / max(one, 1e-9))))

    def read(number: int) -> TestData:
        client, split, start = places[min(number, len(places) - 1)]
        images, labels, valid = read_batch(split, start, batch_size)
        # Behind the last batch it is read again, and counts for nothing.
        return TestData(
            images, labels, valid & (number < len(places)), np.int32(client), np.int32(0)
        )

    numbers = grain.MapDataset.range(-(-len(places) // length) * length).map(read)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=2 * length)
    for block in numbers.batch(length).to_iter_dataset(options):
        yield block._replace(batch=np.arange(length, dtype=np.int32))
