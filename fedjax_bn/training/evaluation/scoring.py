"""Scores internal clients with their own models, and unseen clients with an adaptation.

One program judges batches on the device, and the host joins what the task's score keeps of each.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_bn.adaptation import Adaptation
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.data.domain import Rows, Split, select
from fedjax_bn.data.labels import stored
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
from fedjax_bn.training.mesh import copies_on, memories, place_copies, place_rows
from fedjax_bn.training.programs import made_once
from fedjax_bn.training.rounds import megabytes

PyTree = Any
_Place = tuple[int, Split, int]  # a batch: client, split, first sample's number


class _TestData(NamedTuple):
    """Batches of test samples, each of one client; T client batches point to U stored ones."""

    images: jax.Array  # [U, B, ...]
    labels: PyTree  # [U, B] or a tree of [U, B, ...]
    valid: jax.Array  # bool[U, B]
    client: jax.Array  # i32[T], -1 for padding
    batch: jax.Array  # i32[T], a number among those stored on its device


Blocks = _TestData | Iterable[_TestData]  # all on the device at once, or block after block


class SplitBatches:
    """Cuts the splits of clients into batches, in order, and pads each client's last one.

    On a mesh a batch is on the device that has its client's model ("clients"), or the devices share
    all batches evenly ("parts"), or each device has all of them ("copies"). `rows` are those of the
    state, if there are more than splits.
    """

    def __init__(
        self,
        splits: Sequence[Split],
        batch_size: int,
        mesh: Mesh | None = None,
        placement: Literal["clients", "parts", "copies"] = "clients",
        rows: int = 0,
    ) -> None:
        longest = max(len(split.images) for split in splits)
        self._splits, self._size = splits, batch_size if rows else min(batch_size, longest)
        self._mesh, self._copied = mesh, placement == "copies"
        places: list[_Place] = [
            (k, split, start)
            for k, split in enumerate(splits)
            for start in range(0, len(split.images), self._size)
        ]
        self._spread, self._parts = None, [places]  # the parts of all devices
        if mesh is not None and not self._copied:  # over all devices, also those of a batch
            self._spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            self._parts = [[] for _ in range(mesh.size)]
            per_device = -(-len(places) // mesh.size)
            clients_per_device = padded(rows or len(splits), mesh) // mesh.shape[CLIENTS]
            beside = mesh.size // mesh.shape[CLIENTS]  # with the same clients, for batches in turn
            for number, place in enumerate(places):
                device = place[0] // clients_per_device * beside + number % beside
                self._parts[number // per_device if placement == "parts" else device].append(place)
        self._longest = max(map(len, self._parts))

    def all_at_once(self) -> _TestData:
        """Returns all batches on the device."""
        width = max(len({(id(split), at) for _, split, at in part}) for part in self._parts)
        return self._stacked(self._parts, width, self._longest)

    def blocks(self, length: int) -> Iterator[_TestData]:
        """Yields the batches on the device in blocks of one shape, of `length` on each device."""

        def block(start: int) -> _TestData:
            parts = [part[start : start + length] for part in self._parts]
            return self._stacked(parts, length, length)

        with ThreadPoolExecutor(1) as thread:  # reads the next block while one is judged
            waiting = thread.submit(block, 0)
            for following in range(length, self._longest, length):
                ready, waiting = waiting.result(), thread.submit(block, following)
                yield ready
            yield waiting.result()

    def kept_within(self, device_megabytes: float) -> Callable[[], Iterable[_TestData]]:
        """Returns `parts()`: all batches, which stay on the devices if they fit, or else blocks."""
        limit = device_megabytes * memories(self._spread)  # of all parts together
        if megabytes(self._splits) <= limit:
            resident = self.all_at_once()
            return lambda: (resident,)
        # A quarter of the limit for a block: one is judged, the next one waits, a third is stacked.
        batch_megabytes = self._splits[0].images[:1].nbytes * self._size / 2**20
        length = int(limit / 4 / len(self._parts) / max(batch_megabytes, 1e-9))
        return partial(self.blocks, min(self._longest, max(1, length)))

    def _stacked(self, parts: Sequence[Sequence[_Place]], width: int, length: int) -> _TestData:
        """Returns each device's batches, padded by empty ones to U = `width` and T = `length`."""
        # Splits are compared by identity, because comparing their arrays would read all of them.
        stored_of = [{(id(split), at): (split, at) for _, split, at in part} for part in parts]
        empty = self._splits[0], len(self._splits[0].images)

        def read(start: int, stop: int) -> tuple:
            places = [*stored_of[start // width].values()]
            places += [empty] * (stop - start - len(places))
            with ThreadPoolExecutor(8) as threads:  # images may be files
                batches = threads.map(lambda place: _read_batch(*place, self._size), places)
                return jax.tree.map(lambda *rows: np.stack(rows), *batches)

        def point(start: int, stop: int) -> tuple[np.ndarray, ...]:
            part = parts[start // length]
            number = {key: i for i, key in enumerate(stored_of[start // length])}
            pointers = [(k, number[id(split), at]) for k, split, at in part]
            pointers += [(-1, 0)] * (stop - start - len(part))
            return tuple(np.array(column, np.int32) for column in zip(*pointers, strict=True))

        images, labels, valid = place_rows(read, len(parts) * width, self._spread)
        pointers = place_rows(point, len(parts) * length, self._spread)
        data = _TestData(images, labels, valid, *pointers)
        return place_copies(data, self._mesh) if self._copied else data


def _read_batch(split: Split, start: int, batch_size: int) -> tuple[np.ndarray, PyTree, np.ndarray]:
    """Returns images, labels and valid bool[B] from sample `start`, with zeros after the last."""
    images = np.asarray(split.images[start : start + batch_size])
    valid = np.arange(batch_size) < len(images)
    labels = jax.tree.map(lambda rows: np.asarray(rows[start : start + batch_size]), split.labels)

    def fill(rows: np.ndarray) -> np.ndarray:
        return np.pad(rows, [(0, batch_size - len(images))] + [(0, 0)] * (rows.ndim - 1))

    return fill(images), jax.tree.map(lambda x: fill(x.astype(stored(x))), labels), valid


def as_stored(split: Split) -> Split:
    """Returns the split in the order of storage, in which `predict` reads the same samples."""
    images, _, names = split
    if names is not None and len(names) and is_image(str(names[0])):
        paths = [str(name).split("/") for name in names]
        return select(split, np.array(sorted(range(len(paths)), key=paths.__getitem__)))
    is_part = isinstance(images, Rows)
    return select(split, np.argsort(images.index, kind="stable")) if is_part else split


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

    With a task of `answers.answering` it is each client's answers; `statistics` is a method's rule.
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

    The batches pass in order through the adaptation, which starts again at each call.
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
    """Returns `judged(shared, personal, carry, blocks) -> (client, batch_scores)`, on the host."""

    # Of all T batches that hold samples: i32[T], and what the score keeps of each, arrays [T, ...].
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
        used = data.valid.any(1)[data.batch] & (data.client >= 0)
        return carry, (data.client, used, batch_scores)

    # Every process reads all results, whichever device made them.
    @partial(jax.jit, out_shardings=copies_on(mesh))
    def judge(shared: PyTree, personal: PyTree, carry: PyTree, data: _TestData) -> tuple:
        if jax.tree.leaves(carry):  # each batch depends on the one before: all devices judge all
            return on_device((shared, carry), personal, data)
        return apart(on_device, mesh, (shared, carry), personal, data)

    def judged(shared: PyTree, personal: PyTree, carry: PyTree, blocks: Blocks) -> tuple:
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
    # A number has the digits that its dtype has, and no others.
    return total if isinstance(total, AnyAnswers) else float(str(np.asarray(total)))
