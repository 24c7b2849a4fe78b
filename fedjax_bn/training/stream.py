"""Streams data that do not fit on the device: `grain` reads batches in parallel and ahead.

The batches of a round are a pure function of its number, so a stopped run continues exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import jax
import numpy as np

from fedjax_bn.data.domain import Split
from fedjax_bn.data.label_trees import stored
from fedjax_bn.data.sampling import Draw, label_forms
from fedjax_bn.engine.batches import Batches

_THREADS = 8


def megabytes(splits: Sequence[Split]) -> float:
    """Returns the megabytes of the samples of all splits; a shared split is counted once."""
    return sum(split.images.nbytes for split in {id(s): s for s in splits}.values()) / 2**20


def forms_of(split: Split, place: tuple[int, ...]) -> Batches:
    """Returns the forms (`jax.ShapeDtypeStruct`) [*place, ...] of batches from such a split."""
    image = jax.ShapeDtypeStruct((*place, *split.images.shape[1:]), split.images.dtype)
    label, valid = label_forms(split, place), jax.ShapeDtypeStruct(place, bool)
    return {"image": image, "label": label, "valid": valid}


def stream_rounds(
    splits: Sequence[Split],
    draw: Callable[[int], tuple[jax.Array, Draw]],
    start_round: int,
    rounds: int,
    row_numbers: Sequence[int] | None = None,
) -> Iterator[Batches]:
    """Yields the batches of rounds `start_round` to `rounds` - 1, as NumPy arrays.

    The samples and their order are the same as for data on the device. While a round trains, the
    next one is read.

    Args:
      splits: training samples of the K clients.
      draw: `draw(round) -> (client i32[C], Draw)` chooses samples and their clients, see
        `data.sampling`.
      start_round: rounds already done.
      rounds: of the whole run.
      row_numbers: which of the C rows to read; by default all.

    Yields:
      {"image": [C, S, B, ...], "label": i32[C, S, B] or a tree, "valid": bool[C, S, B],
      "size": i32[C]}. A row whose number is not that of a client is empty.

    Raises:
      ImportError: grain is not installed.
    """
    try:
        import grain
    except ImportError as error:
        raise ImportError(
            "data larger than data.device_megabytes are streamed by grain, which is not installed: "
            "pip install 'fedjax_bn[data]', or raise data.device_megabytes"
        ) from error
    # Two rounds, because samples of the next one are read before all of this one are taken.
    drawn = lru_cache(2)(lambda number: jax.tree.map(np.asarray, draw(number)))
    drawn_rows, steps, batch_size = drawn(start_round)[1].index.shape
    row_numbers = np.arange(drawn_rows) if row_numbers is None else np.asarray(row_numbers)
    count = len(row_numbers) * steps  # batches of a round
    sizes = np.array([*(len(split.images) for split in splits), 0], np.int32)
    nothing = jax.tree.map(
        lambda form: np.zeros(form.shape, form.dtype), forms_of(splits[0], (batch_size,))
    )

    def read(place: int) -> Batches:
        number, position = divmod(place, count)
        row, step = row_numbers[position // steps], position % steps
        client, draw = drawn(number)
        index, valid = draw.index[row, step], draw.valid[row, step]
        if client[row] >= len(splits):
            return nothing | {"valid": valid}
        split, index = splits[client[row]], np.where(valid, index, 0)

        def labels_of(leaf: np.ndarray) -> np.ndarray:
            """Returns the labels of the batch, with zeros where `valid` bool[B] is False."""
            rows = leaf[index]
            mask = valid.reshape(-1, *(1,) * (rows.ndim - 1))
            return np.where(mask, rows, 0).astype(stored(leaf))

        labels = jax.tree.map(labels_of, split.labels)
        return {"image": np.asarray(split.images[index]), "label": labels, "valid": valid}

    numbers = grain.MapDataset.range(start_round * count, rounds * count).map(read).batch(count)
    ahead = max(2 * count, _THREADS)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=ahead)
    for number, batches in enumerate(numbers.to_iter_dataset(options), start_round):
        yield jax.tree.map(
            lambda leaf: leaf.reshape(len(row_numbers), steps, *leaf.shape[1:]), batches
        ) | {"size": sizes[np.minimum(drawn(number)[0][row_numbers], len(splits))]}
