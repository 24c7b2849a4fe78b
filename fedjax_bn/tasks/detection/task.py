"""Detection as a task: decoded boxes, and mean average precision as the score.

Shapes of detections are fixed: every image has D of them, of which unused ones have class -1.

Average precision is COCO's, computed on the host in float64. For every class the detections of all
images are sorted by score. A detection is right if its IoU with a box of its class and image is at
least t and no better detection matches this box. The average precision is the mean, over the
recalls 0, 0.01, ..., 1, of the best precision at that recall or above. The mAP at t is its mean
over the classes that have boxes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_bn.task import Score, Task
from fedjax_bn.tasks.detection.loss import (
    Anchors,
    Outputs,
    Recipe,
    decode_offsets,
    detection_loss,
    iou,
    to_corners,
)

THRESHOLDS = tuple(np.linspace(0.5, 0.95, 10).tolist())
_RECALLS = np.linspace(0, 1, 101)
_MOST = 100  # number of detections per class and image that count
_SCORES = {"mAP50": THRESHOLDS[:1], "mAP50-95": THRESHOLDS}


class Detections(NamedTuple):
    """The detections in images, best first."""

    boxes: jax.Array  # corners f[B, D, 4] in [0, 1] of the image; 0 where there is nothing
    scores: jax.Array  # f[B, D] in [0, 1]; 0 where there is nothing
    classes: jax.Array  # i32[B, D]; -1 where there is nothing


class DetectedImages(NamedTuple):
    """Detections and true boxes of N images."""

    boxes: np.ndarray  # corners f[N, D, 4] of detections, in the unit of `true_boxes`
    scores: np.ndarray  # f[N, D]
    classes: np.ndarray  # i32[N, D]; -1 where there is nothing
    true_boxes: np.ndarray  # corners f[N, M, 4]
    # i32[N, M]; -1 where there is nothing, and -2 - c for a crowd of class c; detections that match
    # a crowd are neither right nor wrong
    true_classes: np.ndarray


class Keeping(NamedTuple):
    """Rules for which predictions to keep."""

    score: float = 0.001  # predictions need a score above this threshold, in [0, 1]
    # a box is dropped if its IoU with a better one of its class exceeds this, in [0, 1]
    overlap: float = 0.6
    # whether a box predicts only its best class, or every class above `score`
    best_class: bool = False
    # number of best predictions per image that enter suppression, at least 1
    candidates: int = 1000
    detections: int = 300  # D, the largest number of detections per image


# For evaluation, and for pictures.
EVALUATION = Keeping()
PREDICTION = Keeping(score=0.25, overlap=0.45, best_class=True, detections=100)


def decode_predictions(outputs: Outputs, anchors: Anchors) -> tuple[jax.Array, jax.Array]:
    """Returns all predictions: corners f[B, N, 4] in [0, 1] of the image, scores f[B, N, C].

    The score of class c is sigmoid(objectness) sigmoid(logit of c). Boxes are clipped to the image.
    `outputs` has one array f[B, H, W, A, 5 + C] per level.
    """
    boxes, scores = [], []
    for raw, sizes, stride in zip(outputs, *anchors, strict=True):
        batch, height, width, _, depth = raw.shape
        centres = decode_offsets(raw[..., :4], jnp.asarray(sizes, raw.dtype) / stride)
        across, down = (jnp.arange(n, dtype=raw.dtype) for n in (width, height))
        corner = jnp.stack(jnp.broadcast_arrays(across[None, :], down[:, None]), -1)
        centres = centres.at[..., :2].add(corner[:, :, None])
        corners = to_corners(centres) / jnp.asarray((width, height) * 2, raw.dtype)
        boxes.append(jnp.clip(corners, 0, 1).reshape(batch, -1, 4))
        score = jax.nn.sigmoid(raw[..., 4:5]) * jax.nn.sigmoid(raw[..., 5:])
        scores.append(score.reshape(batch, -1, depth - 5))
    return jnp.concatenate(boxes, 1), jnp.concatenate(scores, 1)


def suppress(boxes: jax.Array, scores: jax.Array, keeping: Keeping = EVALUATION) -> Detections:
    """Applies non-maximum suppression by class to corners f[B, N, 4] with scores f[B, N, C]."""

    def of_image(boxes: jax.Array, scores: jax.Array) -> Detections:
        # The n best pairs of box and class belong to the n boxes with the best top scores.
        limit, number = min(keeping.candidates, len(boxes)), scores.shape[-1]
        best, place = lax.top_k(scores.max(-1), limit)
        if keeping.best_class:
            boxes, classes = boxes[place], scores[place].argmax(-1).astype(jnp.int32)
            scores = best
        else:
            scores, pair = lax.top_k(
                scores[place].reshape(-1), min(keeping.candidates, limit * number)
            )
            row, classes = jnp.divmod(pair, number)
            boxes = boxes[place[row]]
        depth = keeping.detections

        def goes_on(state: tuple) -> jax.Array:
            count, alive, _ = state
            return (count < depth) & alive.any()

        def keep_one(state: tuple) -> tuple:
            count, alive, chosen = state
            best = jnp.argmax(alive).astype(jnp.int32)  # the first, because scores are sorted
            beaten = (iou(boxes[best], boxes) > keeping.overlap) & (classes[best] == classes)
            alive &= ~beaten & (jnp.arange(len(alive), dtype=jnp.int32) != best)
            return count + 1, alive, chosen.at[count].set(best)

        start = (jnp.zeros((), jnp.int32), scores > keeping.score, jnp.zeros(depth, jnp.int32))
        count, _, chosen = lax.while_loop(goes_on, keep_one, start)
        used = jnp.arange(depth, dtype=jnp.int32) < count
        return Detections(
            jnp.where(used[:, None], boxes[chosen], 0),
            jnp.where(used, scores[chosen], 0),
            jnp.where(used, classes[chosen], -1),
        )

    return jax.vmap(of_image)(boxes, scores)


def detect(outputs: Outputs, anchors: Anchors, keeping: Keeping = EVALUATION) -> Detections:
    """Returns the detections in images from the outputs of a network for them."""
    return suppress(*decode_predictions(outputs, anchors), keeping)


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
      anchors: the model's anchors; levels without a stride or with different numbers of anchors,
        and sizes or strides not above 0, raise ValueError.
      recipe: the settings of the loss, `detection.Recipe()` by default.
      keeping: which predictions are scored.
      score: "mAP50" or "mAP50-95", in percent; 0 where there are no boxes.
    """
    if score not in _SCORES:
        raise ValueError(f"score={score!r} is unknown; valid are {', '.join(_SCORES)}")
    sizes, strides = anchors
    numbers = [number for level in sizes for size in level for number in size]
    counts = {len(level) for level in sizes}
    if len(sizes) != len(strides) or len(counts) != 1 or min(*numbers, *strides, 1) <= 0:
        remedy = "give each level a stride and equally many sizes, above 0"
        raise ValueError(f"anchors have the sizes {sizes} and strides {strides}: {remedy}")
    thresholds = _SCORES[score]

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


def mean_average_precision(images: DetectedImages, thresholds: Sequence[float] = (0.5,)) -> float:
    """Returns mAP in percent, the mean over thresholds and classes with boxes; NaN without boxes.

    `thresholds` are least IoUs t; (0.5,) is mAP50, `THRESHOLDS` is mAP50-95.
    """
    images = DetectedImages(*map(np.asarray, images))
    present = np.unique(images.true_classes[images.true_classes >= 0])
    values = [_average_precision(images, number, thresholds) for number in present.tolist()]
    return 100 * float(np.mean(values)) if values else float("nan")


def _average_precision(
    images: DetectedImages, number: int, thresholds: Sequence[float]
) -> np.ndarray:
    """Returns the average precision f64[thresholds] in [0, 1] for one class with boxes."""
    scores, right, ignored = [], [], []
    detected = images.classes == number
    crowd = images.true_classes == -2 - number
    true = (images.true_classes == number) | crowd
    for image in np.flatnonzero(detected.any(1)):
        index = np.flatnonzero(detected[image])
        index = index[np.argsort(-images.scores[image, index], kind="stable")][:_MOST]
        true_index = np.flatnonzero(true[image])
        true_index = true_index[np.argsort(crowd[image, true_index], kind="stable")]
        boxes = images.boxes[image, index].astype(float)
        true_boxes = images.true_boxes[image, true_index].astype(float)
        matched = _match(boxes, true_boxes, crowd[image, true_index], thresholds)
        scores.append(images.scores[image, index])
        right.append(matched[0])
        ignored.append(matched[1])
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
    """Returns which of d detections, best first, are right, and which do not count: bool[t, d]."""
    # `true` has boxes before crowds; several detections may match the same crowd.
    right, ignored = np.zeros((2, len(thresholds), len(boxes)), bool)
    if not len(true):
        return right, ignored
    overlap = overlaps_of(boxes, true, crowd)
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


def overlaps_of(boxes: np.ndarray, true: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """Returns IoU f[d, m] of corners f[d, 4] and f[m, 4]; 0 where neither box has an area.

    With a crowd, bool[m], it is the share of a detection that is inside the crowd.
    """
    low = np.maximum(boxes[:, None, :2], true[:, :2])
    high = np.minimum(boxes[:, None, 2:], true[:, 2:])
    intersection = np.clip(high - low, 0, None).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)[:, None]
    union = np.where(crowd, area, area + (true[:, 2:] - true[:, :2]).prod(-1) - intersection)
    return np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0)
