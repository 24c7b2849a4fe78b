"""Detection: boxes in images, as a task that every method trains which needs no logits.

`detection(model.anchors)` is the task, `models.YOLOv5n` and `models.TinyDetector` are networks
whose anchors it reads. Everything is written from formulas of papers: YOLOv3 (Redmon & Farhadi
2018) for anchors and logistic classes, CIoU (Zheng et al. 2020), COCO's mean average precision.
"""

from fedjax_bn.detection.decode import (
    EVALUATION,
    PREDICTION,
    Detections,
    Keeping,
    decode,
    detect,
    suppress,
)
from fedjax_bn.detection.loss import Anchors, Recipe, detection_loss
from fedjax_bn.detection.task import Found, detection, mean_average_precision

__all__ = [
    "EVALUATION",
    "PREDICTION",
    "Anchors",
    "Detections",
    "Found",
    "Keeping",
    "Recipe",
    "decode",
    "detect",
    "detection",
    "detection_loss",
    "mean_average_precision",
    "suppress",
]
