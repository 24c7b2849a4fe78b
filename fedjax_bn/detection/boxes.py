"""Boxes: two forms, how much two of them overlap, and what a detector's raw outputs say of them.

*Corners* are (x1, y1, x2, y2), *centres* (x, y, width, height), in any unit of length.
"""

import jax
import jax.numpy as jnp

_LEAST = 1e-7  # what keeps quotients finite


def to_centres(corners: jax.Array) -> jax.Array:
    """Corners f[..., 4] as centres."""
    low, high = corners[..., :2], corners[..., 2:]
    return jnp.concatenate([(low + high) / 2, high - low], -1)


def to_corners(centres: jax.Array) -> jax.Array:
    """Centres f[..., 4] as corners."""
    middle, half = centres[..., :2], centres[..., 2:] / 2
    return jnp.concatenate([middle - half, middle + half], -1)


def iou(one: jax.Array, other: jax.Array) -> jax.Array:
    """Intersection over union f[...] of corners f[..., 4], which broadcast; 0 of no area at all."""
    low = jnp.maximum(one[..., :2], other[..., :2])
    high = jnp.minimum(one[..., 2:], other[..., 2:])
    both = jnp.maximum(high - low, 0).prod(-1)
    union = _area(one) + _area(other) - both
    return jnp.where(union > 0, both / jnp.where(union > 0, union, 1), 0)


def ciou(predicted: jax.Array, true: jax.Array) -> jax.Array:
    """Complete IoU f[...] (Zheng et al., AAAI 2020), in (-2, 1]; 1 of equal boxes.

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
    v = 4 / jnp.pi**2 * jnp.square(_slope(true) - _slope(predicted))
    a = jax.lax.stop_gradient(v / (v - overlap + 1 + _LEAST))
    return overlap - distance / diagonal - a * v


def decode_offsets(raw: jax.Array, anchors: jax.Array) -> jax.Array:
    """Centres f[..., 4] relative to the cell: (2 s(x) - 0.5, 2 s(y) - 0.5, (2 s(w))^2 a_w, ...).

    s is the sigmoid; so the centre lies in (-0.5, 1.5) cells and a side below 4 of the anchor's.

    Args:
      raw: f[..., 4].
      anchors: f[..., 2], in cells.
    """
    squeezed = 2 * jax.nn.sigmoid(raw)
    return jnp.concatenate([squeezed[..., :2] - 0.5, jnp.square(squeezed[..., 2:]) * anchors], -1)


def encode_offsets(centres: jax.Array, anchors: jax.Array) -> jax.Array:
    """What `decode_offsets` turns into these centres f[..., 4], relative to the cell."""
    place = (centres[..., :2] + 0.5) / 2
    size = jnp.sqrt(centres[..., 2:] / anchors) / 2
    share = jnp.concatenate([place, size], -1)
    return jnp.log(share) - jnp.log1p(-share)


def _area(corners: jax.Array) -> jax.Array:
    return (corners[..., 2:] - corners[..., :2]).prod(-1)


def _slope(centres: jax.Array) -> jax.Array:
    """atan(width / height)."""
    return jnp.arctan2(centres[..., 2], jnp.maximum(centres[..., 3], _LEAST))
