"""Detection as a task: what methods train by, and what a summary reports."""

from typing import Any

import jax
import numpy as np

from fedjax_bn.detection.average_precision import THRESHOLDS, Found, mean_average_precision
from fedjax_bn.detection.boxes import Anchors
from fedjax_bn.detection.decode import EVALUATION, Detections, Keeping, detect
from fedjax_bn.detection.loss import Outputs, Recipe, detection_loss
from fedjax_bn.task import Score, Task

_SCORES = {"mAP50": THRESHOLDS[:1], "mAP50-95": THRESHOLDS}


def detection(
    anchors: Anchors,
    *,
    recipe: Recipe | None = None,
    keeping: Keeping = EVALUATION,
    score: str = "mAP50",
) -> Task:
    """Returns the task of a detector with anchors, such as `detection(model.anchors)`.

    Labels are {"boxes": corners f[B, M, 4] in [0, 1] of the image, "class": i32[B, M]}, with class
    -1 for padding and -2 - c for a crowd of class c, which no client learns and no detection
    misses. Outputs are those of the levels, f[B, H, W, A, 5 + C].

    Args:
      anchors: of the model.
      recipe: the choices of the loss, `detection.Recipe()` by default.
      keeping: which predictions are scored.
      score: "mAP50" or "mAP50-95", in percent; 0 where there are no boxes.

    Raises:
      ValueError: the score is unknown; or a level lacks its stride or its anchors, levels have
        different numbers of them, or a size or stride is not above 0.
    """
    if score not in _SCORES:
        raise ValueError(f"score={score!r} is unknown; valid are {', '.join(_SCORES)}")
    _check_anchors(anchors)
    recipe, thresholds = recipe or Recipe(), _SCORES[score]

    def loss(outputs: Outputs, label: Any, valid: jax.Array) -> jax.Array:
        return detection_loss(outputs, label, valid, anchors, recipe)

    def of_batch(
        outputs: Outputs, label: Any, valid: jax.Array
    ) -> tuple[Detections, Any, jax.Array]:
        return detect(outputs, anchors, keeping), label, valid

    def of_all(kept: tuple[Detections, Any, Any]) -> Any:
        def on_host(kept: Any) -> np.ndarray:
            detections, label, valid = jax.tree.map(np.asarray, kept)
            valid = valid.astype(bool)
            leaves = (*detections, label["boxes"], label["class"])
            # Batches [T, B, ...] become images that count, [N, ...].
            found = [leaf.reshape(-1, *leaf.shape[valid.ndim :])[valid.ravel()] for leaf in leaves]
            value = mean_average_precision(Found(*found), thresholds)
            return np.nan_to_num(value).astype(detections.scores.dtype)

        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(kept))
        if not traced:  # a callback would only copy to the host and back
            return on_host(kept)
        shape = jax.ShapeDtypeStruct((), kept[0].scores.dtype)
        return jax.pure_callback(on_host, shape, kept, vmap_method="sequential")

    return Task(loss, Score(score, of_batch, of_all))


def _check_anchors(anchors: Anchors) -> None:
    """Raises ValueError unless the anchors make a detector."""
    sizes, strides = anchors
    if not sizes or len(sizes) != len(strides) or len({len(level) for level in sizes}) != 1:
        raise ValueError(
            f"anchors have {[len(level) for level in sizes]} sizes on their levels and "
            f"{len(strides)} strides: give each level one stride and all the same number of sizes"
        )
    numbers = [number for level in sizes for size in level for number in size]
    if not numbers or min(*numbers, *strides) <= 0:
        raise ValueError(f"anchors need sizes and strides above 0, not {sizes} and {strides}")
