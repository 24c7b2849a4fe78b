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
from scipy.special import ndtri

from fedjax_bn.arguments.ranges import AtLeast0, Range, UpTo1, bounded
from fedjax_bn.engine import segmentation as masks
from fedjax_bn.engine.dtypes import wide
from fedjax_bn.engine.imbalance import (
    BALANCED,
    ClassWeights,
    as_class_weights,
    focal_losses,
    mean_by_class,
    sums_by_class,
)
from fedjax_bn.engine.inputs import UNLABELLED, class_labels, known_labels
from fedjax_bn.engine.segmentation import Overlaps

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
      balanced: whether a round gives `loss` an argument `class_weights` f[C], by client.
      mean_loss: the loss of all samples; None for the mean of batches by their samples.
    """

    loss: Callable[..., jax.Array]
    score: Score
    classifies: bool = False
    segments: int = 0
    nested: bool = False
    balanced: bool = False
    mean_loss: Score | None = None


@bounded
def classification(*, class_weights: ClassWeights = None, focal: AtLeast0 = 0.0) -> Task:
    r"""Returns the task of mean cross entropy, whose score is accuracy in percent.

    $\sum_i w_{y_i} (1 - p_i)^\gamma (-\log p_i) / \sum_i w_{y_i}$ for classes y of probability p

    With weights it is PyTorch's `CrossEntropyLoss(weight=w)`, with gamma the focal loss (Lin et al.
    2017, Eq. 4 and 5). Scores, and the clients' weights in the average, stay as they are.

    Args:
      class_weights: w, numbers for the classes, the same for all clients; or "balanced": as in
        scikit-learn n / (C n_c), of the samples on which a client trains in the round. These are
        all its own with local epochs, those drawn with local steps. No count leaves the client.
      focal: gamma, at least 0.

    Raises:
      ValueError: a weight is negative, or all are 0; at use, there are not as many as outputs.
    """
    weights, score = as_class_weights(class_weights), Score("accuracy", _count_right, _share_right)
    if weights is None and not focal:
        return Task(cross_entropy, score, classifies=True)
    loss = partial(cross_entropy, class_weights=weights, focal=focal)

    def of_batch(logits: jax.Array, label: jax.Array, valid: jax.Array) -> jax.Array:
        return sums_by_class(*_losses(logits, label, valid, focal), logits.shape[-1])

    mean = weights and Score("loss", of_batch, lambda sums: mean_by_class(sums.sum(0), weights))
    return Task(loss, score, classifies=True, balanced=weights == BALANCED, mean_loss=mean or None)


@bounded
def segmentation(
    classes: _Classes,
    *,
    dice: UpTo1 = 0.5,
    by_sample: bool = False,
    nested: bool = False,
    class_weights: ClassWeights = None,
    focal: AtLeast0 = 0.0,
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
      class_weights, focal: as in `classification`, of pixels, in the cross entropy alone: Dice is a
        mean over classes as it is.

    Raises:
      ValueError: an argument is out of its range; at use, logits or weights do not fit `classes`.
    """

    def of_batch(logits: jax.Array, label: Any, valid: jax.Array) -> Overlaps:
        predicted = masks.logits_of(logits, label["mask"], classes).argmax(-1).astype(jnp.uint8)
        return masks.overlaps(predicted, label, valid, classes, nested=nested)

    weights, score = as_class_weights(class_weights), Score("Dice", of_batch, _mean_dice)
    loss = partial(masks.segmentation_loss, classes=classes, dice=dice, by_sample=by_sample)
    if weights or focal:
        loss = partial(loss, class_weights=weights, focal=focal)
    balanced = weights == BALANCED
    return Task(loss, score, segments=classes, nested=nested, balanced=balanced)


def _mean_dice(overlaps: Overlaps) -> jax.Array:
    """Returns the mean Dice f[] in percent of batches [T, B, ...]; 0 without samples."""
    joined = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), overlaps)
    (dice, _), weights = masks.dice_and_iou(joined)
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


class Area(NamedTuple):
    """An area under the ROC curve and its 95 % limits, in 0 to 1; NaN if they are undefined."""

    area: float
    low: float
    high: float


def auc(probabilities: np.ndarray, labels: np.ndarray) -> Area:
    """Returns the area under the ROC curve of probabilities f[N, C] and labels [N].

    Of two classes it is the area of the second, else the mean over the classes that occur, of each
    against all others; of one class or of NaN it is undefined. The variance is DeLong's (Biometrics
    44, 1988) in O(N log N), as of Sun and Xu (IEEE Signal Processing Letters 21, 2014), of a mean
    that of the sum of placements. The limits are at 1.96 deviations, within [0, 1], and undefined
    if a class has one sample. Raises the errors of `accuracy`.
    """
    probabilities, labels = _answers(probabilities, labels)
    classes, occurring = probabilities.shape[1], np.unique(labels)
    if len(occurring) < 2 or np.isnan(probabilities).any():
        return Area(np.nan, np.nan, np.nan)
    areas, placements = [], np.zeros(len(labels))
    for number in [1] if classes == 2 else occurring:
        scores, is_class = probabilities[:, number], labels == number
        for rows, share in ((is_class, 1), (~is_class, -1)):
            # The share of the other side that a sample ranks above; equal ones count as a half.
            against = np.sort(scores[~rows])
            ranks = [np.searchsorted(against, scores[rows], side) for side in ("left", "right")]
            above = sum(ranks) / (2 * len(against))
            placements[rows] += share * above / rows.sum()
            areas += [above.mean()] if rows is is_class else []
    groups = [placements[labels == number] for number in occurring]
    area = float(np.mean(areas))
    if min(map(len, groups)) < 2:
        return Area(area, np.nan, np.nan)
    variance = sum(len(group) * group.var(ddof=1) for group in groups) / len(areas) ** 2
    margin = float(ndtri(0.975) * np.sqrt(variance))
    return Area(area, max(area - margin, 0.0), min(area + margin, 1.0))


def _answers(outputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns both on the host, labels as i32[N]; raises ValueError if they do not fit."""
    outputs, labels = np.asarray(outputs), np.asarray(labels)
    if outputs.ndim != 2 or not outputs.shape[1] or labels.shape != outputs.shape[:1]:
        shapes = f"outputs {list(outputs.shape)} and labels {list(labels.shape)}"
        raise ValueError(f"{shapes} must be [N, classes] and [N]: one-hot labels need .argmax(-1)")
    return outputs, class_labels(labels, "labels", outputs.shape[1])


def cross_entropy(
    logits: jax.Array,
    label: jax.Array,
    valid: jax.Array,
    *,
    class_weights: Any = None,
    focal: float = 0.0,
) -> jax.Array:
    """Returns the mean cross entropy f[] of logits f[B, classes] and labels i32[B].

    It is over the valid bool[B] samples whose label is a class, in at least float32; the options
    are those of `classification`, or class weights f[classes].
    """
    losses, label, counts = _losses(logits, label, valid, focal)
    if class_weights is None:
        return masked_mean(losses, counts)
    return mean_by_class(sums_by_class(losses, label, counts, logits.shape[-1]), class_weights)


def _losses(
    logits: jax.Array, label: jax.Array, valid: jax.Array, focal: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    label, in_range = known_labels(label, logits.shape[-1])
    # `known_labels` replaced a label outside the classes by 0, so that its loss is finite.
    losses = optax.softmax_cross_entropy_with_integer_labels(wide(logits), label)
    return focal_losses(losses, focal), label, valid & in_range


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
        score = task.score.name
        needs = f"needs the logits of a classifier, and its task scores {score!r}"
        raise ValueError(f"{method} {needs}: use a method such as fedbn")
