"""Where pixels go: crop and resize, mirror, turn. One image at a time, made for `vmap`.

Coordinates are Pillow's: pixel i covers [i, i + 1), and the first row is the top one.
"""

from typing import Any

import jax
import jax.numpy as jnp


def crop_and_resize(
    image: jax.Array,
    top: jax.Array | int,
    left: jax.Array | int,
    height: jax.Array | int,
    width: jax.Array | int,
    size: int,
) -> jax.Array:
    """Cuts a box out and stretches it to a square, bilinear with antialiasing.

    Pillow's `crop` and then `resize(BILINEAR)`, before rounding to bytes; nothing outside the box
    is seen. Both directions are matrix products, so the box may be traced.

    Args:
      image: f[H, W, C].
      top, left: i32[], upper left corner of the box; the box lies within the image.
      height, width: i32[], size of the box, at least 1.
      size: side of the result.

    Returns:
      f[size, size, C].
    """
    down = _resize_weights(top, height, image.shape[0], size, image.dtype)
    across = _resize_weights(left, width, image.shape[1], size, image.dtype)
    # The fast modes of accelerators keep too few digits for pixels.
    rows = jnp.einsum("oh,hwc->owc", down, image, precision="highest")
    return jnp.einsum("pw,owc->opc", across, rows, precision="highest")


def _resize_weights(
    start: jax.Array | int, length: jax.Array | int, count: int, size: int, dtype: Any
) -> jax.Array:
    """What each of `count` pixels adds to each of `size` pixels that show [start, start + length).

    A triangle of half width max(1, length / size) about the centre of the new pixel, cut off at the
    ends of the interval and normalized to 1: Pillow's BILINEAR, PyTorch's antialias=True.

    Args:
      start, length: i32[], the interval in old pixels, within [0, count].
      count: old pixels.
      size: new pixels.
      dtype: of the result.

    Returns:
      f[size, count], rows sum to 1.
    """
    start, length = (jnp.asarray(value).astype(dtype) for value in (start, length))
    scale = length / size
    centres = start + (jnp.arange(size, dtype=dtype)[:, None] + 0.5) * scale
    pixels = jnp.arange(count, dtype=dtype) + 0.5
    weights = jnp.maximum(1 - jnp.abs(pixels - centres) / jnp.maximum(scale, 1), 0)
    inside = (pixels > start) & (pixels < start + length)
    weights = jnp.where(inside, weights, 0)
    return weights / weights.sum(1, keepdims=True)


def mirror(image: jax.Array) -> jax.Array:
    """Left and right exchanged, [H, W, C] of any dtype."""
    return image[:, ::-1]


def rotate(image: jax.Array, degrees: jax.Array | float) -> jax.Array:
    """Turns an image about its centre; same size, nearest pixels, zeros where there was nothing.

    Pillow's `rotate` with its defaults, which torchvision's RandomRotation takes over; bit by bit
    where `degrees` is float64, because the arithmetic is its own: 16 bits before the point and 16
    behind it.

    Args:
      image: [H, W, C] of any dtype; H and W are at most 2**14.
      degrees: f[], counterclockwise.

    Returns:
      [H, W, C] in the dtype of `image`.
    """
    high, wide = image.shape[:2]
    angle = -jnp.deg2rad(degrees)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    # From the middle of a new pixel to where it was: (x, y) -> (a x + b y + c, -b x + a y + d).
    a, b = _fixed(cosine), _fixed(sine)
    c = _fixed((wide - cosine * (wide - 1) - sine * (high - 1)) / 2)
    d = _fixed((high + sine * (wide - 1) - cosine * (high - 1)) / 2)
    x, y = jnp.arange(wide, dtype=jnp.int32), jnp.arange(high, dtype=jnp.int32)[:, None]
    columns, rows = (a * x + b * y + c) >> 16, (a * y - b * x + d) >> 16
    inside = (columns >= 0) & (columns < wide) & (rows >= 0) & (rows < high)
    index = jnp.where(inside, rows * wide + columns, 0)
    turned = image.reshape(high * wide, -1)[index]
    return jnp.where(inside[..., None], turned, jnp.zeros((), image.dtype))


def _fixed(value: jax.Array) -> jax.Array:
    """i32[], rounded to multiples of 2**-16."""
    return jnp.floor(value * 65536 + 0.5).astype(jnp.int32)
