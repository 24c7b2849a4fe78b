"""Scores internal clients with their own models, and unseen clients with an adaptation.

Test samples are put on the device as batches, all at once or block after block. One program judges
the batches, and the host joins what the task's score keeps of each (`task.score.of_batch`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.adaptation import Adaptation
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.data.domain import Rows, Split, select
from fedjax_bn.data.label_trees import stored
from fedjax_bn.data.sets.folders import is_image
from fedjax_bn.engine.devices import CLIENTS, apart, padded
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.images import Prepare
from fedjax_bn.federation import FederatedState
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.sharing import Variables, join
from fedjax_bn.state import completed
from fedjax_bn.task import Score, Task, classification
from fedjax_bn.training.evaluation.answers import AnyAnswers
from fedjax_bn.training.mesh import copies_on, over_all, place_copies, place_rows
from fedjax_bn.training.programs import made_once
from fedjax_bn.training.stream import megabytes

PyTree = Any
_THREADS = 8
# On a mesh a batch is on the device that has its client's model ("clients"), or the devices share
# all batches evenly ("parts"), or each device has all of them ("copies").
Where = Literal["clients", "parts", "copies"]
_Place = tuple[int, Split, int]  # a batch: client, split, first sample's number


class _TestData(NamedTuple):
    """Batches of test samples of some clients; no batch mixes two clients.

    Clients of one domain may test on the same batches, so T client batches point to U stored ones.

    Attributes:
      images: u8[U, B, H, W, C] or f32[U, B, F].
      labels: i32[U, B], or a tree of arrays [U, B, ...].
      valid: bool[U, B].
      client: i32[T], the client of each batch; -1 for padding, which does not count.
      batch: i32[T], the number of each batch among those stored on its device.
    """

    images: jax.Array
    labels: PyTree
    valid: jax.Array
    client: jax.Array
    batch: jax.Array


Blocks = _TestData | Iterable[_TestData]  # all on the device at once, or block after block


class SplitBatches:
    """Cuts the splits of clients into batches, in order, and pads each client's last one.

    Args:
      splits: of the clients. One that several clients have (the same object) is stored once on
        each device.
      batch_size: B; at most the largest split, unless `rows` is given.
      mesh: the devices; None for one.
      placement: on a mesh, which devices have which batches.
      rows: of the state, if it has more rows than there are splits; 0 if not.
    """

    def __init__(
        self,
        splits: Sequence[Split],
        batch_size: int,
        mesh: Mesh | None = None,
        placement: Where = "clients",
        rows: int = 0,
    ) -> None:
        longest = max(len(split.images) for split in splits)
        self._splits, self._size = splits, batch_size if rows else min(batch_size, longest)
        self._mesh, self._placement = mesh, placement
        places = [
            (k, split, start)
            for k, split in enumerate(splits)
            for start in range(0, len(split.images), self._size)
        ]
        if mesh is None or placement == "copies":
            self._parts = [places]  # of each device
        elif placement == "parts":
            batches_per_device = -(-len(places) // mesh.size)
            self._parts = [
                places[d * batches_per_device : (d + 1) * batches_per_device]
                for d in range(mesh.size)
            ]
        else:
            clients_per_device = padded(rows or len(splits), mesh) // mesh.shape[CLIENTS]
            beside = mesh.size // mesh.shape[CLIENTS]  # with the same clients, for batches in turn
            self._parts = [[] for _ in range(mesh.size)]
            for number, place in enumerate(places):
                self._parts[place[0] // clients_per_device * beside + number % beside].append(place)
        self._longest = max(map(len, self._parts))

    def all_at_once(self) -> _TestData:
        """Returns all batches on the device."""
        width = max(len({(id(split), at) for _, split, at in part}) for part in self._parts)
        return self._stacked(self._parts, width, self._longest)

    def blocks(self, length: int) -> Iterator[_TestData]:
        """Yields the batches on the device in blocks of one shape.

        Args:
          length: batches of a block on each device; the last block ends with empty ones.
        """

        def block(start: int) -> _TestData:
            parts = [part[start : start + length] for part in self._parts]
            return self._stacked(parts, length, length)

        starts = range(0, self._longest, length)
        with ThreadPoolExecutor(1) as thread:  # reads the next block while one is judged
            waiting = thread.submit(block, 0)
            for following in starts[1:]:
                ready, waiting = waiting.result(), thread.submit(block, following)
                yield ready
            yield waiting.result()

    def kept_within(self, device_megabytes: float) -> Callable[[], Iterable[_TestData]]:
        """Returns `parts()`: all batches, which stay on the device, or blocks from the host.

        Args:
          device_megabytes: splits that take more on each device are streamed.
        """
        devices = 1 if self._mesh is None or self._placement == "copies" else self._mesh.size
        if megabytes(self._splits) <= device_megabytes * devices:
            resident = self.all_at_once()
            return lambda: (resident,)
        # A quarter of the limit for a block: one is judged, the next one waits, a third is stacked.
        batch_megabytes = self._splits[0].images[:1].nbytes * self._size / 2**20
        length = min(self._longest, max(1, int(device_megabytes / 4 / max(batch_megabytes, 1e-9))))
        return partial(self.blocks, length)

    def _stacked(self, parts: Sequence[Sequence[_Place]], width: int, length: int) -> _TestData:
        """Returns each device's batches, padded by empty ones to U = `width` and T = `length`."""
        # Splits are compared by identity, because comparing their arrays would read all of them.
        stored = [{(id(place[1]), place[2]): place for place in part} for part in parts]
        alone = self._mesh is None or self._placement == "copies"
        spread = None if alone else over_all(self._mesh)
        nothing = (-1, self._splits[0], len(self._splits[0].images))

        def read(start: int, stop: int) -> tuple:
            places = [*stored[start // width].values()]
            places += [nothing] * (stop - start - len(places))
            with ThreadPoolExecutor(_THREADS) as threads:  # images may be files
                batches = threads.map(lambda place: _read_batch(*place[1:], self._size), places)
                return jax.tree.map(lambda *rows: np.stack(rows), *batches)

        def point(start: int, stop: int) -> tuple[np.ndarray, ...]:
            part = parts[start // length]
            number = {key: i for i, key in enumerate(stored[start // length])}
            pointers = [(k, number[id(split), sample]) for k, split, sample in part]
            pointers += [(-1, 0)] * (stop - start - len(part))
            return tuple(np.array(column, np.int32) for column in zip(*pointers, strict=True))

        images, labels, valid = place_rows(read, len(parts) * width, spread)
        data = _TestData(images, labels, valid, *place_rows(point, len(parts) * length, spread))
        return place_copies(data, self._mesh) if self._placement == "copies" else data


def _read_batch(split: Split, start: int, batch_size: int) -> tuple[np.ndarray, PyTree, np.ndarray]:
    """Returns images [B, ...], labels [B, ...] and valid bool[B] from sample `start` of a split.

    Zeros pad the batch after the last sample. Labels get the dtype in which they are `stored`.
    """
    images = np.asarray(split.images[start : start + batch_size])
    count = len(images)

    def fill(rows: np.ndarray) -> np.ndarray:
        return np.pad(rows, [(0, batch_size - count)] + [(0, 0)] * (rows.ndim - 1))

    def label(rows: np.ndarray) -> np.ndarray:
        part = np.asarray(rows[start : start + batch_size])
        return fill(part.astype(stored(part)))

    return fill(images), jax.tree.map(label, split.labels), np.arange(batch_size) < count


def as_stored(split: Split) -> Split:
    """Returns the split in the order of storage, in which `predict` reads the same samples.

    Image files are ordered by their paths, and rows of an array by their numbers in it; other
    samples keep their order.
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
    if order < 0:
        return split
    return select(split, np.random.default_rng(order).permutation(len(split.images)))


def score_clients(
    model: nn.Module,
    prepare: Prepare,
    num_clients: int,
    task: Task | None = None,
    statistics: StatisticsRule | None = None,
    mesh: Mesh | None = None,
) -> Callable[[FederatedState, Blocks], list[float | AnyAnswers]]:
    """Returns `score(state, blocks)`, the percentage of each client with its own model.

    With a task of `answers.answering`, each client's score is its answers.

    Args:
      model: linen module, images -> outputs.
      prepare: stored images -> what the model reads.
      num_clients: K; a client without samples gets the task's score of no samples.
      task: how outputs are judged; by default `task.classification`.
      statistics: how the method's clients predict, its `FederatedMethod.statistics`; None for
        their running statistics.
      mesh: the devices that hold state and blocks; None for one.
    """
    score = (task or classification()).score
    judged = made_once(
        ("judge clients", model, statistics, prepare, score, mesh),
        lambda: _judging(of_clients(model, statistics), prepare, score, mesh),
    )

    def score_all(state: FederatedState, blocks: Blocks) -> list[float | AnyAnswers]:
        state = completed(state)
        client, batch_scores = judged(state.shared, state.personal, (), blocks)
        return [_total(score, batch_scores, client == k) for k in range(num_clients)]

    return score_all


def score_unseen(
    adaptation: Adaptation, prepare: Prepare, task: Task | None = None, mesh: Mesh | None = None
) -> Callable[[Variables, Blocks], float | AnyAnswers]:
    """Returns `score(variables, blocks)`, the percentage of one unseen client, or its answers.

    The batches pass in order through the adaptation, which starts again at each call. On a mesh,
    each device judges a part of them if nothing is carried from one to the next, else all of them.
    The other arguments are as in `score_clients`.
    """
    score = (task or classification()).score
    judged = made_once(
        ("judge unseen", adaptation, prepare, score, mesh),
        lambda: _judging(adaptation, prepare, score, mesh),
    )
    begin = adaptation.init
    if mesh is not None:  # where `judge` returns the carry, so that `judge` compiles once
        begin = made_once(
            ("begin", adaptation, mesh),
            lambda: jax.jit(adaptation.init, out_shardings=copies_on(mesh)),
        )

    def score_one(variables: Variables, blocks: Blocks) -> float | AnyAnswers:
        nothing = jax.tree.map(lambda leaf: None, variables)
        client, batch_scores = judged(variables, nothing, begin(variables), blocks)
        return _total(score, batch_scores, np.ones_like(client, bool))

    return score_one


def _judging(
    adaptation: Adaptation, prepare: Prepare, score: Score, mesh: Mesh | None
) -> Callable[[PyTree, PyTree, PyTree, Blocks], tuple[np.ndarray, PyTree]]:
    """Returns `judged(shared, personal, carry, blocks) -> (client, batch_scores)`, on the host.

    `client` i32[T] has the clients of all batches that hold samples, and `batch_scores` has what
    the score keeps of these batches, arrays [T, ...].
    """

    def on_device(common: tuple, personal: PyTree, data: _TestData) -> tuple[PyTree, tuple]:
        shared, carry = common

        def judge_batch(carry: PyTree, place: tuple[jax.Array, jax.Array]) -> tuple[PyTree, PyTree]:
            client, batch = place
            # Devices have equally many rows, in the clients' order, so the remainder is the row.
            row = jax.tree.map(lambda leaf: leaf[client % leaf.shape[0]], personal)
            variables, valid = join(shared, row), data.valid[batch]
            images = prepare(data.images[batch], parameter_dtype(variables))
            outputs, carry = adaptation.predict(variables, carry, images, valid)
            label = jax.tree.map(lambda leaf: leaf[batch], data.labels)
            return carry, score.of_batch(outputs, label, valid)

        carry, batch_scores = jax.lax.scan(judge_batch, carry, (data.client, data.batch))
        return carry, (
            data.client,
            data.valid.any(1)[data.batch] & (data.client >= 0),
            batch_scores,
        )

    # Every process reads all results, whichever device made them.
    @partial(jax.jit, out_shardings=copies_on(mesh))
    def judge(shared: PyTree, personal: PyTree, carry: PyTree, data: _TestData) -> tuple:
        if jax.tree.leaves(carry):  # each batch depends on the one before: all devices judge all
            return on_device((shared, carry), personal, data)
        return apart(on_device, mesh, (shared, carry), personal, data)

    def judged(
        shared: PyTree, personal: PyTree, carry: PyTree, blocks: Blocks
    ) -> tuple[np.ndarray, PyTree]:
        results = []
        for block in [blocks] if isinstance(blocks, _TestData) else blocks:
            carry, result = judge(shared, personal, carry, block)
            # Conversion to NumPy waits for the device, so only one block is in flight at a time.
            client, used, batch_scores = jax.tree.map(np.asarray, result)
            results.append(jax.tree.map(lambda leaf, used=used: leaf[used], (client, batch_scores)))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *results)

    return judged


def _total(score: Score, batch_scores: PyTree, rows: np.ndarray) -> float | AnyAnswers:
    """Returns the score over the batches where `rows` bool[T] is True."""
    total = score.of_all(jax.tree.map(lambda leaf: leaf[rows], batch_scores))
    if isinstance(total, AnyAnswers):
        return total
    return float(str(np.asarray(total)))  # with the digits that its dtype has, and no others


def mean_loss(task: Task) -> Score:
    """Returns the task's loss as a score: its mean over all samples of a client."""

    def of_batch(outputs: PyTree, label: PyTree, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = task.loss(outputs, label, valid)
        count = valid.sum().astype(loss.dtype)
        return loss * count, count

    def of_all(sums: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        losses, counts = sums
        return losses.sum() / counts.sum().clip(1)

    return Score("loss", of_batch, of_all)
