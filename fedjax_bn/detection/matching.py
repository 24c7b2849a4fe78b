"""Which cells and anchors of a level are to predict which boxes: fixed shapes, no loop over boxes.

A box matches an anchor of the level where max(w / a_w, a_w / w, h / a_h, a_h / h) < ratio. It is
then predicted by the cell of its centre and by the nearest neighbours, up to two: that to the left
where the fraction of x is below 1/2 and x > 1, and likewise up, right (with W - x) and down.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The cell itself, and its neighbours left, up, right and down: (across, down).
_STEPS = ((0, 0), (-1, 0), (0, -1), (1, 0), (0, 1))
PLACES = len(_STEPS)


class Matches(NamedTuple):
    """The matches of M boxes an image on one level, with P = 5 cells a box and A anchors a cell.

    Attributes:
      place: i32[B, M, P, A], number of a prediction among the H * W * A of the image's level.
      matched: bool[B, M, P, A]; where it is False the others say nothing.
      box: f[B, M, P, 4], centres relative to the cell, in cells; of side 1 where nothing matches.
    """

    place: jax.Array
    matched: jax.Array
    box: jax.Array


def match(
    boxes: jax.Array, real: jax.Array, anchors: jax.Array, cells: tuple[int, int], ratio: float
) -> Matches:
    """The matches of one level.

    A centre on the line between two cells belongs to both, once each.

    Args:
      boxes: centres f[B, M, 4], in cells.
      real: bool[B, M], those that are boxes at all.
      anchors: f[A, 2], in cells.
      cells: (H, W).
      ratio: above 1.
    """
    sides = boxes[..., 2:]
    real = real & (sides > 0).all(-1)
    sides = jnp.where(real[..., None], sides, 1)
    quotient = sides[..., None, :] / anchors
    fits = jnp.maximum(quotient, 1 / quotient).max(-1) < ratio  # [B, M, A]
    near, cell = _cells(boxes[..., :2], cells)
    number = cell[..., 1] * cells[1] + cell[..., 0]
    each = anchors.shape[0]
    matched = (real[..., None] & near)[..., None] & fits[..., None, :]
    centre = boxes[..., None, :2] - cell.astype(boxes.dtype)
    centre = jnp.where(matched.any(-1, keepdims=True), centre, 0)
    box = jnp.concatenate([centre, jnp.broadcast_to(sides[..., None, :], centre.shape)], -1)
    return Matches(number[..., None] * each + jnp.arange(each, dtype=jnp.int32), matched, box)


def _cells(centre: jax.Array, cells: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Whether a centre f[B, M, 2] is near a place, bool[B, M, P], and which cell (across, down)
    i32[B, M, P, 2] that is, within the map.
    """
    size = jnp.asarray(cells[::-1], centre.dtype)
    low, high = centre % 1, (size - centre) % 1
    before = (low < 0.5) & (centre > 1)
    after = (high > 0) & (high < 0.5) & (size - centre > 1)
    near = jnp.concatenate([jnp.ones_like(before[..., :1]), before, after], -1)
    steps = jnp.asarray(_STEPS, jnp.int32)
    cell = jnp.floor(centre).astype(jnp.int32)[..., None, :] + steps
    return near, jnp.clip(cell, 0, jnp.asarray(cells[::-1], jnp.int32) - 1)
