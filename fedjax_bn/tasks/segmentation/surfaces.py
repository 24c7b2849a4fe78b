"""Distances between the surfaces of predicted and true masks, on the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # loads ndimage at its first use

from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.engine.segmentation import regions_of


def surface_distances(
    mask_a: np.ndarray, mask_b: np.ndarray, spacing: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distances of each surface's pixels to the other surface, f64[n] and f64[m].

    A surface is the pixels of a mask that share a side with its outside or with the border of the
    image. Distances are between the centres of pixels.

    Args:
      mask_a, mask_b: bool[H, W], or bool[D, H, W] of a volume; an empty one raises ValueError.
      spacing: between the centres of neighbours along each axis, such as millimetres; 1 by default.
    """
    if not (mask_a.any() and mask_b.any()):
        raise ValueError("a mask is empty: give two that have a surface")
    # Outside the box around both masks there is no surface, so the transform leaves it out.
    inside = scipy.ndimage.find_objects((mask_a | mask_b).astype(np.uint8))[0]
    surfaces = [
        mask[inside] & ~scipy.ndimage.binary_erosion(mask[inside]) for mask in (mask_a, mask_b)
    ]
    far = [scipy.ndimage.distance_transform_edt(~surface, sampling=spacing) for surface in surfaces]
    return far[1][surfaces[0]], far[0][surfaces[1]]


def hd95_and_assd(
    mask_a: np.ndarray, mask_b: np.ndarray, spacing: Sequence[float] | None = None
) -> tuple[float, float]:
    """Returns the 95 % Hausdorff distance and the average symmetric surface distance.

    HD95 is the greater of the 95th percentiles of the two directions (Metrics Reloaded,
    Maier-Hein et al. 2024). MedPy takes the percentile of both directions together, which is lower
    where one direction is much worse, and can be higher by its interpolation between few pixels.
    ASSD is the mean over the pixels of both surfaces. Both are NaN where a mask is empty, else in
    the unit of `surface_distances`, which has the arguments.
    """
    if not (mask_a.any() and mask_b.any()):
        return np.nan, np.nan
    distances = surface_distances(mask_a, mask_b, spacing)
    hd95 = max(np.percentile(far, 95) for far in distances)
    return float(hd95), float(np.concatenate(distances).mean())


def surface_scores(
    predicted: np.ndarray,
    label: Any,
    classes: int,
    volumes: Sequence[np.ndarray] | None = None,
    *,
    nested: bool = False,
) -> np.ndarray:
    """Returns HD95 and ASSD of every volume or image and region, f64[V, R, 2].

    If the spacing is known, the slices of a volume are scored together, in millimetres. Otherwise
    each sample is scored alone, in pixels, and a volume has the mean over the samples where both
    masks have the region. NaN is where one or both masks of a volume lack the region. Predictions
    in unlabelled pixels are ignored.

    Args:
      predicted: u8[N, H, W].
      label: {"mask": u8[N, H, W]}, and "volume": i32[N] and "spacing": f32[N, 3] if known.
      classes, nested: as in `engine.segmentation.overlaps`.
      volumes: the samples of each; `volumes_of(label)` by default.
    """
    mask, spacing = label["mask"], label.get("spacing")
    volumes = volumes_of(label) if volumes is None else volumes

    def scores(samples: np.ndarray) -> list[tuple[float, float]]:
        true = regions_of(mask[samples], classes, nested=nested)
        labelled = (mask[samples] != UNLABELLED)[..., None]
        predicted_regions = regions_of(predicted[samples], classes, nested=nested) & labelled
        sizes = np.ones(3) if spacing is None else np.asarray(spacing[samples[0]], float)
        if len(samples) == 1:  # an image has rows and columns
            predicted_regions, true, sizes = predicted_regions[0], true[0], sizes[1:]
        regions = [(predicted_regions[..., r], true[..., r]) for r in range(classes - 1)]
        return [hd95_and_assd(*masks, sizes) for masks in regions]

    table = np.full((len(volumes), classes - 1, 2), np.nan)
    for row, samples in zip(table, volumes, strict=True):
        # Volume by volume, because regions take a byte for each pixel and class.
        parts = [samples] if spacing is not None else samples[:, None]
        part_scores = np.array([scores(part) for part in parts])
        count = np.isfinite(part_scores).sum(0)
        np.divide(np.nansum(part_scores, 0), count, out=row, where=count > 0)
    return table


def volumes_of(label: Any, order: np.ndarray | None = None) -> list[np.ndarray]:
    """Returns the samples i64[n] of each volume, the first volume first; without any, each sample.

    `order` i[N] ascends along the slices of a volume; None if they are in their order.
    """
    # Without volumes, each sample is one of its own.
    numbers = np.arange(len(label["mask"]))
    volume, place = label.get("volume", numbers), numbers if order is None else order
    ranked = np.lexsort((place, volume))
    ends = 1 + np.flatnonzero(np.diff(volume[ranked]))
    return sorted(np.split(ranked, ends), key=np.min) if len(ranked) else []
