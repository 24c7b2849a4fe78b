"""Defines what is learned: a loss to minimize, and a score to report.

Labels are a tree of arrays [B, ...]; for classification, one array i32[B].
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_bn.arguments.ranges import Range, UpTo1, bounded
from fedjax_bn.engine.dtypes import wide
from fedjax_bn.engine.inputs import UNLABELLED, class_labels, known_labels
from fedjax_bn.engine.segmentation import (
    Overlaps,
    dice_and_iou,
    logits_of,
    overlaps,
    segmentation_loss,
)

PyTree = Any
_Classes = Annotated[int, Range("at least 2 and at most 255", lambda n: 2 <= n <= UNLABELLED)]


class Score(NamedTuple):
    """The score of a client in a summary.

    Attributes:
      name: such as "accuracy".
      of_batch: `of_batch(outputs, label, valid) -> tree`, jittable; what is kept of a batch.
      of_all: `of_all(kept) -> f[]`, the score in percent; `kept` are the trees of a client's
        batches, stacked along a new leading axis.
    """

    name: str
    of_batch: Callable[[PyTree, PyTree, jax.Array], PyTree]
    of_all: Callable[[PyTree], jax.Array]

    def __call__(self, outputs: PyTree, label: PyTree, valid: jax.Array | None = None) -> float:
        """Returns the score of all samples, in percent: `task.score(model(images), labels)`.

        Leaves of outputs and label are [N, ...]; `valid` bool[N] are the samples that count.
        """
        if valid is None:
            valid = jnp.ones(len(jax.tree.leaves(outputs)[0]), bool)
        batch_scores = self.of_batch(outputs, jax.tree.map(jnp.asarray, label), valid)
        # On the host, where counts are summed in 64 bits; [None] adds the axis of batches.
        return float(self.of_all(jax.tree.map(lambda leaf: np.asarray(leaf)[None], batch_scores)))


class Task(NamedTuple):
    """A task.

    Attributes:
      loss: `loss(outputs, label, valid) -> f[]`, a mean over the valid samples bool[B].
      score: the score that is reported.
      classifies: whether outputs are logits f[B, classes] and labels i32[B]; methods that need
        these refuse other tasks.
      segments: C where outputs are logits f[B, H, W, C] and labels masks; 0 for other tasks.
      nested: whether a class of a mask is inside the one before, see `segmentation`.
    """

    loss: Callable[[PyTree, PyTree, jax.Array], jax.Array]
    score: Score
    classifies: bool = False
    segments: int = 0
    nested: bool = False


def classification() -> Task:
    """Returns the task of mean cross entropy, whose score is accuracy in percent."""
    return Task(cross_entropy, Score("accuracy", _count_right, _share_right), classifies=True)


@bounded
def segmentation(
    classes: _Classes, *, dice: UpTo1 = 0.5, by_sample: bool = False, nested: bool = False
) -> Task:
    """Returns the task of cross entropy and soft Dice, whose score is the mean Dice in percent.

    The model returns logits f[B, H, W, classes], or f[B, H, W, 1] for one class, of the image's
    size. Labels are {"mask": u8[B, H, W]} with the class of each pixel, 0 for the background and
    255 for a pixel that neither the loss nor the score counts; with "volume": i32[B] slices of one
    volume are scored together. The score is the mean over the classes without the background, then
    over images or volumes: 100 where neither mask has a class, 0 where only one has it.

    Args:
      classes: number of classes with the background, from 2 to 255.
      dice: the share of 1 - Dice in the loss; the rest is cross entropy.
      by_sample: whether the loss takes Dice of each sample, not of the batch.
      nested: whether each class is inside the one before, as the optic cup in the disc: a class is
        then scored with all later ones.

    Raises:
      ValueError: `classes` is out of its range; at use, logits are of another number of classes.
    """

    def of_batch(logits: jax.Array, label: Any, valid: jax.Array) -> Overlaps:
        predicted = logits_of(logits, label["mask"], classes).argmax(-1).astype(jnp.uint8)
        return overlaps(predicted, label, valid, classes, nested=nested)

    loss = partial(segmentation_loss, classes=classes, dice=dice, by_sample=by_sample)
    return Task(loss, Score("Dice", of_batch, _mean_dice), segments=classes, nested=nested)


def _mean_dice(overlaps: Overlaps) -> jax.Array:
    """Returns the mean Dice f[] in percent of batches [T, B, ...]; 0 without samples."""
    joined = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), overlaps)
    (dice, _), weights = dice_and_iou(joined)
    return 100 * (dice.mean(-1) * weights).sum() / weights.sum().clip(1e-9)


def accuracy(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Returns the percentage of outputs f[N, C] that are largest at their class; 0 without samples.

    Outputs are logits or probabilities, `labels` whole numbers [N] in 0..C-1; others are a
    ValueError.
    """
    return classification().score(*_answers(outputs, labels))


def confusion(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns how many samples of each class (rows) got each answer (columns), i64[C, C].

    Takes the arguments of `accuracy` and raises its errors.
    """
    outputs, labels = _answers(outputs, labels)
    classes = outputs.shape[-1]
    # Class and answer as one number, so that all pairs are counted at once.
    pairs = labels.astype(np.int64) * classes + outputs.argmax(-1)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def _answers(outputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns both on the host, labels as i32[N]; raises ValueError if they do not fit."""
    outputs, labels = np.asarray(outputs), np.asarray(labels)
    if outputs.ndim != 2 or not outputs.shape[1] or labels.shape != outputs.shape[:1]:
        raise ValueError(
            f"outputs {list(outputs.shape)} and labels {list(labels.shape)} must be [N, classes] "
            "and [N]: one-hot labels need .argmax(-1)"
        )
    return outputs, class_labels(labels, "labels", outputs.shape[1])


def cross_entropy(logits: jax.Array, label: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the mean cross entropy f[] of logits f[B, classes] and labels i32[B].

    It is over the valid bool[B] samples whose label is a class, in at least float32.
    """
    label, in_range = known_labels(label, logits.shape[-1])
    # `known_labels` replaced a label outside the classes by 0, so that its loss is finite.
    losses = optax.softmax_cross_entropy_with_integer_labels(wide(logits), label)
    return masked_mean(losses, valid & in_range)


def _count_right(logits: jax.Array, label: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the numbers of right answers and samples, i32[2]; arguments as in `cross_entropy`."""
    label, in_range = known_labels(label, logits.shape[-1])
    valid = valid & in_range
    right = (logits.argmax(-1).astype(label.dtype) == label) & valid
    return jnp.stack([right.sum(dtype=jnp.int32), valid.sum(dtype=jnp.int32)])


def _share_right(counts: jax.Array) -> jax.Array:
    """Returns the accuracy f[] in percent from counts i32[batches, 2]; 0 without samples."""
    right, samples = counts.sum(0)
    return 100 * right / samples.clip(1)  # in float64 where the counts are NumPy's


def masked_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the mean f[] of `values` f[N] weighted by counts or a mask [N]; 0 if all are 0.

    It is computed in at least float32, because 16 bits hold neither large sums nor large counts.
    """
    values = wide(values)
    weights = weights.astype(values.dtype)
    # Masked before the product, because NaN times 0 is NaN.
    values = jnp.where(weights > 0, values, 0)
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1)


def require_classifier(method: str, task: Task) -> None:
    """Raises ValueError if the task has no classifier's logits, which the method needs."""
    if not task.classifies:
        raise ValueError(
            f"{method} needs the logits of a classifier, and its task scores {task.score.name!r}: "
            "use a method such as fedbn"
        )
