"""Anchors and boxes: forms of a box, how much two of them overlap, and what raw outputs mean.

*Corners* are (x1, y1, x2, y2), *centres* (x, y, width, height), in any unit of length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Size = tuple[float, float]
_LEAST = 1e-7  # keeps quotients finite


class Anchors(NamedTuple):
    """The levels of a detector, from the finest map of cells to the coarsest.

    Anchors are the sizes from which a detector's boxes are scaled (Redmon & Farhadi 2018, YOLOv3).

    Attributes:
      sizes: (width, height) in pixels of the A anchors of each level.
      strides: pixels a cell, of each level.
    """

    sizes: tuple[tuple[Size, ...], ...]
    strides: tuple[int, ...]

    @property
    def each(self) -> int:
        """A, anchors a cell."""
        return len(self.sizes[0])


def to_centres(corners: jax.Array) -> jax.Array:
    """Returns corners f[..., 4] as centres."""
    low, high = corners[..., :2], corners[..., 2:]
    return jnp.concatenate([(low + high) / 2, high - low], -1)


def to_corners(centres: jax.Array) -> jax.Array:
    """Returns centres f[..., 4] as corners."""
    middle, half = centres[..., :2], centres[..., 2:] / 2
    return jnp.concatenate([middle - half, middle + half], -1)


def iou(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns intersection over union f[...] of corners f[..., 4], which broadcast.

    It is 0 where neither box has an area.
    """
    low = jnp.maximum(one[..., :2], other[..., :2])
    high = jnp.minimum(one[..., 2:], other[..., 2:])
    both = jnp.maximum(high - low, 0).prod(-1)
    area, other_area = ((box[..., 2:] - box[..., :2]).prod(-1) for box in (one, other))
    union = area + other_area - both
    # The inner `where` keeps 0 / 0 out of the gradient, which would be NaN.
    return jnp.where(union > 0, both / jnp.where(union > 0, union, 1), 0)


def ciou(predicted: jax.Array, true: jax.Array) -> jax.Array:
    """Returns complete IoU f[...] (Zheng et al., AAAI 2020), in (-2, 1]; 1 for equal boxes.

        CIoU = IoU - d^2 / c^2 - a v,    v = 4 / pi^2 (atan(w / h) - atan(w' / h'))^2,
        a = v / (v - IoU + 1 + 1e-7), without gradient

    with d between the centres and c the diagonal of the smallest box about both.

    Args:
      predicted: centres f[..., 4]; sides at least 0.
      true: centres f[..., 4]; sides above 0.
    """
    one, other = to_corners(predicted), to_corners(true)
    overlap = iou(one, other)
    low = jnp.minimum(one[..., :2], other[..., :2])
    high = jnp.maximum(one[..., 2:], other[..., 2:])
    diagonal = jnp.square(high - low).sum(-1)
    distance = jnp.square(predicted[..., :2] - true[..., :2]).sum(-1)
    slope, true_slope = (
        jnp.arctan2(box[..., 2], jnp.maximum(box[..., 3], _LEAST)) for box in (predicted, true)
    )
    v = 4 / jnp.pi**2 * jnp.square(true_slope - slope)
    a = jax.lax.stop_gradient(v / (v - overlap + 1 + _LEAST))
    return overlap - distance / diagonal - a * v


def decode_offsets(raw: jax.Array, anchors: jax.Array) -> jax.Array:
    """Returns centres f[..., 4] relative to the cell.

        (2 s(x) - 0.5, 2 s(y) - 0.5, (2 s(w))^2 a_w, (2 s(h))^2 a_h)

    s is the sigmoid, so the centre is in (-0.5, 1.5) cells and a side below 4 of the anchor's.

    Args:
      raw: f[..., 4].
      anchors: f[..., 2], in cells.
    """
    squeezed = 2 * jax.nn.sigmoid(raw)
    return jnp.concatenate([squeezed[..., :2] - 0.5, jnp.square(squeezed[..., 2:]) * anchors], -1)
