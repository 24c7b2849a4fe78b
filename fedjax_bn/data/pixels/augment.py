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

import jax
import jax.numpy as jnp

from fedjax_bn.data.pixels import color, geometry

Augment = Callable[[jax.Array, jax.Array], jax.Array]
Transform = Callable[[jax.Array, jax.Array], jax.Array]
_Interval = tuple[float, float]

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
    """Transforms one after another on every image of a batch, each sample with its own key.

    Returns:
      `augment(key, images u8[B, H, W, C]) -> u8[B, h, w, C]`, pure and jittable; it raises
      ValueError where images are no bytes of that shape.
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
                "leave it out for features that are no images"
            )
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(images)))
        return jax.vmap(one)(keys, images)

    return augment


def random_resized_crop(
    size: int, scale: _Interval = (0.08, 1.0), ratio: _Interval = (3 / 4, 4 / 3)
) -> Transform:
    """A random box resized to `size` pixels a side, see `_crop_box` and `crop_and_resize`.

    Raises:
      ValueError: `size` is below 1, or an interval is empty or not positive.
    """
    if size < 1:
        raise ValueError(f"random_resized_crop: size={size} must be at least 1")
    for name, (low, high) in (("scale", scale), ("ratio", ratio)):
        if not 0 < low <= high:
            raise ValueError(f"random_resized_crop: {name}={(low, high)} must be 0 < low <= high")
    if scale[1] > 1:
        raise ValueError(f"random_resized_crop: scale={scale} must not exceed 1, the whole image")

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        box = _crop_box(key, *image.shape[:2], scale, ratio)
        return geometry.crop_and_resize(image, *box, size)

    return transform


def _crop_box(
    key: jax.Array, height: int, width: int, scale: _Interval, ratio: _Interval
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """torchvision's random box: top, left, height, width, i32[] each.

    Its area is uniform in `scale` times the image's, its width to height log-uniform in `ratio`,
    its place uniform. The first of ten draws that fits is taken; if none does, the largest box in
    the middle whose ratio is allowed.
    """
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


def random_flip(probability: float = 0.5) -> Transform:
    """Left and right exchanged with `probability`.

    Raises:
      ValueError: it is none.
    """
    _check_probability("random_flip", probability)

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, probability), geometry.mirror(image), image)

    return transform


def random_rotation(degrees: float) -> Transform:
    """Turned about the centre by an angle uniform in [-degrees, degrees], see `rotate`.

    Raises:
      ValueError: `degrees` is outside [0, 180].
    """
    if not 0 <= degrees <= 180:
        raise ValueError(f"random_rotation: degrees={degrees} must be in [0, 180]")

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        angle = jax.random.uniform(key, minval=-degrees, maxval=degrees)
        return geometry.rotate(image, angle)

    return transform


def color_jitter(
    brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0
) -> Transform:
    """Random colours of an RGB image, in random order, see `color.jitter`.

    Args:
      brightness, contrast, saturation: at least 0; factors are uniform in [max(0, 1 - x), 1 + x].
      hue: in [0, 0.5]; hue moves by a uniform part of a turn in [-hue, hue].

    Raises:
      ValueError: an argument is out of range; at use, where the image has not three channels.
    """
    spread = (brightness, contrast, saturation)
    if min(spread) < 0 or not 0 <= hue <= 0.5:
        raise ValueError(
            f"color_jitter: brightness, contrast, saturation={spread} must be at least 0, and "
            f"hue={hue} in [0, 0.5]"
        )

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        _check_channels("color_jitter", image)
        draws = jax.random.uniform(key, (8,))
        low = jnp.array([*(max(0.0, 1 - x) for x in spread), -hue])
        high = jnp.array([*(1 + x for x in spread), hue])
        amounts = _between(draws[:4], low, high)
        order = jnp.argsort(draws[4:]).astype(jnp.int32)  # all 24 alike
        return color.jitter(image, amounts[:3], amounts[3], order)

    return transform


def random_grayscale(probability: float = 0.1) -> Transform:
    """Grey, in three equal channels, with `probability`.

    Raises:
      ValueError: it is none; at use, where the image has not three channels.
    """
    _check_probability("random_grayscale", probability)

    def transform(key: jax.Array, image: jax.Array) -> jax.Array:
        _check_channels("random_grayscale", image)
        return jnp.where(jax.random.bernoulli(key, probability), color.grey(image), image)

    return transform


def _between(draws: jax.Array, low: float | jax.Array, high: float | jax.Array) -> jax.Array:
    """Draws from [0, 1) stretched to [low, high)."""
    return low + (high - low) * draws


def _check_probability(name: str, probability: float) -> None:
    if not 0 <= probability <= 1:
        raise ValueError(f"{name}: probability={probability} must be in [0, 1]")


def _check_channels(name: str, image: jax.Array) -> None:
    if image.shape[-1] != 3:
        raise ValueError(
            f"{name} needs images with 3 channels (red, green, blue), not {image.shape[-1]}: "
            "choose an augmentation without colours"
        )
