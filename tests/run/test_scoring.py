"""Accuracies against counts in NumPy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn import adaptation
from fedjax_bn.adaptation import Adaptation
from fedjax_bn.aggregation import ServerState
from fedjax_bn.data.domain import Split
from fedjax_bn.engine.images import standardize
from fedjax_bn.federation import FederatedState
from fedjax_bn.task import Score, Task
from fedjax_bn.training.evaluation.scoring import SplitBatches, score_clients, score_unseen

FEATURES, CLASSES = 5, 3
PREPARE = standardize()


class Linear(nn.Module):
    """Logits by one matrix product."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        return images @ self.param("kernel", nn.initializers.zeros, (FEATURES, CLASSES))


def split(size: int, seed: int = 0) -> Split:
    rng = np.random.Generator(np.random.PCG64([size, seed]))
    images = rng.standard_normal((size, FEATURES), dtype=np.float32)
    return Split(images, rng.integers(0, CLASSES, size).astype(np.int32))


def federation(kernels: np.ndarray, personal: bool) -> FederatedState:
    """A state with one kernel a client, or with the first as the shared one."""
    num_clients = len(kernels)
    whole, none = {"params": {"kernel": jnp.asarray(kernels)}}, {"params": {"kernel": None}}
    one = {"params": {"kernel": jnp.asarray(kernels[0])}}
    return FederatedState(
        round=jnp.zeros((), jnp.int32),
        shared=none if personal else one,
        personal=whole if personal else none,
        weights=jnp.full(num_clients, 1 / num_clients),
        weighing=(),
        server=ServerState(),
        memory=(),
    )


def percent(logits: np.ndarray, labels: np.ndarray) -> float:
    return 100 * np.mean(logits.argmax(-1) == labels)


@pytest.mark.parametrize(("batch_size", "personal"), [(7, True), (7, False), (100, True)])
def test_each_client_is_counted_on_its_own_samples_with_its_own_leaves(batch_size, personal):
    rng = np.random.Generator(np.random.PCG64(1))
    kernels = rng.standard_normal((4, FEATURES, CLASSES), dtype=np.float32)
    splits = [split(size) for size in (9, 4, 1, 23)]
    data = SplitBatches(splits, batch_size).all_at_once()
    assert data.valid.sum() == 37
    seen = score_clients(Linear(), PREPARE, 4)(federation(kernels, personal), data)
    expected = [
        percent(one.images @ kernels[k if personal else 0], one.labels)
        for k, one in enumerate(splits)
    ]
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


def weighted() -> Task:
    """A task with a tree of labels: the share of right answers by weight."""

    def of_batch(logits, label, valid):
        weight = jnp.where(valid, label["weight"], 0)
        right = logits.argmax(-1).astype(label["class"].dtype) == label["class"]
        return {"right": jnp.where(right, weight, 0).sum(), "whole": weight.sum()}

    def of_all(kept):
        return 100 * kept["right"].sum() / kept["whole"].sum()

    return Task(loss=None, score=Score("weighted share", of_batch, of_all))


def test_a_users_task_scores_labels_that_are_a_tree_in_one_block_or_several():
    rng = np.random.Generator(np.random.PCG64(4))
    kernels = rng.standard_normal((2, FEATURES, CLASSES), dtype=np.float32)
    state, splits = federation(kernels, personal=True), [split(13), split(6)]
    weights = [rng.uniform(1, 9, len(one.labels)).astype(np.float32) for one in splits]
    trees = [
        one._replace(labels={"class": one.labels, "weight": weight})
        for one, weight in zip(splits, weights, strict=True)
    ]
    score = score_clients(Linear(), PREPARE, 2, weighted())
    whole = SplitBatches(trees, 4).all_at_once()
    cut = [
        whole._replace(client=whole.client[rows], batch=whole.batch[rows])
        for rows in (slice(2), slice(2, None))
    ]
    expected = [
        100 * weight[(one.images @ kernel).argmax(-1) == one.labels].sum() / weight.sum()
        for one, weight, kernel in zip(splits, weights, kernels, strict=True)
    ]
    np.testing.assert_allclose(score(state, whole), expected, rtol=1e-5)
    np.testing.assert_allclose(score(state, cut), expected, rtol=1e-5)
    unseen = score_unseen(adaptation.running(Linear()), PREPARE, weighted())
    variables = {"params": {"kernel": jnp.asarray(kernels[1])}}
    last = unseen(variables, SplitBatches(trees[1:], 4).all_at_once())
    np.testing.assert_allclose(last, expected[1], 1e-5)


def remembering() -> Adaptation:
    """Logits shifted by the sum of all valid features seen before: order decides."""

    def predict(variables, carry, images, valid=None):
        logits = images @ variables["params"]["kernel"] + carry
        return logits, carry + jnp.where(valid[:, None], images, 0).sum(0)[:CLASSES]

    return Adaptation(init=lambda variables: jnp.zeros(CLASSES), predict=predict)


def test_an_unseen_client_is_streamed_in_order_through_the_carry_and_starts_afresh():
    one, kernel = split(22), np.eye(FEATURES, CLASSES, dtype=np.float32)
    variables = {"params": {"kernel": jnp.asarray(kernel)}}
    data = SplitBatches([one], 4).all_at_once()
    right, carry = 0, np.zeros(CLASSES, np.float32)
    for start in range(0, 22, 4):
        images, labels = one.images[start : start + 4], one.labels[start : start + 4]
        right += ((images @ kernel + carry).argmax(-1) == labels).sum()
        carry = carry + images.sum(0)[:CLASSES]
    score = score_unseen(remembering(), PREPARE)
    for _ in range(2):
        np.testing.assert_allclose(score(variables, data), 100 * right / 22, rtol=1e-6)
