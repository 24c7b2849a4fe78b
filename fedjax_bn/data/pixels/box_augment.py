"""Changes training images at random on the device, and moves their boxes along.

`change(key, batch) -> batch` of bytes u8[B, S, S, 3] and boxes, see `data.label_trees`; each
sample has its own key, so that without mosaic its result does not depend on others of the batch. A
move is a scale s about the middle (negative to mirror) and a shift t: x' = s (x - 1/2) + 1/2 + t in
shares of the side. Pixels from outside the image are grey, like the bars of a letterbox.

A mosaic (Bochkovskiy et al. 2020, YOLOv4) replaces an image by four images of the batch that meet
at a point c, seen through a window of one image's size. Each coordinate of c is uniform in [-1/2,
1/2] from the middle. A mosaic has four times as many boxes, most of them padding.

A box is kept if, cut at the border, it is more than two pixels wide and high and has over a tenth
of its moved area.

Differs from YOLO's usual training: hue is shifted by a part of a turn, not multiplied; colours are
changed before the move, so that the grey outside stays grey; and the images of a mosaic come from
one batch, not from the whole dataset, and are not cut at the border of twice the side.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import Share, UpTo1, bounded
from fedjax_bn.data.label_trees import BOXES, CLASS, PADDING
from fedjax_bn.data.pixels.augment import LabelAugment, shift_hue
from fedjax_bn.data.pixels.decode import GREY
from fedjax_bn.engine.keys import stream

Batch = dict[str, Any]
_SMALLEST, _LEAST = 2.0, 0.1  # pixels of a side, and share of its area, above which a box is kept


class Move(NamedTuple):
    """A move of pixels and boxes, f[2] each: across and down."""

    scale: jax.Array  # negative to mirror
    shift: jax.Array  # in shares of the side


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
    mosaic: UpTo1 = 0.0,
) -> LabelAugment:
    """Returns random moves and changes of colour; defaults are those of YOLO's small detectors.

    Args:
      size: pixels a side of the images; not used, because the size does not change.
      flip: probability of exchanging left and right.
      scale: scales are uniform in 1 +- scale.
      shift: shifts are uniform in +- shift of the side.
      hue: turns are uniform in +- hue.
      saturation, value: factors are uniform in 1 +- these.
      mosaic: probability of a mosaic of the image and three others; YOLO's training has 1.
    """
    del size

    def of_one(key: jax.Array, images: jax.Array, label: Batch) -> tuple[jax.Array, Batch]:
        """Changes an image u8[T, S, S, 3] with the T - 1 = 0 or 3 that a mosaic puts beside it."""
        draws = jax.random.uniform(key, (7,))
        spread = 2 * draws - 1
        mirror = jnp.where(draws[0] < flip, -1, 1).astype(draws.dtype)
        size = 1 + scale * spread[1]
        move = Move(jnp.stack([size * mirror, size]), shift * spread[2:4])
        factors = (hue * spread[4], 1 + saturation * spread[5], 1 + value * spread[6])
        tiles = [change_colours(image.astype(draws.dtype) / 255, *factors) for image in images]
        if len(tiles) == 1:
            moved = move_pixels(tiles[0], move)
            boxes = move_boxes(jax.tree.map(lambda leaf: leaf[0], label), move, len(images[0]))
        else:
            moves, seen = tile_moves(stream(key, "mosaic tiles"), move, mosaic)
            moved, boxes = put_together(tiles, label, moves, seen)
        return jnp.clip(jnp.floor(moved * 255 + 0.5), 0, 255).astype(jnp.uint8), boxes

    def change(key: jax.Array, batch: Batch) -> Batch:
        images, label = batch["image"], batch["label"]
        if images.dtype != jnp.uint8 or images.ndim != 4 or images.shape[1] != images.shape[2]:
            raise ValueError(
                f"data.augment=boxes needs square images u8[B, S, S, 3], not "
                f"{images.dtype}{images.shape}: choose none"
            )
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(images)))
        rows = jnp.arange(len(images))[:, None]
        if mosaic:
            # Draws three valid images of the batch for each; any three if none is valid.
            logits = jnp.where(batch["valid"], 0.0, -1e9)
            draw = partial(jax.random.categorical, logits=logits, shape=(3,))
            partners = jax.vmap(lambda sample_key: draw(stream(sample_key, "mosaic partners")))(
                keys
            )
            rows = jnp.concatenate([rows, partners], 1)
        beside = jax.tree.map(lambda leaf: leaf[rows], (images, label))
        image, label = jax.vmap(of_one)(keys, *beside)
        return batch | {"image": image, "label": label}

    return LabelAugment(change, BOXES)


def tile_moves(key: jax.Array, move: Move, probability: float) -> tuple[list[Move], jax.Array]:
    """Returns the moves of the four images of a mosaic, and which are seen: the first, or all."""
    draws = jax.random.uniform(key, (3,), move.scale.dtype)
    together, point = draws[0] < probability, draws[1:]
    moves = []
    for down in (0, 1):
        for across in (0, 1):
            # Tiles cover [point - 1, point] of the window; where `behind` is 1, [point, point + 1].
            behind = jnp.asarray((across, down), point.dtype)
            away = jnp.where(together, 1 - point - behind, 0)  # 0: not moved, as a single image
            moves.append(Move(move.scale, move.shift - move.scale * away))
    return moves, together | (jnp.arange(4) == 0)


def put_together(
    tiles: Sequence[jax.Array], label: Batch, moves: Sequence[Move], seen: jax.Array
) -> tuple[jax.Array, Batch]:
    """Moves those of T images f[S, S, 3] that are seen into one, and joins their T * M boxes."""
    grey = jnp.asarray(GREY / 255, tiles[0].dtype)
    total, parts = jnp.full_like(tiles[0], grey), []
    for t, (image, move) in enumerate(zip(tiles, moves, strict=True)):
        total += jnp.where(seen[t], move_pixels(image, move) - grey, 0)
        boxes = move_boxes(jax.tree.map(lambda leaf, t=t: leaf[t], label), move, len(image))
        parts.append(_kept(boxes[BOXES], boxes[CLASS], seen[t]))
    return total, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def move_pixels(image: jax.Array, move: Move) -> jax.Array:
    """Moves an image f[S, S, C] in [0, 1], bilinear; pixels from outside are grey."""
    size, dtype = image.shape[0], image.dtype
    grey = jnp.asarray(GREY / 255, dtype)
    pixels = jnp.arange(size, dtype=dtype) + 0.5

    def weights(scale: jax.Array, shift: jax.Array) -> jax.Array:
        """Returns f[size, size]: the weight of each old pixel in each new one."""
        came_from = ((pixels[:, None] / size - 0.5 - shift) / scale + 0.5) * size
        return jnp.maximum(1 - jnp.abs(pixels - came_from), 0)

    across, down = (weights(move.scale[i], move.shift[i]) for i in (0, 1))
    # Grey is subtracted first, so that pixels from outside, whose weights are zero, become grey.
    rows = jnp.einsum("oh,hwc->owc", down, image - grey, precision="highest")
    return jnp.einsum("pw,owc->opc", across, rows, precision="highest") + grey


def move_boxes(label: Batch, move: Move, size: int) -> Batch:
    """Moves an image's boxes and cuts them at its border; boxes not kept become padding."""
    boxes = label[BOXES]
    corners = boxes.reshape(-1, 2, 2)  # [M, first or last, across or down]
    scale, shift = (part.astype(boxes.dtype) for part in move)
    corners = scale * (corners - 0.5) + 0.5 + shift
    upper_left, lower_right = corners.min(1), corners.max(1)
    cut_upper_left, cut_lower_right = jnp.clip(upper_left, 0, 1), jnp.clip(lower_right, 0, 1)
    sides = cut_lower_right - cut_upper_left
    areas = jnp.prod(lower_right - upper_left, -1)
    stays = (sides * size > _SMALLEST).all(-1) & (jnp.prod(sides, -1) > _LEAST * areas)
    moved = jnp.concatenate([cut_upper_left, cut_lower_right], -1)
    return _kept(moved, label[CLASS], stays)


def _kept(boxes: jax.Array, classes: jax.Array, stays: jax.Array) -> Batch:
    """Returns boxes f[M, 4] and classes i32[M] as labels; boxes that do not stay become padding."""
    stays &= classes != PADDING
    return {
        BOXES: jnp.where(stays[:, None], boxes, jnp.zeros((), boxes.dtype)),
        CLASS: jnp.where(stays, classes, PADDING),
    }


def change_colours(
    image: jax.Array, turns: jax.Array, saturation: jax.Array, value: jax.Array
) -> jax.Array:
    """Shifts hue by `turns` turns, and multiplies HSV's saturation and value, up to 1."""
    high = image.max(-1, keepdims=True)
    chroma = high - image.min(-1, keepdims=True)
    saturating = high / jnp.where(chroma > 0, chroma, 1)  # the factor at which saturation is 1
    image = high - (high - image) * jnp.minimum(saturation, saturating)
    image = image * jnp.minimum(value, 1 / jnp.where(high > 0, high, 1))
    return shift_hue(image, turns)
