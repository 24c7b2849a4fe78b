"""Masks of images and volumes: the loss of segmentation, and Dice and IoU of predictions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.engine.dtypes import wide
from fedjax_bn.engine.imbalance import focal_losses, mean_by_class, sums_by_class
from fedjax_bn.engine.inputs import UNLABELLED

_EPSILON = 1e-5  # in numerator and denominator of Dice, as in HarmoFL's code


def as_classes(logits: jax.Array) -> jax.Array:
    """Returns logits f[..., classes]; those of one class f[..., 1] get a background's 0."""
    single = logits.shape[-1] == 1
    return jnp.concatenate([jnp.zeros_like(logits), logits], -1) if single else logits


def logits_of(logits: jax.Array, mask: jax.Array, classes: int) -> jax.Array:
    """Returns `as_classes(logits)`; ValueError if masks u8[B, H, W] of the classes do not fit."""
    logits = as_classes(logits)
    if logits.shape != (*mask.shape, classes):
        shapes = f"logits {list(logits.shape)} for masks {list(mask.shape)}"
        remedy = f"use UNet(num_classes={classes}), and masks of the image's size"
        raise ValueError(f"{shapes} of {classes} classes: {remedy}")
    return logits


def segmentation_loss(
    logits: jax.Array,
    label: Any,
    valid: jax.Array,
    classes: int,
    *,
    dice: float = 0.5,
    by_sample: bool = False,
    class_weights: Any = None,
    focal: float = 0.0,
) -> jax.Array:
    r"""Returns $(1 - a) H + a (1 - D)$ f[], cross entropy H and soft Dice D with the share a.

    $D = (2 \sum p y + \epsilon) / (\sum p + \sum y + \epsilon)$ with $\epsilon = 10^{-5}$

    The sums are over the labelled pixels of the valid samples of a batch, or of each sample
    (`by_sample`), whose D are then averaged. D is the mean over the classes without the background,
    H that over the labelled pixels of the valid samples, by `class_weights` and `focal` as in
    `task.classification`. All is at least float32.

    Logits and masks are those of `task.segmentation`, where values from `classes` on are no label;
    ValueError if their shapes do not fit. `dice` is a in [0, 1].
    """
    mask = label["mask"]
    # Float16 counts to 65504, which is less than the pixels of one image of 256x256.
    logits = wide(logits_of(logits, mask, classes))
    labelled = (mask < classes) & valid[:, None, None]
    mask = jnp.where(labelled, mask, 0).astype(jnp.int32)
    # Before the softmax, because the gradient of a NaN is NaN even if its value is dropped.
    logits = jnp.where(labelled[..., None], logits, 0)
    seen = labelled.astype(logits.dtype)
    truth = jax.nn.one_hot(mask, logits.shape[-1], dtype=logits.dtype)
    # Not by an index, whose gradient is a scatter, which runs value by value.
    entropy = jax.nn.logsumexp(logits, -1) - jnp.where(truth == 1, logits, 0).sum(-1)
    entropy = focal_losses(entropy, focal)
    if class_weights is None:
        total = (entropy * seen).sum() / jnp.maximum(seen.sum(), 1)
    else:
        sums = sums_by_class(entropy, mask, labelled, logits.shape[-1])
        total = mean_by_class(sums, class_weights)
    probability = jax.nn.softmax(logits) * seen[..., None]
    truth = truth * seen[..., None]
    axes = (1, 2) if by_sample else (0, 1, 2)
    shared_area, total_area = (probability * truth).sum(axes), (probability + truth).sum(axes)
    overlap = ((2 * shared_area + _EPSILON) / (total_area + _EPSILON))[..., 1:].mean(-1)
    if by_sample:
        count = jnp.maximum(valid.sum(dtype=logits.dtype), 1)
        overlap = jnp.where(valid, overlap, 0).sum() / count
    return (1 - dice) * total + dice * (1 - overlap)


class Overlaps(NamedTuple):
    """Pixel counts of samples."""

    # i32[N, R, 3], for each region the pixels of both masks, of the predicted, of the true
    counts: jax.Array
    valid: jax.Array  # bool[N], the samples that count
    # i32[N], samples with the same number are scored together; None if each is alone
    volume: jax.Array | None


def regions_of(mask: jax.Array, classes: int, *, nested: bool = False) -> jax.Array:
    """Returns bool[..., classes - 1], in which region each pixel of a mask [...] is.

    A region is a class but the background; with `nested` it holds the later classes too, such as
    the optic disc with its cup. Unlabelled pixels are in no region.
    """
    number = np.arange(1, classes).astype(mask.dtype)  # NumPy's, so that masks may be its too
    inside = mask[..., None] >= number if nested else mask[..., None] == number
    return inside & (mask != UNLABELLED)[..., None]


def overlaps(
    predicted: jax.Array, label: Any, valid: jax.Array, classes: int, *, nested: bool = False
) -> Overlaps:
    """Returns the counts of predicted masks u8[B, H, W] in the labelled pixels of true ones.

    `label` is {"mask": u8[B, H, W]}, with "volume": i32[B] if known; `valid` is bool[B]. For
    `classes` and `nested` see `regions_of`.
    """
    # What has no label counts for neither mask.
    labelled = (label["mask"] != UNLABELLED)[..., None]
    predicted_regions = regions_of(predicted, classes, nested=nested) & labelled
    true = regions_of(label["mask"], classes, nested=nested)
    pixels = jnp.stack([predicted_regions & true, predicted_regions, true], -1)
    return Overlaps(pixels.sum((1, 2), dtype=jnp.int32), valid, label.get("volume"))


def dice_and_iou(counted: Overlaps) -> tuple[Any, Any]:
    """Returns Dice and IoU f[N, R] in [0, 1] of the volume of each sample, and weights f[N].

    A weighted mean is thus a mean over volumes. Both are 1 where neither mask has the region, and 0
    where only one has it. Works on NumPy's arrays as on JAX's.
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
