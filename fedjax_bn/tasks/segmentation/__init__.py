"""Segmentation of images: the loss and the scores of `task.segmentation`.

A model maps images f[B, H, W, C] to logits f[B, H, W, classes], class 0 being the background, or
f[B, H, W, 1] for one class, whose probability is the logit's sigmoid. Labels are masks, see
`data.labels`.
"""

from fedjax_bn.engine.segmentation import dice_and_iou, overlaps, regions_of, segmentation_loss
from fedjax_bn.tasks.segmentation.surfaces import hd95_and_assd, surface_distances, surface_scores

__all__ = ["dice_and_iou", "overlaps", "regions_of", "segmentation_loss"]
__all__ += ["hd95_and_assd", "surface_distances", "surface_scores"]
