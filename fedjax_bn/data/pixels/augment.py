"""Changes training images at random on the device; evaluation never uses it.

A *transform* is a function `(key, image f[H, W, C] in [0, 1]) -> f[h, w, C]` of one image, and
`compose` combines some into an `Augment` of whole batches of bytes:

    augment = office()
    images = augment(key, images)  # u8[B, H, W, C] -> u8[B, H, W, C]

The result is bytes again, so a model's `prepare` applies to it as to stored images. The result of a
sample depends on the key, its place in the batch and its own pixels, not on other samples.

Coordinates are Pillow's: pixel i covers [i, i + 1), and the first row is the top one. Colours are
red, green and blue; definitions are those of Pillow's `ImageEnhance` and of torchvision, except
that bytes are rounded once, at the end, not after each step.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import PIXELS, bounded

Augment = Callable[[jax.Array, jax.Array], jax.Array]
Transform = Callable[[jax.Array, jax.Array], jax.Array]
_Interval = tuple[float, float]

_ATTEMPTS = 10  # torchvision's, before it takes the middle of the image
_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601-2, as Pillow's mode "L"
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)


class LabelAugment(NamedTuple):
    """An augmentation that moves labels with their images, pure and jittable.

    Attributes:
      change: `change(key, batch) -> batch`.
      moves: the labels that it moves, `label_trees.BOXES` or `label_trees.MASK`.
    """

    change: Callable[[jax.Array, dict[str, Any]], dict[str, Any]]
    moves: str


@bounded
def domainbed(size: Annotated[int, PIXELS]) -> Augment:
    """Returns DomainBed's augmentation for PACS, VLCS, OfficeHome (Gulrajani & Lopez-Paz 2021).

    Crops 70 to 100 % of the area, resizes to `size` pixels a side, mirrors half of the images,
    changes brightness, contrast and saturation within 30 % and hue within 0.3 turns, and makes one
    in ten grey.

    Differs from DomainBed: crops are cut from stored images, which are square already.
    """
    return compose(
        lambda key, image: crop_and_resize(image, *crop_box(key, *image.shape[:2]), size),
        random_flip,
        partial(random_jitter, spread=(0.3, 0.3, 0.3, 0.3)),
        partial(random_grey, probability=0.1),
    )


def office() -> Augment:
    """Returns FedBN's augmentation for Office-Caltech10 and DomainNet (Li et al. 2021, code).

    Mirrors half of the images and turns all by up to 30 degrees; their size does not change.
    """
    return compose(random_flip, partial(random_rotation, degrees=30))


def compose(*transforms: Transform) -> Augment:
    """Combines transforms, applied in order to every image of a batch, each with its own key.

    Returns:
      `augment(key, images u8[B, H, W, C]) -> u8[B, h, w, C]`, pure and jittable; it raises
      ValueError if images are not bytes of that shape.
    """

    def one(key: jax.Array, image: jax.Array) -> jax.Array:
        pixels = image.astype(float) / 255  # float32, or float64 where that is enabled
        for transform_key, transform in zip(
            jax.random.split(key, len(transforms)), transforms, strict=True
        ):
            pixels = transform(transform_key, pixels)
        return jnp.clip(jnp.floor(pixels * 255 + 0.5), 0, 255).astype(jnp.uint8)

    def augment(key: jax.Array, images: jax.Array) -> jax.Array:
        if images.dtype != jnp.uint8 or images.ndim != 4:
            raise ValueError(
                f"augmentation needs images u8[B, H, W, C], not {images.dtype}{images.shape}: "
                "leave it out for features, which are not images"
            )
        # Unlike `split`, `fold_in` makes a sample's key independent of the size of the batch.
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(images)))
        return jax.vmap(one)(keys, images)

    return augment


def crop_box(
    key: jax.Array,
    height: int,
    width: int,
    scale: _Interval = (0.7, 1.0),
    ratio: _Interval = (3 / 4, 4 / 3),
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns torchvision's random box: top, left, height, width, i32[] each.

    Its area is uniform in `scale` times the image's, its width / height log-uniform in `ratio`, its
    place uniform. The first of ten draws that fits is taken, else the largest box in the middle.
    """
    draws = jax.random.uniform(key, (2 * _ATTEMPTS + 2,))  # one call, because each compiles
    area = height * width * _between(draws[:_ATTEMPTS], *scale)
    aspect = jnp.exp(_between(draws[_ATTEMPTS:-2], math.log(ratio[0]), math.log(ratio[1])))
    high, wide = (jnp.round(jnp.sqrt(x)).astype(jnp.int32) for x in (area / aspect, area * aspect))
    fits = (high > 0) & (high <= height) & (wide > 0) & (wide <= width)
    attempt, any_fits = fits.argmax(), fits.any()

    largest = min(height, round(width / ratio[0])), min(width, round(height * ratio[1]))
    high = jnp.where(any_fits, high[attempt], largest[0])
    wide = jnp.where(any_fits, wide[attempt], largest[1])
    room = jnp.stack([height - high, width - wide])
    places = jnp.floor(draws[-2:] * (room + 1).astype(draws.dtype)).astype(jnp.int32)
    # In float32 a draw near 1 times room + 1 may round up to room + 1.
    top, left = jnp.where(any_fits, jnp.minimum(places, room), room // 2)
    return top, left, high, wide


def crop_and_resize(
    image: jax.Array,
    top: jax.Array | int,
    left: jax.Array | int,
    height: jax.Array | int,
    width: jax.Array | int,
    size: int,
) -> jax.Array:
    """Cuts a box out of f[H, W, C] and stretches it to f[size, size, C], with antialiasing.

    Equals Pillow's `crop` and `resize(BILINEAR)` before rounding to bytes.
    """

    def weights(start: jax.Array | int, length: jax.Array | int, count: int) -> jax.Array:
        """Returns f[size, count]: weights of old pixels in the new ones of [start, start + length).

        Each row is a triangle of half width max(1, length / size) about the new pixel's centre, cut
        off at the ends of the interval and normalized to 1, as in Pillow's BILINEAR and PyTorch's
        antialias=True.
        """
        start, length = (jnp.asarray(value).astype(image.dtype) for value in (start, length))
        scale = length / size
        centres = start + (jnp.arange(size, dtype=image.dtype)[:, None] + 0.5) * scale
        pixels = jnp.arange(count, dtype=image.dtype) + 0.5
        added = jnp.maximum(1 - jnp.abs(pixels - centres) / jnp.maximum(scale, 1), 0)
        added = jnp.where((pixels > start) & (pixels < start + length), added, 0)
        return added / added.sum(1, keepdims=True)

    # Matrix products in both directions, because a traced box cannot be sliced.
    down, across = weights(top, height, image.shape[0]), weights(left, width, image.shape[1])
    # By default, accelerators multiply with too few digits for pixels.
    rows = jnp.einsum("oh,hwc->owc", down, image, precision="highest")
    return jnp.einsum("pw,owc->opc", across, rows, precision="highest")


def random_flip(key: jax.Array, image: jax.Array, probability: float = 0.5) -> jax.Array:
    """Exchanges left and right with `probability`."""
    return jnp.where(jax.random.bernoulli(key, probability), image[:, ::-1], image)


def random_rotation(key: jax.Array, image: jax.Array, degrees: float) -> jax.Array:
    """Turns about the centre by an angle uniform in [-degrees, degrees], see `rotate`."""
    return rotate(image, jax.random.uniform(key, minval=-degrees, maxval=degrees))


def rotate(image: jax.Array, degrees: jax.Array | float) -> jax.Array:
    """Turns an image about its centre; same size, nearest pixels, zeros from outside.

    Equals Pillow's `rotate` with its defaults, which torchvision's RandomRotation uses; bit for bit
    if `degrees` is float64, because it uses Pillow's fixed point, with 16 bits before the point and
    16 after.

    Args:
      image: [H, W, C] of any dtype, which is kept; H and W are at most 2**14.
      degrees: f[], counterclockwise.
    """

    def fixed(value: jax.Array) -> jax.Array:
        """Returns i32[], a number in multiples of 2**-16."""
        return jnp.floor(value * 65536 + 0.5).astype(jnp.int32)

    high, wide = image.shape[:2]
    angle = -jnp.deg2rad(degrees)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    # From the centre of a new pixel to its old place: (x, y) -> (a x + b y + c, -b x + a y + d).
    a, b = fixed(cosine), fixed(sine)
    c = fixed((wide - cosine * (wide - 1) - sine * (high - 1)) / 2)
    d = fixed((high + sine * (wide - 1) - cosine * (high - 1)) / 2)
    x, y = jnp.arange(wide, dtype=jnp.int32), jnp.arange(high, dtype=jnp.int32)[:, None]
    columns, rows = (a * x + b * y + c) >> 16, (a * y - b * x + d) >> 16
    return pixels_at(image, rows, columns)


def pixels_at(image: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns the pixels of [H, W, C] in these rows and columns [h, w], zeros outside."""
    high, wide = image.shape[:2]
    inside = (columns >= 0) & (columns < wide) & (rows >= 0) & (rows < high)
    index = jnp.where(inside, rows * wide + columns, 0).astype(jnp.int32)
    pixels = image.reshape(high * wide, -1)[index]
    return jnp.where(inside[..., None], pixels, jnp.zeros((), image.dtype))


def random_jitter(
    key: jax.Array, image: jax.Array, spread: tuple[float, float, float, float]
) -> jax.Array:
    """Changes the colours of an RGB image in random order, see `jitter`.

    `spread` has an x each for brightness, contrast and saturation, whose factors are uniform in
    [max(0, 1 - x), 1 + x], and for hue, whose shift in turns is uniform in [-x, x].
    """
    if image.shape[-1] != 3:
        raise ValueError(
            f"changes of colour need images with 3 channels (red, green, blue), not "
            f"{image.shape[-1]}: choose an augmentation without colours"
        )
    *factors, hue = spread
    draws = jax.random.uniform(key, (8,))
    low = jnp.array([*(max(0.0, 1 - x) for x in factors), -hue])
    high = jnp.array([*(1 + x for x in factors), hue])
    amounts = _between(draws[:4], low, high)
    order = jnp.argsort(draws[4:]).astype(jnp.int32)  # all 24 equally likely
    return jitter(image, amounts[:3], amounts[3], order)


def jitter(image: jax.Array, factors: jax.Array, turns: jax.Array, order: jax.Array) -> jax.Array:
    """Changes brightness, contrast, saturation and hue, one after another in any order.

    `factors` f[3], at least 0, are for brightness, contrast and saturation: a factor below 1 moves
    the image towards black, its mean grey or the grey of each pixel, one above 1 away from it.
    `turns` shift hue. `order` i32[n] of _BRIGHTNESS, _CONTRAST, _SATURATION, _HUE may be traced.
    """
    for which in order:
        # All but hue are one blend, so a traced choice computes two results, not four.
        factor = jnp.asarray(factors[jnp.minimum(which, _SATURATION)], image.dtype)
        shade = _grey(image)
        pole = jnp.where(which == _SATURATION, shade, shade.mean())
        pole = jnp.where(which == _BRIGHTNESS, 0, pole)
        blended = jnp.clip(factor * image + (1 - factor) * pole, 0, 1)
        image = jnp.where(which == _HUE, shift_hue(image, turns), blended)
    return image


def shift_hue(image: jax.Array, turns: jax.Array | float) -> jax.Array:
    """Shifts hue around the circle of HSV; saturation and value are unchanged.

    Args:
      image: f[H, W, 3] in [0, 1].
      turns: f[], in turns; 1/3 turns red into green.

    Differs from Pillow's HSV: neither hue nor saturation is rounded to bytes.
    """

    def valley(sixths: jax.Array) -> jax.Array:
        """Returns the lack of chroma at a hue: 0 from 4 to 6, 1 from 1 to 3, linear between."""
        sixths = sixths - 6 * jnp.floor(sixths / 6)
        return jnp.clip(jnp.minimum(sixths, 4 - sixths), 0, 1)

    turns = jnp.asarray(turns, image.dtype)
    red, green, blue = (image[..., i] for i in range(3))
    high, low = image.max(-1), image.min(-1)
    chroma = high - low
    inverse = 1 / jnp.where(chroma > 0, chroma, 1)
    # Not `high == red`: XLA may compute a channel twice and round it differently, and then no
    # channel equals `high`; near a tie all cases agree.
    sixths = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) * inverse,
        jnp.where(green >= blue, (blue - red) * inverse + 2, (red - green) * inverse + 4),
    )
    sixths = sixths + 6 * turns
    return jnp.stack([high - chroma * valley(sixths + start) for start in (5, 3, 1)], axis=-1)


def random_grey(key: jax.Array, image: jax.Array, probability: float) -> jax.Array:
    """Makes an RGB image grey, in three equal channels, with `probability`."""
    return jnp.where(jax.random.bernoulli(key, probability), _grey(image), image)


def _grey(image: jax.Array) -> jax.Array:
    """Returns f[H, W, 1] of f[H, W, 3]: 0.299 red + 0.587 green + 0.114 blue."""
    red, green, blue = (image[..., i : i + 1] * _LUMA[i] for i in range(3))
    return red + green + blue


def _between(draws: jax.Array, low: float | jax.Array, high: float | jax.Array) -> jax.Array:
    """Returns draws from [0, 1) stretched to [low, high)."""
    return low + (high - low) * draws
