"""Distances between the surfaces of predicted and true masks, on the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # loads ndimage at its first use

from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.segmentation.overlap import regions_of


def surface_distances(
    one: np.ndarray, other: np.ndarray, spacing: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distances of each surface's pixels to the other surface, f64[n] and f64[m].

    A surface is the pixels of a mask that share a side with its outside or with the border of the
    image. Distances are between the centres of pixels.

    Args:
      one, other: bool[H, W], or bool[D, H, W] of a volume.
      spacing: between the centres of neighbours along each axis, such as millimetres; 1 by default.

    Raises:
      ValueError: a mask is empty.
    """
    if not (one.any() and other.any()):
        raise ValueError("a mask is empty, so that it has no surface: give two that are not")
    # Outside the box around both masks there is no surface, so the transform leaves it out.
    inside = scipy.ndimage.find_objects((one | other).astype(np.uint8))[0]
    surfaces = [mask[inside] & ~scipy.ndimage.binary_erosion(mask[inside]) for mask in (one, other)]
    far = [scipy.ndimage.distance_transform_edt(~surface, sampling=spacing) for surface in surfaces]
    return far[1][surfaces[0]], far[0][surfaces[1]]


def hd95_and_assd(
    one: np.ndarray, other: np.ndarray, spacing: Sequence[float] | None = None
) -> tuple[float, float]:
    """Returns the 95 % Hausdorff distance and the average symmetric surface distance.

    HD95 is the greater of the 95th percentiles of the two directions (Metrics Reloaded,
    Maier-Hein et al. 2024). MedPy takes the percentile of both directions together, which is at
    most as large. ASSD is the mean over the pixels of both surfaces. Both are NaN where a mask is
    empty.

    Args:
      one, other, spacing: as in `surface_distances`, whose unit the distances have.
    """
    if not (one.any() and other.any()):
        return np.nan, np.nan
    both = surface_distances(one, other, spacing)
    return float(max(np.percentile(far, 95) for far in both)), float(np.concatenate(both).mean())


def surface_scores(
    predicted: np.ndarray, label: Any, classes: int, *, nested: bool = False
) -> np.ndarray:
    """Returns HD95 and ASSD of every volume or image and region, f64[V, R, 2].

    Samples of one volume are its slices, in their order, if the spacing is known; the distances are
    then in millimetres. Without a spacing each sample counts alone, in pixels. NaN is where one or
    both masks lack the region. Predictions in unlabelled pixels are ignored.

    Args:
      predicted: u8[N, H, W].
      label: {"mask": u8[N, H, W]}, and "volume": i32[N] and "spacing": f32[N, 3] if known.
      classes, nested: as in `overlap.overlaps`.
    """
    mask, spacing = label["mask"], label.get("spacing")
    found = np.full((len(units := _units_of(label)), classes - 1, 2), np.nan)
    for unit, row in zip(units, found, strict=True):
        # One unit at a time, because regions take a byte for each pixel and class.
        true = regions_of(mask[unit], classes, nested=nested)
        known = (mask[unit] != UNLABELLED)[..., None]
        own = regions_of(predicted[unit], classes, nested=nested) & known
        sizes = np.ones(3) if spacing is None else np.asarray(spacing[unit[0]], float)
        if len(unit) == 1:  # an image: rows and columns
            own, true, sizes = own[0], true[0], sizes[1:]
        row[:] = [hd95_and_assd(own[..., r], true[..., r], sizes) for r in range(classes - 1)]
    return found


def _units_of(label: Any) -> list[np.ndarray]:
    """Returns the numbers i64[n] of the samples of each volume, or of each sample alone."""
    if label.get("spacing") is None or label.get("volume") is None:
        return [np.array([n]) for n in range(len(label["mask"]))]
    number = label["volume"]
    return [np.flatnonzero(number == one) for one in dict.fromkeys(number.tolist())]
