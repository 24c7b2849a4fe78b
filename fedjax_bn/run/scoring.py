"""Scores of internal clients, each with its own model, and of unseen clients by adaptation.

One call judges all batches that lie on the device in one program. What a task keeps of a batch
(`task.score.of_batch`) is then joined on the host, so that data may come in several blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from fedjax_bn.adaptation import Adaptation
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.dtypes import parameter_dtype
from fedjax_bn.federation import FederatedState
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.run.scoring_data import TestData
from fedjax_bn.sharing import Variables, join
from fedjax_bn.task import Score, Task, classification

PyTree = Any
Blocks = TestData | Iterable[TestData]  # all on the device at once, or block after block


def judge_clients(
    model: nn.Module, prepare: Prepare, task: Task, statistics: StatisticsRule | None = None
) -> Callable[[FederatedState, TestData], PyTree]:
    """Returns jitted `judge(state, data) -> kept [T, ...]`, what the task keeps of each batch.

    Each client answers with its own model, by the statistics rule, see `score_clients`.
    """
    adaptation = of_clients(model, statistics)

    @jax.jit
    def judge(state: FederatedState, data: TestData) -> PyTree:
        def one(_: None, place: tuple[jax.Array, jax.Array]) -> tuple[None, PyTree]:
            client, batch = place
            own = jax.tree.map(lambda leaf: leaf[client], state.personal)
            variables = join(state.shared, own)
            images = prepare(data.images[batch], parameter_dtype(variables))
            outputs, _ = adaptation.predict(variables, (), images, data.valid[batch])
            return None, _keep(task.score, outputs, data, batch)

        return jax.lax.scan(one, None, (data.client, data.batch))[1]

    return judge


def judge_unseen(
    adaptation: Adaptation, prepare: Prepare, task: Task
) -> Callable[[Variables, PyTree, TestData], tuple[PyTree, PyTree]]:
    """Returns jitted `judge(variables, carry, data) -> (carry, kept [T, ...])`.

    The batches of one unseen client are streamed in order through the adaptation.
    """

    @jax.jit
    def judge(variables: Variables, carry: PyTree, data: TestData) -> tuple[PyTree, PyTree]:
        def one(carry: PyTree, batch: jax.Array) -> tuple[PyTree, PyTree]:
            images = prepare(data.images[batch], parameter_dtype(variables))
            outputs, carry = adaptation.predict(variables, carry, images, data.valid[batch])
            return carry, _keep(task.score, outputs, data, batch)

        return jax.lax.scan(one, carry, data.batch)

    return judge


def score_clients(
    model: nn.Module,
    prepare: Prepare,
    num_clients: int,
    task: Task | None = None,
    statistics: StatisticsRule | None = None,
) -> Callable[[FederatedState, Blocks], list[float]]:
    """Returns `score(state, blocks)`: percent of each client, with its own model.

    Args:
      model: linen module, images -> outputs.
      prepare: stored images -> what the model reads.
      num_clients: K; a client without samples scores what its task says of none.
      task: how outputs are judged; by default `task.classification`.
      statistics: how the method's clients predict, its `FederatedMethod.statistics`; None for
        their running statistics.
    """
    task = task or classification()
    judge = judge_clients(model, prepare, task, statistics)

    def score(state: FederatedState, blocks: Blocks) -> list[float]:
        kept = [_used(block, judge(state, block)) for block in _as_blocks(blocks)]
        client, joined = _joined(kept)
        return [_total(task.score, joined, client == k) for k in range(num_clients)]

    return score


def score_unseen(
    adaptation: Adaptation, prepare: Prepare, task: Task | None = None
) -> Callable[[Variables, Blocks], float]:
    """Returns `score(variables, blocks)`: percent of one unseen client.

    The adaptation starts afresh at each call; arguments are those of `score_clients`.
    """
    task = task or classification()
    judge = judge_unseen(adaptation, prepare, task)

    def score(variables: Variables, blocks: Blocks) -> float:
        carry, kept = adaptation.init(variables), []
        for block in _as_blocks(blocks):
            carry, one = judge(variables, carry, block)
            kept.append(_used(block, one))
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


def _used(block: TestData, kept: PyTree) -> tuple[np.ndarray, PyTree]:
    """Client i32[t] and what is kept of batches that hold samples; a stream pads with others."""
    used = np.asarray(block.valid).any(1)[np.asarray(block.batch)]
    return np.asarray(block.client)[used], jax.tree.map(lambda leaf: np.asarray(leaf)[used], kept)


def _joined(parts: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _total(score: Score, kept: PyTree, rows: np.ndarray) -> float:
    """The score over the batches that bool[T] chooses."""
    percent = score.of_all(jax.tree.map(lambda leaf: leaf[rows], kept))
    return float(str(np.asarray(percent)))  # with the digits that its dtype has, and no others
