"""Changes training images at random on the device, and moves their boxes or masks along.

Images are bytes u8[B, S, S, C], and labels boxes or masks, see `data.labels`.

**Boxes.** A move is a scale s about the middle (negative to mirror) and a shift t: x' = s (x - 1/2)
+ 1/2 + t in shares of the side. Pixels from outside are grey, like the bars of a letterbox. A box
stays if, cut at the border, it is over two pixels wide and high and a tenth of its moved area.

Differs from YOLO's usual training: there is no mosaic; hue is shifted by a part of a turn, not
multiplied; and colours are changed before the move, so that the grey outside stays grey.

**Masks.** A new pixel at q, from the middle of the square, shows the old one at

    p = Q R(-a) (q - t) / s  (its columns exchanged if mirrored)  + d(q)

with quarter turns Q, an angle a, a scale s, a shift t, and a smooth field of displacements d. A
scale above 1 with a shift is a random crop. The field is that of U-Net (Ronneberger et al. 2015,
section 3.1): normal vectors on a grid of 3 x 3 points, cubic in between. Images are bilinear and
their border is repeated outside. Masks take the nearest pixel and are unlabelled outside. Then
brightness, contrast about the mean and gamma change the images alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates

from fedjax_bn.arguments.ranges import Share, UpTo1, between, bounded
from fedjax_bn.data.labels import BOXES, CLASS, MASK, PADDING
from fedjax_bn.data.pixels.augment import LabelAugment, as_bytes, resample, sample_keys, shift_hue
from fedjax_bn.data.pixels.decode import GREY
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.engine.keys import stream

Batch = dict[str, Any]
_SMALLEST, _LEAST = 2.0, 0.1  # pixels of a side, and share of its area, above which a box is kept
_GRID = 3  # points a side of the field of displacements


@bounded
def of_boxes(
    size: int,
    *,
    flip: UpTo1 = 0.5,
    scale: Share = 0.5,
    shift: Share = 0.1,
    hue: Share = 0.015,
    saturation: Share = 0.7,
    value: Share = 0.4,
) -> LabelAugment:
    """Returns random moves and changes of colour; defaults are those of YOLO's small detectors.

    Args:
      size: pixels a side of the images, which does not change.
      flip: probability of exchanging left and right.
      scale: scales are uniform in 1 +- scale.
      shift: shifts are uniform in +- shift of the side.
      hue: turns are uniform in +- hue.
      saturation, value: factors are uniform in 1 +- these.
    """
    del size

    def of_image(key: jax.Array, image: jax.Array, label: Batch) -> tuple[jax.Array, Batch]:
        draws = jax.random.uniform(key, (7,))
        spread = 2 * draws - 1
        mirror = jnp.where(draws[0] < flip, -1, 1).astype(draws.dtype)
        factor = 1 + scale * spread[1]
        move = jnp.stack([factor * mirror, factor]), shift * spread[2:4]
        factors = (hue * spread[4], 1 + saturation * spread[5], 1 + value * spread[6])
        pixels = _change_colours(image.astype(draws.dtype) / 255, *factors)
        return as_bytes(_move_pixels(pixels, *move)), _move_boxes(label, *move, len(image))

    return _of_batches(of_image, BOXES)


@bounded
def of_masks(
    size: int,
    *,
    flip: UpTo1 = 0.5,
    quarters: UpTo1 = 0.0,
    rotate: Annotated[float, between(0, 180)] = 15.0,
    scale: Share = 0.1,
    shift: Share = 0.05,
    elastic: Share = 0.0,
    brightness: Share = 0.2,
    contrast: Share = 0.2,
    gamma: Share = 0.2,
) -> LabelAugment:
    """Returns random moves of images and masks, and changes of the images' intensities.

    With quarters=1 and flip=0.5, all eight positions of a square are equally likely.

    Args:
      size: pixels a side of the images, which does not change.
      flip: probability of exchanging left and right.
      quarters: probability of a turn by 0, 90, 180 or 270 degrees, equally likely.
      rotate: angles are uniform in +- rotate.
      scale: scales are uniform in 1 +- scale.
      shift: shifts are uniform in +- shift of the side, down and across.
      elastic: standard deviation of the displacements in shares of the side; U-Net's is 0.02.
      brightness: factors are uniform in 1 +- brightness.
      contrast: factors of the distance from the image's mean are uniform in 1 +- contrast.
      gamma: exponents of intensities in [0, 1] are uniform in 1 +- gamma.
    """
    del size

    def of_image(key: jax.Array, image: jax.Array, label: Batch) -> tuple[jax.Array, Batch]:
        draws = jax.random.uniform(key, (11,))
        spread = 2 * draws - 1
        turns = jnp.where(draws[1] < quarters, jnp.floor(4 * draws[2]).astype(jnp.int32), 0)
        moves = draws[0] < flip, turns, rotate * spread[3], 1 + scale * spread[4]
        places = _shown_places(len(image), (*moves, shift * spread[5:7]))
        if elastic:
            shape = 2, _GRID, _GRID
            points = jax.random.normal(stream(key, "elastic field"), shape, places.dtype)
            places += elastic * jax.image.resize(len(image) * points, places.shape, "cubic")
        pixels = image.astype(draws.dtype) / 255
        pixels = jnp.clip((1 + brightness * spread[7]) * pixels, 0, 1)
        factor = 1 + contrast * spread[8]
        pixels = jnp.clip(factor * pixels + (1 - factor) * pixels.mean(), 0, 1)
        pixels **= 1 + gamma * spread[9]
        at = partial(map_coordinates, coordinates=list(places), order=1, mode="nearest")
        moved = jax.vmap(at, -1, -1)(pixels)
        return as_bytes(moved), label | {MASK: _move_mask(label[MASK], places)}

    return _of_batches(of_image, MASK)


def _of_batches(of_image: Callable[..., tuple[jax.Array, Batch]], moves: str) -> LabelAugment:
    """Returns the change of batches by a function of key, image and labels of one sample."""

    def change(key: jax.Array, batch: Batch) -> Batch:
        keys = sample_keys(key, batch["image"], square=True)
        image, label = jax.vmap(of_image)(keys, batch["image"], batch["label"])
        return batch | {"image": image, "label": label}

    return LabelAugment(change, moves)


def _move_pixels(image: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Moves an image f[S, S, C] in [0, 1], bilinear; pixels from outside are grey."""
    size, dtype = image.shape[0], image.dtype
    grey = jnp.asarray(GREY / 255, dtype)
    pixels = jnp.arange(size, dtype=dtype) + 0.5

    def weights(axis: int) -> jax.Array:
        """Returns f[size, size]: the weights of old pixels in each new one, across or down."""
        came_from = ((pixels[:, None] / size - 0.5 - shift[axis]) / scale[axis] + 0.5) * size
        return jnp.maximum(1 - jnp.abs(pixels - came_from), 0)

    # Grey is subtracted first, so that pixels from outside, whose weights are zero, become grey.
    return resample(image - grey, weights(1), weights(0)) + grey


def _move_boxes(label: Batch, scale: jax.Array, shift: jax.Array, size: int) -> Batch:
    """Moves an image's boxes and cuts them at its border; those hardly seen become padding."""
    boxes = label[BOXES]
    corners = boxes.reshape(-1, 2, 2)  # [M, first or last, across or down]
    corners = scale.astype(boxes.dtype) * (corners - 0.5) + 0.5 + shift.astype(boxes.dtype)
    upper_left, lower_right = corners.min(1), corners.max(1)
    cut_upper_left, cut_lower_right = jnp.clip(upper_left, 0, 1), jnp.clip(lower_right, 0, 1)
    sides = cut_lower_right - cut_upper_left
    areas = jnp.prod(lower_right - upper_left, -1)
    stays = (sides * size > _SMALLEST).all(-1) & (jnp.prod(sides, -1) > _LEAST * areas)
    stays &= label[CLASS] != PADDING
    moved = jnp.concatenate([cut_upper_left, cut_lower_right], -1)
    return {
        BOXES: jnp.where(stays[:, None], moved, jnp.zeros((), boxes.dtype)),
        CLASS: jnp.where(stays, label[CLASS], PADDING),
    }


def _change_colours(
    image: jax.Array, turns: jax.Array, saturation: jax.Array, value: jax.Array
) -> jax.Array:
    """Shifts hue by `turns` turns, and multiplies HSV's saturation and value, up to 1."""
    high = image.max(-1, keepdims=True)
    chroma = high - image.min(-1, keepdims=True)
    saturating = high / jnp.where(chroma > 0, chroma, 1)  # the factor at which saturation is 1
    image = high - (high - image) * jnp.minimum(saturation, saturating)
    image = image * jnp.minimum(value, 1 / jnp.where(high > 0, high, 1))
    return shift_hue(image, turns)


def _shown_places(size: int, move: Sequence[jax.Array]) -> jax.Array:
    """Returns f[2, size, size], the row and column of the old pixel that each new one shows."""
    mirror, turns, degrees, scale, shift = move

    def rotation(cosine: jax.Array, sine: jax.Array) -> jax.Array:
        """Returns f[2, 2], which maps rows and columns back from a counterclockwise turn."""
        return jnp.stack([jnp.stack([cosine, sine]), jnp.stack([-sine, cosine])])

    angle = jnp.deg2rad(degrees)
    # Exact cosines and sines of quarter turns keep pixels on pixels.
    quarters = jnp.array([1, 0, -1, 0, 1], degrees.dtype)
    turned = rotation(quarters[turns], quarters[turns + 1] * -1)
    matrix = turned @ rotation(jnp.cos(angle), jnp.sin(angle)) / scale
    matrix = jnp.where(mirror, jnp.array([[1], [-1]], degrees.dtype), 1) * matrix
    middle = (size - 1) / 2
    pixels = jnp.stack(
        jnp.meshgrid(*[jnp.arange(size, dtype=matrix.dtype) - middle] * 2, indexing="ij")
    )
    pixels -= (shift * size)[:, None, None]
    # Sums of products, not a matrix product, which accelerators may round to fewer bits.
    return (matrix[:, :, None, None] * pixels).sum(1) + middle


def _move_mask(mask: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the nearest pixels of u8[S, S] at `places`, unlabelled outside."""
    rows, columns = jnp.floor(places + 0.5).astype(jnp.int32)
    inside = (rows >= 0) & (rows < len(mask)) & (columns >= 0) & (columns < len(mask))
    values = mask[jnp.where(inside, rows, 0), jnp.where(inside, columns, 0)]
    return jnp.where(inside, values, jnp.asarray(UNLABELLED, mask.dtype))
