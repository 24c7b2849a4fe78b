"""Changes training images at random on the device, and moves their masks along.

`change(key, batch) -> batch` of bytes u8[B, S, S, C] and masks u8[B, S, S], see `data.label_trees`;
each sample has its own key, so that its result does not depend on others of the batch.

A new pixel at q, from the middle of the square, shows the old one at

    p = Q R(-a) (q - t) / s  (its columns exchanged if mirrored)  + d(q)

with quarter turns Q, an angle a, a scale s, a shift t, and a smooth field of displacements d. A
scale above 1 with a shift is a random crop. The field is that of U-Net (Ronneberger et al. 2015,
section 3.1): normal vectors on a grid of 3 x 3 points, cubic in between.

Images are bilinear and their border is repeated outside. Masks take the nearest pixel, so that no
new value appears, and pixels from outside are unlabelled. Brightness, contrast and gamma change
images alone.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates

from fedjax_bn.arguments.ranges import Degrees, Share, UpTo1, bounded
from fedjax_bn.data.label_trees import MASK
from fedjax_bn.data.pixels.augment import LabelAugment
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.engine.keys import stream

_GRID = 3  # points a side of the field of displacements


@bounded
def of_masks(
    size: int,
    *,
    flip: UpTo1 = 0.5,
    quarters: UpTo1 = 0.0,
    rotate: Degrees = 15.0,
    scale: Share = 0.1,
    shift: Share = 0.05,
    elastic: Share = 0.0,
    brightness: Share = 0.2,
    contrast: Share = 0.2,
    gamma: Share = 0.2,
) -> LabelAugment:
    """Returns random moves of images and masks, and changes of the images' intensities.

    With every argument at 0 a batch keeps its bytes. With quarters=1 and flip=0.5, all eight
    positions of a square are equally likely.

    Args:
      size: pixels a side of the images; not used, because the size does not change.
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

    def of_one(key: jax.Array, image: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        draws = jax.random.uniform(key, (11,))
        spread = 2 * draws - 1
        turns = jnp.where(draws[1] < quarters, jnp.floor(4 * draws[2]).astype(jnp.int32), 0)
        matrix = move_matrix(draws[0] < flip, turns, rotate * spread[3], 1 + scale * spread[4])
        places = shown_places(len(image), matrix, shift * spread[5:7])
        if elastic:
            places += elastic * displacements(
                stream(key, "elastic field"), len(image), places.dtype
            )
        pixels = change_intensities(
            image.astype(draws.dtype) / 255,
            1 + brightness * spread[7],
            1 + contrast * spread[8],
            1 + gamma * spread[9],
        )
        moved = jnp.clip(jnp.floor(move_image(pixels, places) * 255 + 0.5), 0, 255)
        return moved.astype(jnp.uint8), move_mask(mask, places)

    def change(key: jax.Array, batch: dict[str, Any]) -> dict[str, Any]:
        images, label = batch["image"], batch["label"]
        if images.dtype != jnp.uint8 or images.ndim != 4 or images.shape[1] != images.shape[2]:
            raise ValueError(
                f"data.augment=masks needs square images u8[B, S, S, C], not "
                f"{images.dtype}{images.shape}: choose none"
            )
        # Unlike `split`, `fold_in` makes a sample's key independent of the size of the batch.
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(images)))
        image, mask = jax.vmap(of_one)(keys, images, label[MASK])
        return batch | {"image": image, "label": label | {MASK: mask}}

    return LabelAugment(change, MASK)


def move_matrix(
    mirror: jax.Array, turns: jax.Array, degrees: jax.Array, scale: jax.Array
) -> jax.Array:
    """Returns f[2, 2], from a new pixel's row and column to the old one's, from the middle.

    `turns` are quarter turns; these and `degrees` are counterclockwise.
    """
    angle = jnp.deg2rad(degrees)
    # Exact cosines and sines of quarter turns keep pixels on pixels.
    quarters = jnp.array([1, 0, -1, 0, 1], degrees.dtype)
    turned = _rotation(quarters[turns], quarters[turns + 1] * -1)
    matrix = turned @ _rotation(jnp.cos(angle), jnp.sin(angle)) / scale
    return jnp.where(mirror, jnp.array([[1], [-1]], degrees.dtype), 1) * matrix


def _rotation(cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Returns f[2, 2], which maps rows and columns back from a counterclockwise turn."""
    return jnp.stack([jnp.stack([cosine, sine]), jnp.stack([-sine, cosine])])


def shown_places(size: int, matrix: jax.Array, shift: jax.Array) -> jax.Array:
    """Returns f[2, size, size], the row and column of the old pixel that each new one shows.

    `shift` f[2] moves images down and across, in shares of the side.
    """
    middle = (size - 1) / 2
    pixels = jnp.stack(
        jnp.meshgrid(*[jnp.arange(size, dtype=matrix.dtype) - middle] * 2, indexing="ij")
    )
    pixels -= (shift * size)[:, None, None]
    # Sums of products, not a matrix product, which accelerators may round to fewer bits.
    return (matrix[:, :, None, None] * pixels).sum(1) + middle


def displacements(key: jax.Array, size: int, dtype: Any) -> jax.Array:
    """Returns smooth displacements f[2, size, size], whose standard deviation is the side."""
    points = size * jax.random.normal(key, (2, _GRID, _GRID), dtype)
    return jax.image.resize(points, (2, size, size), "cubic")


def move_image(image: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the pixels of f[S, S, C] at `places`, bilinear, with the border repeated outside."""
    at = partial(map_coordinates, coordinates=list(places), order=1, mode="nearest")
    return jax.vmap(at, -1, -1)(image)


def move_mask(mask: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the nearest pixels of u8[S, S] at `places`, unlabelled outside."""
    rows, columns = jnp.floor(places + 0.5).astype(jnp.int32)
    inside = (rows >= 0) & (rows < len(mask)) & (columns >= 0) & (columns < len(mask))
    values = mask[jnp.where(inside, rows, 0), jnp.where(inside, columns, 0)]
    return jnp.where(inside, values, jnp.asarray(UNLABELLED, mask.dtype))


def change_intensities(
    image: jax.Array, brightness: jax.Array, contrast: jax.Array, gamma: jax.Array
) -> jax.Array:
    """Applies brightness, contrast about the mean and gamma, in this order, to f[S, S, C]."""
    image = jnp.clip(brightness * image, 0, 1)
    image = jnp.clip(contrast * image + (1 - contrast) * image.mean(), 0, 1)
    return image**gamma
