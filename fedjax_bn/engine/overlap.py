"""Overlaps of predicted and true masks: Dice and IoU of images or volumes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.engine.inputs import UNLABELLED


class Overlaps(NamedTuple):
    """Pixel counts of samples."""

    # i32[N, R, 3], for each region the pixels of both masks, of the predicted, of the true
    counts: jax.Array
    valid: jax.Array  # bool[N], the samples that count
    # i32[N], samples with the same number are scored together; None if each is alone
    volume: jax.Array | None


def regions_of(mask: jax.Array, classes: int, *, nested: bool = False) -> jax.Array:
    """Returns bool[..., classes - 1], in which region each pixel of a mask [...] is.

    A region is a class without the background; with `nested` it holds the later classes too, such
    as the optic disc with its cup. Unlabelled pixels are in no region.
    """
    number = np.arange(1, classes).astype(mask.dtype)  # NumPy's, so that masks may be its too
    inside = mask[..., None] >= number if nested else mask[..., None] == number
    return inside & (mask != UNLABELLED)[..., None]


def overlaps(
    predicted: jax.Array, label: Any, valid: jax.Array, classes: int, *, nested: bool = False
) -> Overlaps:
    """Returns the counts of predicted masks u8[B, H, W] in the labelled pixels of true ones.

    `label` is {"mask": u8[B, H, W]}, with "volume": i32[B] if known; `valid` is bool[B]. `classes`
    are counted with the background; for `nested` see `regions_of`.
    """
    # What has no label counts for neither mask.
    labelled = (label["mask"] != UNLABELLED)[..., None]
    predicted_regions = regions_of(predicted, classes, nested=nested) & labelled
    true = regions_of(label["mask"], classes, nested=nested)
    counts = jnp.stack([predicted_regions & true, predicted_regions, true], -1).sum(
        (1, 2), dtype=jnp.int32
    )
    return Overlaps(counts, valid, label.get("volume"))


def dice_and_iou(counted: Overlaps) -> tuple[Any, Any]:
    """Returns Dice and IoU f[N, R] in [0, 1] of the volume of each sample, and weights f[N].

    A weighted mean is thus a mean over volumes. Both are 1 where neither mask has the region, and 0
    where one of them alone has it. Works on NumPy's arrays as on JAX's.
    """
    counts, valid, volume = counted
    weights = valid.astype("float32")
    if volume is not None:
        # Each sample gets the sums and the share of its volume, so that shapes are fixed.
        counts = _by_volume(counts * valid[:, None, None], volume)
        weights = weights / _by_volume(valid.astype("int32"), volume).clip(1)
    shared_area, sides = counts[..., 0], counts[..., 1] + counts[..., 2]
    # Where neither mask has the region, both quotients become 1.
    empty = sides == 0
    dice = (2 * shared_area + empty) / (sides + empty)
    iou = (shared_area + empty) / (sides - shared_area + empty)
    return (dice, iou), weights


def _by_volume(values: Any, volume: Any) -> Any:
    """Returns for each sample the sum of values i[N, ...] over the samples of its volume i[N]."""
    # The samples of a volume stand together: its sum is a difference of running sums.
    order = volume.argsort()
    ranked, number = values[order], volume[order]
    begin, end = (number.searchsorted(volume, side=side) for side in ("left", "right"))
    total = ranked.cumsum(0)
    return total[end - 1] - total[begin] + ranked[begin]
