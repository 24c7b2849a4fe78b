"""Detection of boxes in images, as a task for every method that does not need logits.

`detection(model.anchors)` returns the task for a network with anchors, such as `models.YOLOv5n` or
`models.TinyDetector`. Everything was written from the formulas of papers: YOLOv3 (Redmon & Farhadi
2018) for anchors and logistic classes, CIoU (Zheng et al. 2020), COCO's mean average precision.
"""

from fedjax_bn.tasks.detection.loss import Anchors, Recipe, detection_loss
from fedjax_bn.tasks.detection.task import (
    PREDICTION,
    DetectedImages,
    Detections,
    Keeping,
    detect,
    detection,
    mean_average_precision,
)

__all__ = ["PREDICTION", "Anchors", "DetectedImages", "Detections", "Keeping", "Recipe"]
__all__ += ["detect", "detection", "detection_loss", "mean_average_precision"]
