"""Detection as a task: the loss by which methods train, and mean average precision as the score.

Average precision is COCO's, computed on the host in float64. For every class the detections of all
images are sorted by score. A detection is right if its IoU with a box of its class and image is at
least t and no better detection matches this box. The average precision is the mean, over the
recalls 0, 0.01, ..., 1, of the best precision at that recall or above. The mAP at t is its mean
over the classes that have boxes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_bn.task import Score, Task
from fedjax_bn.tasks.detection.decode import EVALUATION, Detections, Keeping, detect
from fedjax_bn.tasks.detection.loss import Anchors, Outputs, Recipe, detection_loss

THRESHOLDS = tuple(np.linspace(0.5, 0.95, 10).tolist())
_RECALLS = np.linspace(0, 1, 101)
_MOST = 100  # number of detections per class and image that count
_SCORES = {"mAP50": THRESHOLDS[:1], "mAP50-95": THRESHOLDS}


class DetectedImages(NamedTuple):
    """Detections and true boxes of N images.

    Attributes:
      boxes: corners f[N, D, 4] of detections, in the unit of `true_boxes`.
      scores: f[N, D].
      classes: i32[N, D]; -1 where there is nothing.
      true_boxes: corners f[N, M, 4].
      true_classes: i32[N, M]; -1 where there is nothing, and -2 - c for a crowd of class c;
        detections that match a crowd are neither right nor wrong.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    true_boxes: np.ndarray
    true_classes: np.ndarray


def detection(
    anchors: Anchors,
    *,
    recipe: Recipe | None = None,
    keeping: Keeping = EVALUATION,
    score: str = "mAP50",
) -> Task:
    """Returns the task of a detector with anchors, such as `detection(model.anchors)`.

    Labels are {"boxes": corners f[B, M, 4] in [0, 1] of the image, "class": i32[B, M]}, with class
    -1 for padding and -2 - c for a crowd of class c, which neither the loss nor recall counts. The
    model returns one output f[B, H, W, A, 5 + C] per level.

    Args:
      anchors: the model's anchors.
      recipe: the settings of the loss, `detection.Recipe()` by default.
      keeping: which predictions are scored.
      score: "mAP50" or "mAP50-95", in percent; 0 where there are no boxes.

    Raises:
      ValueError: the score is unknown; a level has no stride or no anchors; levels have different
        numbers of anchors; or a size or stride is not above 0.
    """
    if score not in _SCORES:
        raise ValueError(f"score={score!r} is unknown; valid are {', '.join(_SCORES)}")
    sizes, strides = anchors
    if not sizes or len(sizes) != len(strides) or len({len(level) for level in sizes}) != 1:
        raise ValueError(
            f"anchors have {[len(level) for level in sizes]} sizes on their levels and "
            f"{len(strides)} strides: give each level one stride and all the same number of sizes"
        )
    numbers = [number for level in sizes for size in level for number in size]
    if not numbers or min(*numbers, *strides) <= 0:
        raise ValueError(f"anchors need sizes and strides above 0, not {sizes} and {strides}")
    recipe, thresholds = recipe or Recipe(), _SCORES[score]

    def loss(outputs: Outputs, label: Any, valid: jax.Array) -> jax.Array:
        return detection_loss(outputs, label, valid, anchors, recipe)

    def of_batch(
        outputs: Outputs, label: Any, valid: jax.Array
    ) -> tuple[Detections, Any, jax.Array]:
        return detect(outputs, anchors, keeping), label, valid

    def of_all(batches: tuple[Detections, Any, Any]) -> Any:
        def on_host(batches: Any) -> np.ndarray:
            detections, label, valid = jax.tree.map(np.asarray, batches)
            valid = valid.astype(bool)
            leaves = (*detections, label["boxes"], label["class"])
            # Flattens batches [T, B, ...] to the N images that count, [N, ...].
            images = [leaf.reshape(-1, *leaf.shape[valid.ndim :])[valid.ravel()] for leaf in leaves]
            value = mean_average_precision(DetectedImages(*images), thresholds)
            return np.nan_to_num(value).astype(detections.scores.dtype)

        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(batches))
        if not traced:  # outside a trace a callback would only copy to the host and back
            return on_host(batches)
        shape = jax.ShapeDtypeStruct((), batches[0].scores.dtype)
        return jax.pure_callback(on_host, shape, batches, vmap_method="sequential")

    return Task(loss, Score(score, of_batch, of_all))


def mean_average_precision(
    images: DetectedImages, thresholds: Sequence[float] = (0.5,), limit: int = _MOST
) -> float:
    """Returns mAP in percent, the mean over thresholds and classes with boxes; NaN without boxes.

    Args:
      images: detections and true boxes of all images.
      thresholds: least IoUs t; (0.5,) is mAP50, `THRESHOLDS` is mAP50-95.
      limit: number of detections per class and image that count, the best ones.
    """
    images = DetectedImages(*map(np.asarray, images))
    present = np.unique(images.true_classes[images.true_classes >= 0])
    values = [_average_precision(images, number, thresholds, limit) for number in present.tolist()]
    return 100 * float(np.mean(values)) if values else float("nan")


def _average_precision(
    images: DetectedImages, number: int, thresholds: Sequence[float], limit: int
) -> np.ndarray:
    """Returns the average precision f64[thresholds] in [0, 1] for one class with boxes."""
    scores, right, ignored = [], [], []
    detected = images.classes == number
    crowd = images.true_classes == -2 - number
    true = (images.true_classes == number) | crowd
    for image in np.flatnonzero(detected.any(1)):
        index = np.flatnonzero(detected[image])
        index = index[np.argsort(-images.scores[image, index], kind="stable")][:limit]
        true_index = np.flatnonzero(true[image])
        true_index = true_index[np.argsort(crowd[image, true_index], kind="stable")]
        right_of_image, ignored_of_image = _match(
            images.boxes[image, index].astype(float),
            images.true_boxes[image, true_index].astype(float),
            crowd[image, true_index],
            thresholds,
        )
        scores.append(images.scores[image, index])
        right.append(right_of_image)
        ignored.append(ignored_of_image)
    total = (images.true_classes == number).sum()
    if not scores:
        return np.zeros(len(thresholds))
    # A stable sort, as in pycocotools, so that ties keep the order of images.
    order = np.argsort(-np.concatenate(scores), kind="stable")
    right, ignored = (np.concatenate(part, 1)[:, order] for part in (right, ignored))
    precisions = []
    for row, left_out in zip(right, ignored, strict=True):
        hits = np.cumsum(row[~left_out])
        if not len(hits):
            precisions.append(0.0)
            continue
        best = np.maximum.accumulate((hits / np.arange(1, len(hits) + 1))[::-1])[::-1]
        place = np.searchsorted(hits / total, _RECALLS, side="left")
        inside = place < len(best)
        precisions.append(np.where(inside, best[np.minimum(place, len(best) - 1)], 0).mean())
    return np.array(precisions)


def _match(
    boxes: np.ndarray, true: np.ndarray, crowd: np.ndarray, thresholds: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which of d detections, best first, are right, and which do not count: bool[t, d].

    `true` has boxes before crowds; several detections may match the same crowd.
    """
    right, ignored = np.zeros((2, len(thresholds), len(boxes)), bool)
    if not len(true):
        return right, ignored
    low = np.maximum(boxes[:, None, :2], true[:, :2])
    high = np.minimum(boxes[:, None, 2:], true[:, 2:])
    intersection = np.clip(high - low, 0, None).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)[:, None]
    # The IoU f64[d, m]; for a crowd, the share of the detection that is inside the crowd.
    union = np.where(crowd, area, area + (true[:, 2:] - true[:, :2]).prod(-1) - intersection)
    overlap = np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0)
    for t, threshold in enumerate(thresholds):
        # As in pycocotools, a perfect overlap reaches a threshold of 1 despite rounding.
        threshold, taken = min(threshold, 1 - 1e-10), np.zeros(len(true), bool)
        for d in np.flatnonzero(overlap.max(1) >= threshold):
            free = np.where(taken & ~crowd, -1, overlap[d])
            # A free box is preferred to any crowd; among equal overlaps the last one is matched.
            for group in (~crowd, crowd):
                value = np.where(group, free, -1)
                best = len(value) - 1 - np.argmax(value[::-1])
                if value[best] >= threshold:
                    taken[best] = True
                    right[t, d], ignored[t, d] = ~crowd[best], crowd[best]
                    break
    return right, ignored
