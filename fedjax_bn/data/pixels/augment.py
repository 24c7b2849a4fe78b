"""Random changes of training images on the device; evaluation never sees them.

A *transform* is a function `(key, image f[H, W, C] in [0, 1]) -> f[h, w, C]` of one image, and
`compose` makes of some of them an `Augment` of whole batches of bytes:

    augment = compose(random_flip(), random_rotation(30))
    images = augment(key, images)  # u8[B, H, W, C] -> u8[B, H, W, C]

Bytes in, bytes out, so whatever prepares stored images for a model prepares these too. The result
of a sample depends on the key, its place in the batch and its own pixels, not on other samples.

Differs from torchvision on Pillow images: bytes are rounded once, at the end, not after each step.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import PIXELS, AtLeast0, Range, UpTo1, bounded
from fedjax_bn.data.pixels import operations

Augment = Callable[[jax.Array, jax.Array], jax.Array]
Transform = Callable[[jax.Array, jax.Array], jax.Array]
_Interval = tuple[float, float]
_Degrees = Annotated[float, Range("at least 0 and at most 180", lambda value: 0 <= value <= 180)]
_HalfTurn = Annotated[float, Range("at least 0 and at most 0.5", lambda value: 0 <= value <= 0.5)]

_ATTEMPTS = 10  # torchvision's, before it takes the middle of the image


def domainbed(size: int) -> Augment:
    """DomainBed's augmentation for PACS, VLCS and OfficeHome (Gulrajani & Lopez-Paz 2021).

    Crops of 70 to 100 % of the area resized to `size` pixels a side, mirrored half of the time,
    brightness, contrast and saturation within 30 %, hue within 0.3 turns, one in ten grey.

    Differs from DomainBed: boxes are cut from stored images, which were made square before.
    """
    return compose(
        random_resized_crop(size, scale=(0.7, 1.0)),
        random_flip(),
        color_jitter(0.3, 0.3, 0.3, 0.3),
        random_grayscale(0.1),
    )


def office() -> Augment:
    """FedBN's augmentation for Office-Caltech10 and DomainNet (Li et al. 2021, authors' code).

    Mirrored half of the time, turned by up to 30 degrees; the size stays.
    """
    return compose(random_flip(), random_rotation(30))


def compose(*transforms: Transform) -> Augment:
    """Applies transforms one after another to every image of a batch, each with its own key.

    Returns:
      `augment(key, images u8[B, H, W, C]) -> u8[B, h, w, C]`, pure and jittable; it raises
      ValueError if images are not bytes of that shape.
    """

    def one(key: jax.Array, image: jax.Array) -> jax.Array:
        pixels = image.astype(float) / 255  # float32, or float64 where that is enabled
        for own, transform in zip(jax.random.split(key, len(transforms)), transforms, strict=True):
            pixels = transform(own, pixels)
        return jnp.clip(jnp.floor(pixels * 255 + 0.5), 0, 255).astype(jnp.uint8)

    def augment(key: jax.Array, images: jax.Array) -> jax.Array:
        if images.dtype != jnp.uint8 or images.ndim != 4:
            raise ValueError(
                f"augmentation needs images u8[B, H, W, C], not {images.dtype}{images.shape}: "
                "leave it out for features, which are not images"
            )
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(images)))
        return jax.vmap(one)(keys, images)

    return augment


@bounded
def random_resized_crop(
    size: Annotated[int, PIXELS], scale: _Interval = (0.08, 1.0), ratio: _Interval = (3 / 4, 4 / 3)
) -> Transform:
    """Resizes a random box to `size` pixels a side, see `operations.crop_and_resize`.

    The box is torchvision's: its area is uniform in `scale` times the image's, its width to height
    log-uniform in `ratio`, its place uniform. The first of ten draws that fits is taken; if none
    does, the largest box in the middle whose ratio is allowed.
    """

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        box = _crop_box(key, *image.shape[:2], scale, ratio)
        return operations.crop_and_resize(image, *box, size)

    return transform


def _crop_box(
    key: jax.Array, height: int, width: int, scale: _Interval, ratio: _Interval
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the random box: top, left, height, width, i32[] each."""
    draws = jax.random.uniform(key, (2 * _ATTEMPTS + 2,))  # one call, because each takes compiling
    area = height * width * _between(draws[:_ATTEMPTS], *scale)
    aspect = jnp.exp(_between(draws[_ATTEMPTS:-2], math.log(ratio[0]), math.log(ratio[1])))
    high, wide = (jnp.round(jnp.sqrt(x)).astype(jnp.int32) for x in (area / aspect, area * aspect))
    fits = (high > 0) & (high <= height) & (wide > 0) & (wide <= width)
    first, any_fits = fits.argmax(), fits.any()

    largest = min(height, round(width / ratio[0])), min(width, round(height * ratio[1]))
    high = jnp.where(any_fits, high[first], largest[0])
    wide = jnp.where(any_fits, wide[first], largest[1])
    room = jnp.stack([height - high, width - wide])
    places = jnp.floor(draws[-2:] * (room + 1).astype(draws.dtype)).astype(jnp.int32)
    top, left = jnp.where(any_fits, jnp.minimum(places, room), room // 2)
    return top, left, high, wide


@bounded
def random_flip(probability: UpTo1 = 0.5) -> Transform:
    """Exchanges left and right with `probability`."""

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, probability), operations.mirror(image), image)

    return transform


@bounded
def random_rotation(degrees: _Degrees) -> Transform:
    """Turns about the centre by an angle uniform in [-degrees, degrees], see `rotate`."""

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        angle = jax.random.uniform(key, minval=-degrees, maxval=degrees)
        return operations.rotate(image, angle)

    return transform


@bounded
def color_jitter(
    brightness: AtLeast0 = 0.0,
    contrast: AtLeast0 = 0.0,
    saturation: AtLeast0 = 0.0,
    hue: _HalfTurn = 0.0,
) -> Transform:
    """Changes the colours of an RGB image in random order, see `operations.jitter`.

    Args:
      brightness, contrast, saturation: factors are uniform in [max(0, 1 - x), 1 + x].
      hue: hue moves by a uniform part of a turn in [-hue, hue].

    Raises:
      ValueError: at use, the image does not have three channels.
    """
    spread = (brightness, contrast, saturation)

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        _check_channels("color_jitter", image)
        draws = jax.random.uniform(key, (8,))
        low = jnp.array([*(max(0.0, 1 - x) for x in spread), -hue])
        high = jnp.array([*(1 + x for x in spread), hue])
        amounts = _between(draws[:4], low, high)
        order = jnp.argsort(draws[4:]).astype(jnp.int32)  # all 24 alike
        return operations.jitter(image, amounts[:3], amounts[3], order)

    return transform


@bounded
def random_grayscale(probability: UpTo1 = 0.1) -> Transform:
    """Makes an RGB image grey, in three equal channels, with `probability`.

    Raises:
      ValueError: at use, the image does not have three channels.
    """

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        _check_channels("random_grayscale", image)
        return jnp.where(jax.random.bernoulli(key, probability), operations.grey(image), image)

    return transform


def _between(draws: jax.Array, low: float | jax.Array, high: float | jax.Array) -> jax.Array:
    """Returns draws from [0, 1) stretched to [low, high)."""
    return low + (high - low) * draws


def _check_channels(name: str, image: jax.Array) -> None:
    if image.shape[-1] != 3:
        raise ValueError(
            f"{name} needs images with 3 channels (red, green, blue), not {image.shape[-1]}: "
            "choose an augmentation without colours"
        )
