"""Operations on one image, made for `vmap`: crop and resize, mirror, turn, and change colours.

Coordinates are Pillow's: pixel i covers [i, i + 1), and the first row is the top one. Colours are
red, green and blue in [0, 1]; definitions are those of Pillow's `ImageEnhance` and of torchvision,
before rounding to bytes.
"""

from typing import Any

import jax
import jax.numpy as jnp

_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601-2, as Pillow's mode "L"
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


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
      top, left: i32[], upper left corner of the box, which is inside the image.
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
    """Returns f[size, count]: what `count` pixels add to new ones of [start, start + length).

    A triangle of half width max(1, length / size) about the centre of the new pixel, cut off at the
    ends of the interval and normalized to 1: Pillow's BILINEAR, PyTorch's antialias=True.
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
    """Exchanges left and right of [H, W, C] of any dtype."""
    return image[:, ::-1]


def rotate(image: jax.Array, degrees: jax.Array | float) -> jax.Array:
    """Turns an image about its centre; same size, nearest pixels, zeros where there was nothing.

    Pillow's `rotate` with its defaults, which torchvision's RandomRotation takes over; bit by bit
    where `degrees` is float64, because the arithmetic is its own: 16 bits before the point and 16
    after it.

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
    """Returns i32[], a number in multiples of 2**-16."""
    return jnp.floor(value * 65536 + 0.5).astype(jnp.int32)


def grey(image: jax.Array) -> jax.Array:
    """Returns f[H, W, 1] of f[H, W, 3]: 0.299 red + 0.587 green + 0.114 blue."""
    red, green, blue = (image[..., i : i + 1] * _LUMA[i] for i in range(3))
    return red + green + blue


def shift_hue(image: jax.Array, turns: jax.Array | float) -> jax.Array:
    """Moves hue around the circle of HSV; saturation and value stay.

    Args:
      image: f[H, W, 3] in [0, 1].
      turns: f[], whole turns; 1/3 makes green of red.

    Differs from Pillow's HSV: neither hue nor saturation is rounded to bytes.
    """
    turns = jnp.asarray(turns, image.dtype)
    red, green, blue = (image[..., i] for i in range(3))
    high, low = image.max(-1), image.min(-1)
    chroma = high - low
    inverse = 1 / jnp.where(chroma > 0, chroma, 1)
    # Not `high == red`: a compiler may round what it computes twice in two ways, and then no
    # channel is the highest; near a tie all cases agree.
    sixths = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) * inverse,
        jnp.where(green >= blue, (blue - red) * inverse + 2, (red - green) * inverse + 4),
    )
    sixths = sixths + 6 * turns
    return jnp.stack([high - chroma * _valley(sixths + start) for start in (5, 3, 1)], axis=-1)


def _valley(sixths: jax.Array) -> jax.Array:
    """Returns the lack of chroma at a hue: 0 from 4 to 6, rising to 1 from 1 to 3."""
    sixths = sixths - 6 * jnp.floor(sixths / 6)
    return jnp.clip(jnp.minimum(sixths, 4 - sixths), 0, 1)


def jitter(image: jax.Array, factors: jax.Array, turns: jax.Array, order: jax.Array) -> jax.Array:
    """Changes brightness, contrast, saturation and hue, one after another in any order.

    A factor below 1 moves the image towards black (brightness), the mean grey of the image
    (contrast) or the grey of each pixel (saturation), a factor above 1 away from it.

    Args:
      image: f[H, W, 3] in [0, 1].
      factors: f[3] of brightness, contrast and saturation, at least 0.
      turns: f[], by which hue moves.
      order: i32[4], a permutation of BRIGHTNESS, CONTRAST, SATURATION, HUE; may be traced.
    """
    for which in order:
        # All but hue are one blend, so a traced choice computes two results, not four.
        factor = jnp.asarray(factors[jnp.minimum(which, SATURATION)], image.dtype)
        shade = grey(image)
        other = jnp.where(which == SATURATION, shade, shade.mean())
        other = jnp.where(which == BRIGHTNESS, 0, other)
        blended = jnp.clip(factor * image + (1 - factor) * other, 0, 1)
        image = jnp.where(which == HUE, shift_hue(image, turns), blended)
    return image
