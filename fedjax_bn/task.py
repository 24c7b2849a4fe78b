"""What is learned: a loss to train by, and a score to report.

Labels are a tree of arrays whose leaves begin with [B], for classification one array i32[B].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.engine.inputs import known_labels

PyTree = Any


class Score(NamedTuple):
    """What a summary shows of a client.

    Attributes:
      name: such as "accuracy".
      of_batch: `of_batch(outputs, label, valid) -> tree`, jitted: what is kept of a batch.
      of_all: `of_all(kept) -> f[]`, percent; `kept` are the trees of a client's batches, stacked
        along a new leading axis.
    """

    name: str
    of_batch: Callable[[PyTree, PyTree, jax.Array], PyTree]
    of_all: Callable[[PyTree], jax.Array]


class Task(NamedTuple):
    """A task.

    Attributes:
      loss: `loss(outputs, label, valid) -> f[]`, a mean over the valid samples bool[B].
      score: what is reported.
      classifies: whether outputs are logits f[B, classes] and labels i32[B]; methods that need
        these refuse other tasks.
    """

    loss: Callable[[PyTree, PyTree, jax.Array], jax.Array]
    score: Score
    classifies: bool = False


def classification() -> Task:
    """Mean cross entropy, and accuracy in percent."""
    return Task(cross_entropy, Score("accuracy", _count_right, _share_right), classifies=True)


def cross_entropy(logits: jax.Array, label: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the mean cross entropy f[] over the valid samples whose label is a class.

    Args:
      logits: f[B, classes].
      label: i32[B].
      valid: bool[B].
    """
    label, known = known_labels(label, logits.shape[-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return masked_mean(losses, valid & known)


def _count_right(logits: jax.Array, label: jax.Array, valid: jax.Array) -> jax.Array:
    """i32[2]: right answers and samples; arguments as in `cross_entropy`."""
    label, known = known_labels(label, logits.shape[-1])
    valid = valid & known
    right = (logits.argmax(-1).astype(label.dtype) == label) & valid
    return jnp.stack([right.sum(dtype=jnp.int32), valid.sum(dtype=jnp.int32)])


def _share_right(counts: jax.Array) -> jax.Array:
    """Accuracy f[] in percent, of counts i32[batches, 2]; 0 without samples."""
    right, samples = counts.sum(0)
    return 100 * right / samples.clip(1)  # in float64 where the counts are NumPy's


def masked_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean f[] of `values` f[N] with weights (or a mask) [N]; 0 where all weights are 0."""
    weights = weights.astype(values.dtype)
    values = jnp.where(weights > 0, values, 0)
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1)


def require_classifier(method: str, task: Task) -> None:
    """Raises ValueError where a method needs a classifier's logits and the task has none."""
    if not task.classifies:
        raise ValueError(
            f"{method} needs the logits of a classifier, but its task reports {task.score.name!r} "
            "of other outputs: use a method that trains any task, such as fedavg or fedbn"
        )
