"""Implements RandAugment (Cubuk et al., NeurIPS 2020): some of fourteen operations, equally strong.

Operations are torchvision's, `RandAugment(num_ops, magnitude)` with 31 bins, nearest pixels, and
zeros from outside, on bytes as in Pillow: image u8[H, W, C] -> u8[H, W, C]. A strength is f[] in
[-1, 1], the magnitude over 30 with a random sign; operations without a direction use its absolute
value.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Magnitude, Views, bounded
from fedjax_bn.data.pixels.augment import Augment, pixels_at, rotate
from fedjax_bn.engine.backend import on_cpu

_SMOOTH = ((1, 1, 1), (1, 5, 1), (1, 1, 1))  # Pillow's SMOOTH, to be divided by 13


@bounded
def randaug(ops: Views = 2, magnitude: Magnitude = 9) -> Augment:
    """Returns RandAugment for whole batches, with operations drawn for every image.

    Args:
      ops: number of operations, each drawn uniformly from the fourteen; 2 as in torchvision.
      magnitude: their strength, 0 to 30; 9 as in torchvision.

    Returns:
      `augment(key, images u8[B, H, W, 3]) -> u8[B, H, W, 3]`; it raises ValueError if images
      are not such bytes.
    """
    strength = magnitude / 30

    def one(key: jax.Array, image: jax.Array) -> jax.Array:
        for operation_key in jax.random.split(key, ops):
            which_key, sign_key = jax.random.split(operation_key)
            which = jax.random.randint(which_key, (), 0, len(OPERATIONS))
            sign = jnp.where(jax.random.bernoulli(sign_key), -1.0, 1.0)
            image = jax.lax.switch(which, tuple(OPERATIONS.values()), image, sign * strength)
        return image

    def augment(key: jax.Array, images: jax.Array) -> jax.Array:
        if images.dtype != jnp.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise ValueError(
                f"randaug needs images u8[B, H, W, 3], not {images.dtype}{images.shape}: choose an "
                "augmentation without colours, or none for features, which are not images"
            )
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(images)))
        # Under `vmap` a switch computes all operations; in `lax.map` only the chosen one.
        if on_cpu():
            return jax.lax.map(lambda sample: one(*sample), (keys, images))
        return jax.vmap(one)(keys, images)

    return augment


def _affine(image: jax.Array, rows: tuple, columns: tuple) -> jax.Array:
    """Returns for each new pixel the old one nearest to its centre; 0 outside.

    `rows` (a, b, c) gives the old row, a * row + b * column + c; `columns` gives the old column.
    """
    high, wide = image.shape[:2]
    y, x = jnp.arange(high, dtype=float)[:, None] + 0.5, jnp.arange(wide, dtype=float) + 0.5
    return pixels_at(image, *(jnp.floor(a * y + b * x + c) for a, b, c in (rows, columns)))


def _luma(image: jax.Array) -> jax.Array:
    """Returns Pillow's mode L, computed in Pillow's fixed point."""
    red, green, blue = (image[..., i].astype(jnp.int32) for i in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(image.dtype)


def _blend(plain: jax.Array, image: jax.Array, strength: jax.Array) -> jax.Array:
    """Returns `ImageEnhance` with the factor 1 + 0.9 strength: plain at 0, the image at 1."""
    from_plain, to_image = (x.astype(float) for x in (plain, image))
    mixed = from_plain + (1 + 0.9 * strength) * (to_image - from_plain)
    return jnp.clip(mixed, 0, 255).astype(image.dtype)  # cut, as Pillow does


def _contrast(image: jax.Array, strength: jax.Array) -> jax.Array:
    # Pillow rounds the mean to a byte before it blends.
    mean = jnp.floor(_luma(image).astype(float).mean() + 0.5).astype(image.dtype)
    return _blend(jnp.full_like(image, mean), image, strength)


def _sharpness(image: jax.Array, strength: jax.Array) -> jax.Array:
    pixels = image.astype(jnp.int32)
    high, wide = image.shape[:2]
    smooth = sum(
        weight * pixels[row : high - 2 + row, column : wide - 2 + column]
        for row, weights in enumerate(_SMOOTH)
        for column, weight in enumerate(weights)
    )
    inner = jnp.floor(smooth / 13 + 0.5).astype(image.dtype)
    # Pillow leaves the border of one pixel unchanged.
    return _blend(image.at[1:-1, 1:-1].set(inner), image, strength)


def _posterize(image: jax.Array, strength: jax.Array) -> jax.Array:
    dropped = jnp.round(4 * jnp.abs(strength)).astype(jnp.uint8)
    return (image >> dropped) << dropped


def _solarize(image: jax.Array, strength: jax.Array) -> jax.Array:
    threshold = 255 * (1 - jnp.abs(strength))
    return jnp.where(image.astype(threshold.dtype) < threshold, image, 255 - image)


def _autocontrast(image: jax.Array, strength: jax.Array) -> jax.Array:
    del strength
    pixels = image.astype(float)
    low, high = pixels.min((0, 1)), pixels.max((0, 1))
    scaled = jnp.floor((pixels - low) * (255 / jnp.where(high > low, high - low, 1)))
    return jnp.where(high > low, scaled, pixels).astype(image.dtype)


def _equalize(channel: jax.Array) -> jax.Array:
    """Replaces each level by (number of darker pixels + step // 2) // step, as Pillow does.

    `step` is the number of pixels below the brightest level // 255.
    """
    counts = jnp.zeros(256, jnp.int32).at[channel.astype(jnp.int32)].add(1)
    step = (channel.size - counts[channel.max().astype(jnp.int32)]) // 255
    darker = jnp.cumsum(counts) - counts
    table = jnp.clip((darker + step // 2) // jnp.maximum(step, 1), 0, 255).astype(channel.dtype)
    return jnp.where(step > 0, table[channel.astype(jnp.int32)], channel)


OPERATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "identity": lambda image, strength: image,
    "shear_x": lambda image, s: _affine(image, (1, 0, 0), (0.3 * s, 1, 0)),
    "shear_y": lambda image, s: _affine(image, (1, 0.3 * s, 0), (0, 1, 0)),
    "translate_x": lambda image, s: _affine(
        image, (1, 0, 0), (0, 1, jnp.trunc(150 / 331 * image.shape[1] * s))
    ),
    "translate_y": lambda image, s: _affine(
        image, (1, 0, jnp.trunc(150 / 331 * image.shape[0] * s)), (0, 1, 0)
    ),
    "rotate": lambda image, strength: rotate(image, 30 * strength),
    "brightness": lambda image, strength: _blend(jnp.zeros_like(image), image, strength),
    "color": lambda image, s: _blend(
        jnp.broadcast_to(_luma(image)[..., None], image.shape), image, s
    ),
    "contrast": _contrast,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": lambda image, strength: jax.vmap(_equalize, in_axes=-1, out_axes=-1)(image),
}
