"""What colour pixels have: brightness, contrast, saturation, hue, grey.

Images are f[H, W, 3], red, green and blue in [0, 1], one at a time, made for `vmap`. Definitions
are those of Pillow's `ImageEnhance` and of torchvision, before rounding to bytes.
"""

import jax
import jax.numpy as jnp

_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601-2, as Pillow's mode "L"
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def grey(image: jax.Array) -> jax.Array:
    """f[H, W, 3] -> f[H, W, 1], 0.299 red + 0.587 green + 0.114 blue."""
    red, green, blue = (image[..., i : i + 1] * _LUMA[i] for i in range(3))
    return red + green + blue


def brightness(image: jax.Array, factor: jax.Array | float) -> jax.Array:
    """Towards black (factor f[] below 1) or away from it."""
    return _blend(image, jnp.zeros((), image.dtype), factor)


def contrast(image: jax.Array, factor: jax.Array | float) -> jax.Array:
    """Towards the mean grey of the image (factor f[] below 1) or away from it."""
    return _blend(image, grey(image).mean(), factor)


def saturation(image: jax.Array, factor: jax.Array | float) -> jax.Array:
    """Towards the grey of each pixel (factor f[] below 1) or away from it."""
    return _blend(image, grey(image), factor)


def _blend(image: jax.Array, other: jax.Array, factor: jax.Array | float) -> jax.Array:
    factor = jnp.asarray(factor, image.dtype)
    return jnp.clip(factor * image + (1 - factor) * other, 0, 1)


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
    """How much of the chroma a colour lacks at a hue: 0 from 4 to 6, rising to 1 from 1 to 3."""
    sixths = sixths - 6 * jnp.floor(sixths / 6)
    return jnp.clip(jnp.minimum(sixths, 4 - sixths), 0, 1)


def jitter(image: jax.Array, factors: jax.Array, turns: jax.Array, order: jax.Array) -> jax.Array:
    """Brightness, contrast, saturation and hue, one after another in any order.

    Args:
      image: f[H, W, 3] in [0, 1].
      factors: f[3] of brightness, contrast and saturation, at least 0.
      turns: f[], by which hue moves.
      order: i32[4], a permutation of BRIGHTNESS, CONTRAST, SATURATION, HUE; may be traced.
    """
    for which in order:
        # All but hue are one blend, so a traced choice computes two results, not four.
        factor = factors[jnp.minimum(which, SATURATION)]
        shade = grey(image)
        other = jnp.where(which == SATURATION, shade, shade.mean())
        other = jnp.where(which == BRIGHTNESS, 0, other)
        image = jnp.where(which == HUE, shift_hue(image, turns), _blend(image, other, factor))
    return image
