"""Checks images, labels and random keys, with the same error messages for every caller.

Images are bytes (uint8), which methods standardize, or floats, read as they are; channels are last.
Labels are one class a sample, whole numbers from 0. Inside a program, a label outside the classes
makes its sample invalid.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

UNLABELLED = 255  # the value of a pixel of a mask that has no class


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def check_image_dtype(dtype: Any, place: str = "images") -> None:
    """Raises ValueError unless a dtype is uint8 or floating; the message begins with `place`."""
    if dtype != np.uint8 and not _is_float(dtype):
        raise ValueError(f"{place} have dtype {dtype}: convert them to uint8, or scaled floats")


def check_images(images: np.ndarray, place: str = "images") -> None:
    """Raises ValueError for images [N, ...] of other dtypes, channels first, or bytes as floats."""
    check_image_dtype(images.dtype, place)
    shape = images.shape
    if len(shape) != 4:
        return
    # Up to four numbers of the last axis may be channels.
    if shape[1] in (1, 3) and min(shape[2:]) > 4:
        remedy = "use np.moveaxis(images, 1, -1)"
        raise ValueError(f"{place} {list(shape)} are not [N, H, W, C]: {remedy}")
    if _is_float(images.dtype) and _holds_bytes(images):
        raise ValueError(f"{place} are {images.dtype} numbers of bytes: use uint8, or images / 255")


def _holds_bytes(images: np.ndarray) -> bool:
    """Returns whether floats are whole numbers up to 255; all 0 or 1 may be scaled pixels."""
    highest = 0
    for start in range(0, len(images), 64):  # usually the first images are enough
        block = np.asarray(images[start : start + 64])
        if not ((block >= 0) & (block <= 255) & (block == np.floor(block))).all():
            return False
        highest = max(highest, block.max(initial=0))
    return highest > 1


def as_images(images: Any, place: str = "images") -> np.ndarray:
    """Returns images [N, ...] as uint8 or float32, with 64-bit JAX float64; see `check_images`."""
    images = np.asarray(images)
    check_images(images, place)
    if images.dtype == np.uint8:
        return images
    wide = jnp.result_type(float) if images.dtype.itemsize > 4 else np.float32
    return images.astype(wide, copy=False)


def class_labels(
    labels: np.ndarray, place: str, classes: int | None = None, valid: np.ndarray | None = None
) -> np.ndarray:
    """Returns labels, counted from 0, as i32[N].

    They are integers or whole floats, [N] or with the shape of `valid` (bool, the labels that
    count; by default all); `classes` is how many there are, None for any number. Others are a
    ValueError that begins with `place`.
    """
    labels = np.asarray(labels)
    # Labels become i32, so there are at most 2**31 classes.
    end = 2**31 if classes is None else classes
    allowed = "whole numbers " + ("counted from 0" if classes is None else f"in 0..{end - 1}")
    _check_form(labels, place, allowed, None if valid is None else valid.shape)
    floating = _is_float(labels.dtype)
    # Compared in their own dtype or a wider one: nothing wraps around, and NaN fails all tests.
    values = labels.astype(np.result_type(labels, np.float64)) if floating else labels
    right = (values >= 0) & (values < end)
    if floating:
        right &= np.floor(values) == values
    if valid is not None:
        right |= ~valid
    if not right.all():
        index = tuple(np.argwhere(~right)[0].tolist())
        raise ValueError(f"{place} has label {labels[index]} at {[*index]}; allowed are {allowed}")
    with np.errstate(invalid="ignore"):  # labels that do not count may be NaN
        return labels.astype(np.int64).astype(np.int32)


def _check_form(labels: Any, place: str, allowed: str, shape: tuple[int, ...] | None) -> None:
    """Raises ValueError unless labels are numbers of a shape, by default [N]."""
    fits = labels.ndim == 1 if shape is None else labels.shape == shape
    if not (fits and (labels.dtype.kind in "iu" or _is_float(labels.dtype))):
        form = "[N]" if shape is None else [*shape]
        array = f"{place} is {labels.dtype}{[*labels.shape]}"
        remedy = "convert it by astype(int), one-hot labels by argmax(-1)"
        raise ValueError(f"{array}; it must be {allowed} of shape {form}: {remedy}")


def known_labels(
    labels: jax.Array, classes: int, place: str = "label", shape: tuple[int, ...] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns labels as i32 (0 for a label outside the classes), and whether each is a class, bool.

    `labels` are numbers of a shape, by default [N], possibly traced; else ValueError.
    """
    _check_form(labels, place, f"whole numbers in 0..{classes - 1}", shape)
    floating = _is_float(labels.dtype)
    # Narrow dtypes might not hold the number of classes, with which labels are compared.
    if labels.dtype.itemsize < 4 or labels.dtype == jnp.uint32:  # too large uint32 become < 0
        labels = labels.astype(jnp.float32 if floating else jnp.int32)
    in_range = (labels >= 0) & (labels < classes)
    if floating:
        in_range &= jnp.floor(labels) == labels
    return jnp.where(in_range, labels, jnp.zeros((), labels.dtype)).astype(jnp.int32), in_range


def random_key(key: Any) -> jax.Array:
    """Returns a random key, also of a legacy key (`jax.random.PRNGKey`); ValueError for others."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
        return key
    if dtype == np.uint32 and shape == jax.eval_shape(jax.random.PRNGKey, 0).shape:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise ValueError(f"key is {key!r}; it must be one random key, such as jax.random.key(0)")
