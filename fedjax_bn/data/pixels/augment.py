"""Changes training images at random on the device; evaluation never uses it.

    augment = office()
    images = augment(key, images)  # u8[B, H, W, C] -> u8[B, H, W, C]

The result of a sample depends on the key, its place in the batch and its own pixels alone.

A *transform* is a function `(key, image f[H, W, C] in [0, 1]) -> f[h, w, C]` of one image.
Coordinates are Pillow's: pixel i covers [i, i + 1), and the first row is the top one. Definitions
are those of Pillow's `ImageEnhance` and of torchvision, except that bytes are rounded only once.

RandAugment (Cubuk et al., NeurIPS 2020) draws some of fourteen operations, equally strong. They are
torchvision's, `RandAugment(num_ops, magnitude)` with 31 bins, nearest pixels, and zeros from
outside, on bytes as in Pillow: image u8[H, W, C] -> u8[H, W, C]. A strength is f[] in [-1, 1], the
magnitude over 30 with a random sign; operations without a direction use its absolute value.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Pixels, Views, between, bounded
from fedjax_bn.engine.backend import on_cpu

Augment = Callable[[jax.Array, jax.Array], jax.Array]

_ATTEMPTS = 10  # torchvision's, before it takes the middle of the image
_RATIO = 3 / 4, 4 / 3  # torchvision's least and greatest width / height of a box
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)
_SMOOTH = ((1, 1, 1), (1, 5, 1), (1, 1, 1))  # Pillow's SMOOTH, to be divided by 13


class LabelAugment(NamedTuple):
    """An augmentation that moves labels with their images, pure and jittable."""

    change: Callable[[jax.Array, dict[str, Any]], dict[str, Any]]  # `change(key, batch) -> batch`
    moves: str  # the labels that it moves, `data.labels.BOXES` or `MASK`


def sample_keys(key: jax.Array, images: jax.Array, square: bool = False) -> jax.Array:
    """Returns a key for each sample of a batch u8[B, H, W, C], else ValueError."""
    is_image = images.dtype == jnp.uint8 and images.ndim == 4
    if not is_image or (square and images.shape[1] != images.shape[2]):
        allowed, form = "u8[B, S, S, C]" if square else "u8[B, H, W, C]", images.shape
        raise ValueError(f"images {images.dtype}{form} must be {allowed} or data.augment=none")
    # Unlike `split`, `fold_in` makes a sample's key independent of the size of the batch.
    return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(images)))


def as_bytes(pixels: jax.Array) -> jax.Array:
    """Returns pixels in [0, 1] as bytes, rounded to the nearest."""
    return jnp.clip(jnp.floor(pixels * 255 + 0.5), 0, 255).astype(jnp.uint8)


@bounded
def domainbed(size: Pixels) -> Augment:
    """Returns DomainBed's augmentation for PACS, VLCS, OfficeHome (Gulrajani & Lopez-Paz 2021).

    Crops 70 to 100 % of the area, resizes to `size` pixels a side, mirrors half of the images,
    changes brightness, contrast and saturation within 30 % and hue within 0.3 turns, and makes one
    in ten grey.

    Differs from DomainBed: crops are cut from stored images, which are square already.
    """
    return _compose(
        lambda key, image: crop_and_resize(image, crop_box(key, *image.shape[:2]), size),
        _random_flip,
        partial(random_jitter, spread=(0.3, 0.3, 0.3, 0.3)),
        lambda key, image: jnp.where(jax.random.bernoulli(key, 0.1), _grey(image), image),
    )


def office() -> Augment:
    """Returns FedBN's augmentation for Office-Caltech10 and DomainNet (Li et al. 2021, code).

    Mirrors half of the images and turns all by up to 30 degrees; their size does not change.
    """
    return _compose(
        _random_flip,
        lambda key, image: rotate(image, jax.random.uniform(key, minval=-30, maxval=30)),
    )


@bounded
def randaug(ops: Views = 2, magnitude: Annotated[int, between(0, 30)] = 9) -> Augment:
    """Returns RandAugment for batches u8[B, H, W, 3], with operations drawn for every image.

    Args:
      ops: number of operations, each drawn uniformly from the fourteen; 2 as in torchvision.
      magnitude: their strength, 0 to 30; 9 as in torchvision.
    """
    strength = magnitude / 30

    def of_image(key: jax.Array, image: jax.Array) -> jax.Array:
        for operation_key in jax.random.split(key, ops):
            which_key, sign_key = jax.random.split(operation_key)
            which = jax.random.randint(which_key, (), 0, len(OPERATIONS))
            sign = jnp.where(jax.random.bernoulli(sign_key), -1.0, 1.0)
            image = jax.lax.switch(which, tuple(OPERATIONS.values()), image, sign * strength)
        return image

    def augment(key: jax.Array, images: jax.Array) -> jax.Array:
        keys = sample_keys(key, images)
        # Under `vmap` a switch computes all operations; in `lax.map` only the chosen one.
        if on_cpu():
            return jax.lax.map(lambda sample: of_image(*sample), (keys, images))
        return jax.vmap(of_image)(keys, images)

    return augment


def _compose(*transforms: Augment) -> Augment:
    """Returns an augmentation that applies transforms in order, each with its own key."""

    def of_image(key: jax.Array, image: jax.Array) -> jax.Array:
        pixels = image.astype(float) / 255  # float32, or float64 where that is enabled
        for number, transform_key in enumerate(jax.random.split(key, len(transforms))):
            pixels = transforms[number](transform_key, pixels)
        return as_bytes(pixels)

    return lambda key, images: jax.vmap(of_image)(sample_keys(key, images), images)


def crop_box(
    key: jax.Array, height: int, width: int, scale: tuple[float, float] = (0.7, 1.0)
) -> tuple[jax.Array, ...]:
    """Returns torchvision's random box: top, left, height, width, i32[] each.

    Its area is uniform in `scale` of the image's, its width / height log-uniform in [3/4, 4/3]. The
    first of ten draws that fits is taken, else the largest box in the middle.
    """
    draws = jax.random.uniform(key, (2 * _ATTEMPTS + 2,))  # one call, because each compiles
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:_ATTEMPTS])
    logs = [math.log(bound) for bound in _RATIO]
    aspect = jnp.exp(logs[0] + (logs[1] - logs[0]) * draws[_ATTEMPTS:-2])
    high, wide = (jnp.round(jnp.sqrt(x)).astype(jnp.int32) for x in (area / aspect, area * aspect))
    fits = (high > 0) & (high <= height) & (wide > 0) & (wide <= width)
    attempt, any_fits = fits.argmax(), fits.any()

    largest = min(height, round(width / _RATIO[0])), min(width, round(height * _RATIO[1]))
    high = jnp.where(any_fits, high[attempt], largest[0])
    wide = jnp.where(any_fits, wide[attempt], largest[1])
    room = jnp.stack([height - high, width - wide])
    places = jnp.floor(draws[-2:] * (room + 1).astype(draws.dtype)).astype(jnp.int32)
    # In float32 a draw near 1 times room + 1 may round up to room + 1.
    top, left = jnp.where(any_fits, jnp.minimum(places, room), room // 2)
    return top, left, high, wide


def crop_and_resize(image: jax.Array, box: Sequence[jax.Array | int], size: int) -> jax.Array:
    """Cuts top, left, height, width out of f[H, W, C] and stretches them to f[size, size, C].

    Equals Pillow's `crop` and `resize(BILINEAR)`, with antialiasing, before rounding to bytes.
    """
    top, left, height, width = box

    def weights(start: jax.Array | int, length: jax.Array | int, count: int) -> jax.Array:
        """Returns f[size, count], triangles of half width max(1, length / size) in the interval."""
        start, length = (jnp.asarray(value).astype(image.dtype) for value in (start, length))
        scale = length / size
        centres = start + (jnp.arange(size, dtype=image.dtype)[:, None] + 0.5) * scale
        pixels = jnp.arange(count, dtype=image.dtype) + 0.5
        added = jnp.maximum(1 - jnp.abs(pixels - centres) / jnp.maximum(scale, 1), 0)
        added = jnp.where((pixels > start) & (pixels < start + length), added, 0)
        return added / added.sum(1, keepdims=True)

    # Matrix products in both directions, because a traced box cannot be sliced.
    return resample(
        image, weights(top, height, image.shape[0]), weights(left, width, image.shape[1])
    )


def resample(image: jax.Array, down: jax.Array, across: jax.Array) -> jax.Array:
    """Returns f[h, w, C] of f[H, W, C] by the weights of rows f[h, H] and of columns f[w, W]."""
    # By default, accelerators multiply with too few digits for pixels.
    rows = jnp.einsum("oh,hwc->owc", down, image, precision="highest")
    return jnp.einsum("pw,owc->opc", across, rows, precision="highest")


def _random_flip(key: jax.Array, image: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.5), image[:, ::-1], image)


def rotate(image: jax.Array, degrees: jax.Array | float) -> jax.Array:
    """Turns an image [H, W, C] counterclockwise; same size, nearest pixels, zeros from outside.

    Equals Pillow's `rotate` with its defaults, bit for bit if `degrees` is float64. H and W are at
    most 2**14.
    """

    def fixed(value: jax.Array) -> jax.Array:
        # Pillow's fixed point has 16 bits before the point and 16 after.
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
    return _pixels_at(image, rows, columns)


def _pixels_at(image: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
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

    For each x of `spread`, factors are uniform in [max(0, 1 - x), 1 + x], turns of hue in [-x, x].
    """
    *factors, hue = spread
    draws = jax.random.uniform(key, (8,))
    low = jnp.array([*(max(0.0, 1 - x) for x in factors), -hue])
    high = jnp.array([*(1 + x for x in factors), hue])
    amounts = low + (high - low) * draws[:4]
    order = jnp.argsort(draws[4:]).astype(jnp.int32)  # all 24 equally likely
    return jitter(image, amounts[:3], amounts[3], order)


def jitter(image: jax.Array, factors: jax.Array, turns: jax.Array, order: jax.Array) -> jax.Array:
    """Changes brightness, contrast, saturation and hue, 0 to 3, in the order i32[n].

    A factor of f[3], at least 0, below 1 moves the image towards black, its mean grey or the grey
    of each pixel, one above 1 away from it. `turns` shift hue.
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
    """Shifts hue of f[H, W, 3] around the circle of HSV; a third of a turn makes red green."""

    def valley(sixths: jax.Array) -> jax.Array:
        """Returns the lack of chroma at a hue: 0 from 4 to 6, 1 from 1 to 3, linear between."""
        sixths = sixths - 6 * jnp.floor(sixths / 6)
        return jnp.clip(jnp.minimum(sixths, 4 - sixths), 0, 1)

    turns = jnp.asarray(turns, image.dtype)
    red, green, blue = _colours(image)
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


def _colours(image: jax.Array) -> list[jax.Array]:
    if image.shape[-1] != 3:
        count = image.shape[-1]
        raise ValueError(f"this data.augment needs 3 channels, not {count}: choose another or none")
    return [image[..., i] for i in range(3)]


def _grey(image: jax.Array) -> jax.Array:
    """Returns f[H, W, 1] of f[H, W, 3]: 0.299 red + 0.587 green + 0.114 blue."""
    red, green, blue = (colour[..., None] for colour in _colours(image))
    return red * 0.299 + green * 0.587 + blue * 0.114  # ITU-R 601-2, as Pillow's mode "L"


def _affine(image: jax.Array, rows: tuple, columns: tuple) -> jax.Array:
    """Returns for each new pixel the old one nearest to its centre; 0 outside."""
    # `rows` (a, b, c) gives the old row, a * row + b * column + c; `columns` gives the old column.
    high, wide = image.shape[:2]
    y, x = jnp.arange(high, dtype=float)[:, None] + 0.5, jnp.arange(wide, dtype=float) + 0.5
    return _pixels_at(image, *(jnp.floor(a * y + b * x + c) for a, b, c in (rows, columns)))


def _luma(image: jax.Array) -> jax.Array:
    """Returns Pillow's mode L, in its fixed point."""
    red, green, blue = (colour.astype(jnp.int32) for colour in _colours(image))
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
    """Replaces each level by (darker pixels + step // 2) // step, as Pillow does."""
    # `step` is the number of pixels below the brightest level // 255.
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
