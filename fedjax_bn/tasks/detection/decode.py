"""Decodes a detector's outputs into boxes and scores, and suppresses overlapping boxes.

Shapes are fixed: every image has D detections, of which unused ones have class -1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.tasks.detection.loss import Anchors, Outputs, decode_offsets, iou, to_corners


class Detections(NamedTuple):
    """The detections in images, best first.

    Attributes:
      boxes: corners f[B, D, 4] in [0, 1] of the image; 0 where there is nothing.
      scores: f[B, D] in [0, 1]; 0 where there is nothing.
      classes: i32[B, D]; -1 where there is nothing.
    """

    boxes: jax.Array
    scores: jax.Array
    classes: jax.Array


class Keeping(NamedTuple):
    """Rules for which predictions to keep.

    Attributes:
      score: predictions need a score above this threshold, in [0, 1].
      overlap: a box is dropped if its IoU with a better one of its class exceeds this, in [0, 1].
      best_class: whether a box predicts only its best class, or every class above `score`.
      candidates: number of best predictions per image that enter suppression, at least 1.
      detections: D, the largest number of detections per image.
    """

    score: float = 0.001
    overlap: float = 0.6
    best_class: bool = False
    candidates: int = 1000
    detections: int = 300


# For evaluation, and for pictures.
EVALUATION = Keeping()
PREDICTION = Keeping(score=0.25, overlap=0.45, best_class=True, detections=100)


def decode(outputs: Outputs, anchors: Anchors) -> tuple[jax.Array, jax.Array]:
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
    """Applies non-maximum suppression to corners f[B, N, 4] with scores f[B, N, C].

    It keeps the best boxes first; each one removes the overlapping boxes of its class.
    """

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
    """Returns `suppress(*decode(outputs, anchors), keeping)`."""
    return suppress(*decode(outputs, anchors), keeping)
