"""The loss of segmentation: cross entropy and soft Dice."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.engine.dtypes import wide

_EPSILON = 1e-5  # in numerator and denominator of Dice, as in HarmoFL's code


def as_classes(logits: jax.Array) -> jax.Array:
    """Returns logits f[..., classes]; those of one class f[..., 1] get a background's 0."""
    if logits.shape[-1] > 1:
        return logits
    return jnp.concatenate([jnp.zeros_like(logits), logits], -1)


def logits_of(logits: jax.Array, mask: jax.Array, classes: int) -> jax.Array:
    """Returns `as_classes(logits)`; ValueError if masks u8[B, H, W] of the classes do not fit."""
    logits = as_classes(logits)
    if logits.shape != (*mask.shape, classes):
        raise ValueError(
            f"the model's outputs are {list(logits.shape)} for masks {list(mask.shape)} of "
            f"{classes} classes; they must be logits [B, H, W, classes] of the image's size: use "
            f"UNet(num_classes={classes})"
        )
    return logits


def segmentation_loss(
    logits: jax.Array,
    label: Any,
    valid: jax.Array,
    classes: int,
    *,
    dice: float = 0.5,
    by_sample: bool = False,
) -> jax.Array:
    r"""Returns $(1 - a) H + a (1 - D)$ f[], cross entropy H and soft Dice D with the share a.

    $D = (2 \sum p y + \epsilon) / (\sum p + \sum y + \epsilon)$ with $\epsilon = 10^{-5}$

    The sums are over the labelled pixels of the valid samples of a batch, or of each sample
    (`by_sample`), whose D are then averaged. D is the mean over the classes without the background.
    H is the mean over the labelled pixels of the valid samples. All is at least float32.

    Logits are f[B, H, W, classes], or f[B, H, W, 1] for one class beside the background; the mask
    u8[B, H, W] has 255, or any value from `classes` on, for no label. `dice` is a in [0, 1].

    Raises:
      ValueError: the shapes of logits and masks do not fit.
    """
    mask = label["mask"]
    # Float16 counts to 65504, which is less than the pixels of one image of 256x256.
    logits = wide(logits_of(logits, mask, classes))
    labelled = (mask < classes) & valid[:, None, None]
    mask = jnp.where(labelled, mask, 0).astype(jnp.int32)
    # Before the softmax, because the gradient of a NaN is NaN even if its value is dropped.
    logits = jnp.where(labelled[..., None], logits, 0)
    seen = labelled.astype(logits.dtype)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, mask) * seen
    total = entropy.sum() / jnp.maximum(seen.sum(), 1)
    probability = jax.nn.softmax(logits) * seen[..., None]
    truth = jax.nn.one_hot(mask, logits.shape[-1], dtype=logits.dtype) * seen[..., None]
    axes = (1, 2) if by_sample else (0, 1, 2)
    shared_area, total_area = (probability * truth).sum(axes), (probability + truth).sum(axes)
    overlap = ((2 * shared_area + _EPSILON) / (total_area + _EPSILON))[..., 1:].mean(-1)
    if by_sample:
        count = jnp.maximum(valid.sum(dtype=logits.dtype), 1)
        overlap = jnp.where(valid, overlap, 0).sum() / count
    return (1 - dice) * total + dice * (1 - overlap)
