"""Scores of internal clients, each with its own model, and of unseen clients by adaptation.

One program judges all batches on the device. What a task keeps of a batch
(`task.score.of_batch`) is joined on the host, so that the data may come in several blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.adaptation import Adaptation
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.data.domain import Split
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.engine.devices import apart
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.federation import FederatedState
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.run.evaluation.answers import Answers
from fedjax_bn.run.evaluation.scoring_data import TestData, stack_batches
from fedjax_bn.run.processes.mesh import copies_on, over_all, own_rows, place_copies, place_own
from fedjax_bn.run.training.stream import megabytes, stream_tests
from fedjax_bn.sharing import Variables, join
from fedjax_bn.task import Score, Task, classification

PyTree = Any
Blocks = TestData | Iterable[TestData]  # all on the device at once, or block after block
# Of T batches: their clients i32[T], whether they hold samples bool[T] (a stream pads with others),
# and what the task keeps of them, a tree of arrays [T, ...].
_Judged = tuple[jax.Array, jax.Array, PyTree]


def batches_of_tests(
    splits: Sequence[Split],
    batch_size: int,
    device_megabytes: float,
    mesh: Mesh | None = None,
    where: str = "clients",
) -> Callable[[], Iterable[TestData]]:
    """Returns `parts()`, the test batches: all of them on the device, or streamed in blocks.

    Args:
      splits: of the clients.
      batch_size: B at most.
      device_megabytes: splits that take more on each device are streamed from the host.
      mesh: the devices; None for one.
      where: on a mesh, batches are where their clients' models are ("clients"), each device has as
        many ("parts"), or all have all ("copies").
    """
    over, by_client = (None if where == "copies" else mesh), where == "clients"
    if megabytes(splits) <= device_megabytes * (1 if over is None else over.size):
        resident = stack_batches(splits, batch_size, over, by_client)
        resident = place_copies(resident, mesh) if over is None else resident
        return lambda: (resident,)

    def put(block: TestData) -> TestData:
        if over is None:
            return place_copies(block, mesh)
        everywhere = over_all(over)  # a block holds the batches of this process's devices
        own, length = own_rows(over.size, everywhere), len(block.client)
        length //= len(own)
        rows = (own[:, None] * length + np.arange(length)).reshape(-1)
        return place_own(rows, over.size * length, everywhere, block)

    def parts() -> Iterator[TestData]:
        return map(put, stream_tests(splits, batch_size, device_megabytes, over, by_client))

    return parts


def score_clients(
    model: nn.Module,
    prepare: Prepare,
    num_clients: int,
    task: Task | None = None,
    statistics: StatisticsRule | None = None,
    mesh: Mesh | None = None,
) -> Callable[[FederatedState, Blocks], list[float | Answers]]:
    """Returns `score(state, blocks)`: percent of each client, with its own model.

    With a task of `answers.answering` it is the client's answers.

    Args:
      model: linen module, images -> outputs.
      prepare: stored images -> what the model reads.
      num_clients: K; a client without samples scores what its task gives for none.
      task: how outputs are judged; by default `task.classification`.
      statistics: how the method's clients predict, its `FederatedMethod.statistics`; None for
        their running statistics.
      mesh: the devices that hold state and blocks; None for one.
    """
    score, adaptation = (task or classification()).score, of_clients(model, statistics)

    def on_device(shared: PyTree, personal: PyTree, data: TestData) -> _Judged:
        def one(_: None, place: tuple[jax.Array, jax.Array]) -> tuple[None, PyTree]:
            client, batch = place
            # Every device has as many rows, and they are in the order of the clients.
            own = jax.tree.map(lambda leaf: leaf[client % leaf.shape[0]], personal)
            variables = join(shared, own)
            images = prepare(data.images[batch], parameter_dtype(variables))
            outputs, _ = adaptation.predict(variables, (), images, data.valid[batch])
            return None, _keep(score, outputs, data, batch)

        return _judged(data, jax.lax.scan(one, None, (data.client, data.batch))[1])

    @partial(jax.jit, out_shardings=copies_on(mesh))
    def judge(state: FederatedState, data: TestData) -> _Judged:
        return apart(on_device, mesh, state.shared, state.personal, data)

    def score_all(state: FederatedState, blocks: Blocks) -> list[float | Answers]:
        client, kept = _joined([_used(judge(state, block)) for block in _as_blocks(blocks)])
        return [_total(score, kept, client == k) for k in range(num_clients)]

    return score_all


def score_unseen(
    adaptation: Adaptation, prepare: Prepare, task: Task | None = None, mesh: Mesh | None = None
) -> Callable[[Variables, Blocks], float | Answers]:
    """Returns `score(variables, blocks)`: percent of one unseen client, or its answers.

    The batches pass in order through the adaptation, which starts afresh at each call. On a mesh
    each device judges some of them where nothing is carried from one to the next, and else all.
    Arguments are those of `score_clients`.
    """
    score = (task or classification()).score

    def on_device(variables: Variables, carry: PyTree, data: TestData) -> tuple[PyTree, _Judged]:
        def one(carry: PyTree, batch: jax.Array) -> tuple[PyTree, PyTree]:
            images = prepare(data.images[batch], parameter_dtype(variables))
            outputs, carry = adaptation.predict(variables, carry, images, data.valid[batch])
            return carry, _keep(score, outputs, data, batch)

        carry, kept = jax.lax.scan(one, carry, data.batch)
        return carry, _judged(data, kept)

    @partial(jax.jit, out_shardings=copies_on(mesh))
    def judge(variables: Variables, carry: PyTree, data: TestData) -> tuple[PyTree, _Judged]:
        if jax.tree.leaves(carry):
            return on_device(variables, carry, data)
        part = lambda variables, _, data: on_device(variables, carry, data)[1]  # noqa: E731
        return carry, apart(part, mesh, variables, (), data)

    begin = adaptation.init
    if mesh is not None:
        begin = jax.jit(begin, out_shardings=copies_on(mesh))

    def score_one(variables: Variables, blocks: Blocks) -> float | Answers:
        carry, judged = begin(variables), []
        for block in _as_blocks(blocks):
            carry, one = judge(variables, carry, block)
            judged.append(_used(one))
        client, kept = _joined(judged)
        return _total(score, kept, np.ones_like(client, bool))

    return score_one


def carries(adaptation: Adaptation, variables: Variables) -> bool:
    """Returns whether an adaptation carries arrays from batch to batch, as TsmoBN does."""
    return bool(jax.tree.leaves(jax.eval_shape(adaptation.init, variables)))


def mean_loss(task: Task) -> Score:
    """Returns the task's loss as a score: its mean over all samples of a client."""

    def of_batch(outputs: PyTree, label: PyTree, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = task.loss(outputs, label, valid)
        count = valid.sum().astype(loss.dtype)
        return loss * count, count

    def of_all(kept: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        losses, counts = kept
        return losses.sum() / counts.sum().clip(1)

    return Score("loss", of_batch, of_all)


def _as_blocks(blocks: Blocks) -> Iterable[TestData]:
    return [blocks] if isinstance(blocks, TestData) else blocks


def _keep(score: Score, outputs: PyTree, data: TestData, batch: jax.Array) -> PyTree:
    label = jax.tree.map(lambda leaf: leaf[batch], data.labels)
    return score.of_batch(outputs, label, data.valid[batch])


def _judged(data: TestData, kept: PyTree) -> _Judged:
    return data.client, data.valid.any(1)[data.batch] & (data.client >= 0), kept


def _used(judged: _Judged) -> tuple[np.ndarray, PyTree]:
    """Client i32[t] and what is kept, on the host, of the batches that hold samples."""
    client, used, kept = jax.tree.map(np.asarray, judged)  # waits, so that one block is in flight
    return client[used], jax.tree.map(lambda leaf: leaf[used], kept)


def _joined(parts: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _total(score: Score, kept: PyTree, rows: np.ndarray) -> float | Answers:
    """The score over the batches that bool[T] chooses."""
    total = score.of_all(jax.tree.map(lambda leaf: leaf[rows], kept))
    if isinstance(total, Answers):
        return total
    return float(str(np.asarray(total)))  # with the digits that its dtype has, and no others
