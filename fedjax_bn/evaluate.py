"""Accuracy of internal clients, each with its own model, and of unseen clients by adaptation.

Test data lie on the device in large batches; one call scores them all in one program.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.adaptation import Adaptation, running
from fedjax_bn.data.domain import Split
from fedjax_bn.data.images import Prepare
from fedjax_bn.federation import FederatedState
from fedjax_bn.local import parameter_dtype
from fedjax_bn.sharing import Variables, join


class TestData(NamedTuple):
    """Test samples of some clients as T batches, none of which mixes two clients.

    Attributes:
      images: u8[T, B, H, W, C] or f32[T, B, F].
      labels: i32[T, B].
      valid: bool[T, B].
      client: i32[T], whose batch it is.
    """

    images: jax.Array
    labels: jax.Array
    valid: jax.Array
    client: jax.Array


def stack_batches(splits: Sequence[Split], batch_size: int) -> TestData:
    """Cuts each client's split into batches in order, the last one padded, and stacks them all."""
    batch_size = min(batch_size, max(len(split.labels) for split in splits))
    images, labels, valid, client = [], [], [], []
    for k, split in enumerate(splits):
        size = len(split.labels)
        batches = -(-size // batch_size)
        padding = batches * batch_size - size
        for parts, array in ((images, split.images), (labels, split.labels.astype(np.int32))):
            padded = np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))
            parts.append(padded.reshape(batches, batch_size, *array.shape[1:]))
        valid.append(np.arange(batches * batch_size).reshape(batches, batch_size) < size)
        client.append(np.full(batches, k, np.int32))
    return TestData(*map(jnp.asarray, map(np.concatenate, (images, labels, valid, client))))


def score_clients(
    model: nn.Module, prepare: Prepare, num_clients: int
) -> Callable[[FederatedState, TestData], jax.Array]:
    """Returns jitted `score(state, data) -> accuracy f[K]`, percent, each client's own model."""
    adaptation = running(model)

    @jax.jit
    def score(state: FederatedState, data: TestData) -> jax.Array:
        def batch(_: None, inputs: TestData) -> tuple[None, jax.Array]:
            own = jax.tree.map(lambda leaf: leaf[inputs.client], state.personal)
            variables = join(state.shared, own)
            images = prepare(inputs.images, parameter_dtype(variables))
            logits, _ = adaptation.predict(variables, (), images)
            return None, _correct(logits, inputs)

        _, correct = jax.lax.scan(batch, None, data)
        totals = jnp.stack([correct, data.valid.sum(1, dtype=jnp.int32)])
        right, count = jax.vmap(
            lambda values: jax.ops.segment_sum(values, data.client, num_clients)
        )(totals)
        return 100 * right / jnp.maximum(count, 1)

    return score


def score_unseen(
    adaptation: Adaptation, prepare: Prepare
) -> Callable[[Variables, TestData], jax.Array]:
    """Returns jitted `score(variables, data) -> accuracy f[]`, percent, of one unseen client.

    Its batches are streamed in order through the adaptation, which starts afresh.
    """

    @jax.jit
    def score(variables: Variables, data: TestData) -> jax.Array:
        def batch(carry: tuple, inputs: TestData) -> tuple[tuple, jax.Array]:
            images = prepare(inputs.images, parameter_dtype(variables))
            logits, carry = adaptation.predict(variables, carry, images, inputs.valid)
            return carry, _correct(logits, inputs)

        _, correct = jax.lax.scan(batch, adaptation.init(variables), data)
        return 100 * correct.sum() / data.valid.sum()

    return score


def _correct(logits: jax.Array, batch: TestData) -> jax.Array:
    predicted = logits.argmax(-1).astype(batch.labels.dtype)
    return ((predicted == batch.labels) & batch.valid).sum(dtype=jnp.int32)
