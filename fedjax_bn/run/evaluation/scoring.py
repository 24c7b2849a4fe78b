"""Scores of internal clients, each with its own model, and of unseen clients by adaptation.

One call judges all batches that lie on the device in one program. What a task keeps of a batch
(`task.score.of_batch`) is then joined on the host, so that data may come in several blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_bn.adaptation import Adaptation
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.engine.devices import apart
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.federation import FederatedState
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.run.evaluation.answers import Answers
from fedjax_bn.run.evaluation.scoring_data import TestData
from fedjax_bn.run.processes.mesh import copies_on
from fedjax_bn.sharing import Variables, join
from fedjax_bn.task import Score, Task, classification

PyTree = Any


class Judged(NamedTuple):
    """What is known of batches, in any order.

    Attributes:
      client: i32[T], whose they are.
      used: bool[T], whether they hold samples; a stream pads with others.
      kept: a tree of arrays [T, ...], what the task keeps of each.
    """

    client: jax.Array
    used: jax.Array
    kept: PyTree


Blocks = TestData | Iterable[TestData]  # all on the device at once, or block after block


def judge_clients(
    model: nn.Module,
    prepare: Prepare,
    task: Task,
    statistics: StatisticsRule | None = None,
    mesh: Mesh | None = None,
) -> Callable[[FederatedState, TestData], Judged]:
    """Returns jitted `judge(state, data) -> Judged`, what the task keeps of each batch.

    Each client answers with its own model, by the statistics rule, see `score_clients`; on a mesh
    where its row of the state lies.
    """
    adaptation = of_clients(model, statistics)

    def on_device(shared: PyTree, personal: PyTree, data: TestData) -> Judged:
        def one(_: None, place: tuple[jax.Array, jax.Array]) -> tuple[None, PyTree]:
            client, batch = place
            # Every device has as many rows, and they are in the order of the clients.
            own = jax.tree.map(lambda leaf: leaf[client % leaf.shape[0]], personal)
            variables = join(shared, own)
            images = prepare(data.images[batch], parameter_dtype(variables))
            outputs, _ = adaptation.predict(variables, (), images, data.valid[batch])
            return None, _keep(task.score, outputs, data, batch)

        return _judged(data, jax.lax.scan(one, None, (data.client, data.batch))[1])

    def judge(state: FederatedState, data: TestData) -> Judged:
        return apart(on_device, mesh, state.shared, state.personal, data)

    return jax.jit(judge, out_shardings=copies_on(mesh))


def judge_unseen(
    adaptation: Adaptation, prepare: Prepare, task: Task, mesh: Mesh | None = None
) -> Callable[[Variables, PyTree, TestData], tuple[PyTree, Judged]]:
    """Returns jitted `judge(variables, carry, data) -> (carry, Judged)`.

    The batches of one unseen client are streamed in order through the adaptation; on a mesh each
    device has some of them where nothing is carried from one to the next, and else all.
    """

    def on_device(variables: Variables, carry: PyTree, data: TestData) -> tuple[PyTree, Judged]:
        def one(carry: PyTree, batch: jax.Array) -> tuple[PyTree, PyTree]:
            images = prepare(data.images[batch], parameter_dtype(variables))
            outputs, carry = adaptation.predict(variables, carry, images, data.valid[batch])
            return carry, _keep(task.score, outputs, data, batch)

        carry, kept = jax.lax.scan(one, carry, data.batch)
        return carry, _judged(data, kept)

    def judge(variables: Variables, carry: PyTree, data: TestData) -> tuple[PyTree, Judged]:
        if jax.tree.leaves(carry):
            return on_device(variables, carry, data)
        return carry, apart(
            lambda variables, _, data: on_device(variables, carry, data)[1],
            mesh,
            variables,
            (),
            data,
        )

    return jax.jit(judge, out_shardings=copies_on(mesh))


def carries(adaptation: Adaptation, variables: Variables) -> bool:
    """Whether an adaptation carries anything from one batch to the next, as TsmoBN does."""
    return bool(jax.tree.leaves(jax.eval_shape(adaptation.init, variables)))


def _judged(data: TestData, kept: PyTree) -> Judged:
    return Judged(data.client, data.valid.any(1)[data.batch] & (data.client >= 0), kept)


def score_clients(
    model: nn.Module,
    prepare: Prepare,
    num_clients: int,
    task: Task | None = None,
    statistics: StatisticsRule | None = None,
    mesh: Mesh | None = None,
) -> Callable[[FederatedState, Blocks], list[float | Answers]]:
    """Returns `score(state, blocks)`: percent of each client, with its own model.

    Of a task of `answers.answering` it is the client's answers.

    Args:
      model: linen module, images -> outputs.
      prepare: stored images -> what the model reads.
      num_clients: K; a client without samples scores what its task says of none.
      task: how outputs are judged; by default `task.classification`.
      statistics: how the method's clients predict, its `FederatedMethod.statistics`; None for
        their running statistics.
      mesh: the devices on which state and blocks lie; None for one.
    """
    task = task or classification()
    judge = judge_clients(model, prepare, task, statistics, mesh)

    def score(state: FederatedState, blocks: Blocks) -> list[float | Answers]:
        kept = [_used(judge(state, block)) for block in _as_blocks(blocks)]
        client, joined = _joined(kept)
        return [_total(task.score, joined, client == k) for k in range(num_clients)]

    return score


def score_unseen(
    adaptation: Adaptation, prepare: Prepare, task: Task | None = None, mesh: Mesh | None = None
) -> Callable[[Variables, Blocks], float | Answers]:
    """Returns `score(variables, blocks)`: percent of one unseen client, or its answers.

    The adaptation starts afresh at each call; arguments are those of `score_clients`.
    """
    task = task or classification()
    judge = judge_unseen(adaptation, prepare, task, mesh)
    begin = adaptation.init
    if mesh is not None:
        begin = jax.jit(begin, out_shardings=copies_on(mesh))

    def score(variables: Variables, blocks: Blocks) -> float | Answers:
        carry, kept = begin(variables), []
        for block in _as_blocks(blocks):
            carry, one = judge(variables, carry, block)
            kept.append(_used(one))
        client, joined = _joined(kept)
        return _total(task.score, joined, np.ones_like(client, bool))

    return score


def mean_loss(task: Task) -> Score:
    """The task's loss, a mean over all samples of a client, in place of its score."""

    def of_batch(outputs: PyTree, label: PyTree, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = task.loss(outputs, label, valid)
        count = valid.sum().astype(loss.dtype)
        return loss * count, count

    def of_all(kept: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        losses, counts = kept
        return losses.sum() / counts.sum().clip(1)

    return Score("loss", of_batch, of_all)


def _keep(score: Score, outputs: PyTree, data: TestData, batch: jax.Array) -> PyTree:
    label = jax.tree.map(lambda leaf: leaf[batch], data.labels)
    return score.of_batch(outputs, label, data.valid[batch])


def _as_blocks(blocks: Blocks) -> Iterable[TestData]:
    return [blocks] if isinstance(blocks, TestData) else blocks


def _used(judged: Judged) -> tuple[np.ndarray, PyTree]:
    """Client i32[t] and what is kept of the batches that hold samples."""
    client, used, kept = jax.tree.map(np.asarray, judged)
    return client[used], jax.tree.map(lambda leaf: leaf[used], kept)


def _joined(parts: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _total(score: Score, kept: PyTree, rows: np.ndarray) -> float | Answers:
    """The score over the batches that bool[T] chooses."""
    total = score.of_all(jax.tree.map(lambda leaf: leaf[rows], kept))
    if isinstance(total, Answers):
        return total
    return float(str(np.asarray(total)))  # with the digits that its dtype has, and no others
