"""Detection as a task: what methods train by, and what a summary reports."""

from typing import Any

import jax
import numpy as np

from fedjax_bn.detection.anchors import Anchors, checked
from fedjax_bn.detection.average_precision import THRESHOLDS, Found, mean_average_precision
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
    """The task of a detector with anchors, such as `detection(model.anchors)`.

    Labels are {"boxes": corners f[B, M, 4] in [0, 1] of the image, "class": i32[B, M]}, with class
    -1 for padding and -2 - c for a crowd of class c, which nobody learns and no detection misses.
    Outputs are those of the levels, f[B, H, W, A, 5 + C].

    Args:
      anchors: of the model.
      recipe: the choices of the loss, `detection.Recipe()` by default.
      keeping: which predictions are scored.
      score: "mAP50" or "mAP50-95", in percent; 0 where there are no boxes.

    Raises:
      ValueError: the score is unknown, or the anchors do not make sense.
    """
    if score not in _SCORES:
        raise ValueError(f"score={score!r} is unknown; valid are {', '.join(_SCORES)}")
    anchors, recipe, thresholds = checked(anchors), recipe or Recipe(), _SCORES[score]

    def loss(outputs: Outputs, label: Any, valid: jax.Array) -> jax.Array:
        return detection_loss(outputs, label, valid, anchors, recipe)

    def of_batch(
        outputs: Outputs, label: Any, valid: jax.Array
    ) -> tuple[Detections, Any, jax.Array]:
        return detect(outputs, anchors, keeping), label, valid

    def of_all(kept: tuple[Detections, Any, Any]) -> Any:
        def on_host(kept: Any) -> np.ndarray:
            value = mean_average_precision(found_of(kept), thresholds)
            return np.nan_to_num(value).astype(kept[0].scores.dtype)

        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(kept))
        if not traced:
            return on_host(jax.tree.map(np.asarray, kept))
        shape = jax.ShapeDtypeStruct((), kept[0].scores.dtype)
        return jax.pure_callback(
            lambda given: on_host(jax.tree.map(np.asarray, given)),
            shape,
            kept,
            vmap_method="sequential",
        )

    return Task(loss, Score(score, of_batch, of_all))


def found_of(kept: tuple[Detections, Any, Any]) -> Found:
    """What is kept of batches, [T, B, ...], as images that count, [N, ...]."""
    detections, label, valid = kept
    leaves = (*detections, label["boxes"], label["class"])
    valid = valid.astype(bool)
    return Found(
        *(leaf.reshape(-1, *leaf.shape[valid.ndim :])[valid.reshape(-1)] for leaf in leaves)
    )
