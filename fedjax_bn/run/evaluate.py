"""Accuracy of internal clients, each with its own model, and of unseen clients by adaptation.

Test data lie on the device in large batches; one call scores them all in one program.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.adaptation import Adaptation, running
from fedjax_bn.data.domain import Split
from fedjax_bn.data.pixels.images import Prepare
from fedjax_bn.dtypes import parameter_dtype
from fedjax_bn.federation import FederatedState
from fedjax_bn.sharing import Variables, join

PyTree = Any


class TestData(NamedTuple):
    """Test samples of some clients as batches, none of which mixes two clients.

    Clients of one domain may test on the same batches, so T client batches point to U stored ones.

    Attributes:
      images: u8[U, B, H, W, C] or f32[U, B, F].
      labels: i32[U, B].
      valid: bool[U, B].
      client: i32[T], whose batch it is.
      batch: i32[T], which of the U stored ones it is.
    """

    images: jax.Array
    labels: jax.Array
    valid: jax.Array
    client: jax.Array
    batch: jax.Array


def stack_batches(splits: Sequence[Split], batch_size: int) -> TestData:
    """Cuts each client's split into batches in order, the last one padded, and stacks them all.

    A split that several clients have (the same object) is stored once.
    """
    batch_size = min(batch_size, max(len(split.labels) for split in splits))
    places = batch_places(splits, batch_size)
    stored = list(dict.fromkeys((id(split), start) for _, split, start in places))
    number = {place: i for i, place in enumerate(stored)}
    by_id = {id(split): split for split in splits}
    batches = [read_batch(by_id[name], start, batch_size) for name, start in stored]
    images, labels, valid = (np.stack(parts) for parts in zip(*batches, strict=True))
    client = np.array([k for k, _, _ in places], np.int32)
    batch = np.array([number[id(split), start] for _, split, start in places], np.int32)
    return TestData(*map(jnp.asarray, (images, labels, valid, client, batch)))


def batch_places(splits: Sequence[Split], batch_size: int) -> list[tuple[int, Split, int]]:
    """(client, its split, number of the first sample) of every batch, client after client."""
    return [
        (k, split, start)
        for k, split in enumerate(splits)
        for start in range(0, len(split.labels), batch_size)
    ]


def read_batch(
    split: Split, start: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images [B, ...], labels i32[B] and valid bool[B] from a sample on, zeros behind the last."""
    images = np.asarray(split.images[start : start + batch_size])
    labels = split.labels[start : start + batch_size].astype(np.int32)
    count, padding = len(labels), batch_size - len(labels)
    images = np.pad(images, [(0, padding)] + [(0, 0)] * (images.ndim - 1))
    return images, np.pad(labels, (0, padding)), np.arange(batch_size) < count


def count_clients(
    model: nn.Module, prepare: Prepare, num_clients: int
) -> Callable[[FederatedState, TestData], jax.Array]:
    """Returns jitted `count(state, data) -> i32[2, K]`: right answers and samples by client.

    Each client answers with its own model.
    """
    adaptation = running(model)

    @jax.jit
    def count(state: FederatedState, data: TestData) -> jax.Array:
        def one(_: None, place: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            client, batch = place
            own = jax.tree.map(lambda leaf: leaf[client], state.personal)
            variables = join(state.shared, own)
            images = prepare(data.images[batch], parameter_dtype(variables))
            logits, _ = adaptation.predict(variables, (), images)
            return None, _correct(logits, data.labels[batch], data.valid[batch])

        _, correct = jax.lax.scan(one, None, (data.client, data.batch))
        totals = jnp.stack([correct, data.valid.sum(1, dtype=jnp.int32)[data.batch]])
        return jax.vmap(lambda values: jax.ops.segment_sum(values, data.client, num_clients))(
            totals
        )

    return count


def score_clients(
    model: nn.Module, prepare: Prepare, num_clients: int
) -> Callable[[FederatedState, TestData], jax.Array]:
    """Returns jitted `score(state, data) -> accuracy f[K]`, percent, each client's own model."""
    count = count_clients(model, prepare, num_clients)

    @jax.jit
    def score(state: FederatedState, data: TestData) -> jax.Array:
        right, samples = count(state, data)
        return 100 * right / jnp.maximum(samples, 1)

    return score


def count_unseen(
    adaptation: Adaptation, prepare: Prepare
) -> Callable[[Variables, PyTree, TestData], tuple[PyTree, jax.Array]]:
    """Returns jitted `count(variables, carry, data) -> (carry, i32[2])`: right answers, samples.

    The batches of one unseen client are streamed in order through the adaptation.
    """

    @jax.jit
    def count(variables: Variables, carry: PyTree, data: TestData) -> tuple[PyTree, jax.Array]:
        def one(carry: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
            images = prepare(data.images[batch], parameter_dtype(variables))
            valid = data.valid[batch]
            logits, carry = adaptation.predict(variables, carry, images, valid)
            return carry, _correct(logits, data.labels[batch], valid)

        carry, correct = jax.lax.scan(one, carry, data.batch)
        return carry, jnp.stack([correct.sum(), data.valid[data.batch].sum(dtype=jnp.int32)])

    return count


def score_unseen(
    adaptation: Adaptation, prepare: Prepare
) -> Callable[[Variables, TestData], jax.Array]:
    """Returns jitted `score(variables, data) -> accuracy f[]`, percent, of one unseen client.

    The adaptation starts afresh.
    """
    count = count_unseen(adaptation, prepare)

    @jax.jit
    def score(variables: Variables, data: TestData) -> jax.Array:
        _, (right, samples) = count(variables, adaptation.init(variables), data)
        return 100 * right / jnp.maximum(samples, 1)

    return score


def _correct(logits: jax.Array, labels: jax.Array, valid: jax.Array) -> jax.Array:
    predicted = logits.argmax(-1).astype(labels.dtype)
    return ((predicted == labels) & valid).sum(dtype=jnp.int32)
