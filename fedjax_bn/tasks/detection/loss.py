"""The loss of a detector with anchors: boxes by complete IoU, objectness and classes by logits.

It was written from the formulas: anchors and logistic classes of YOLOv3 (Redmon & Farhadi 2018),
CIoU (Zheng et al., AAAI 2020). Shapes are fixed, so that the loss works under `jit`, `vmap`, `scan`
and `shard_map`: each level has M boxes x 5 cells x A anchors, with a mask of the matches.

    L = (g_box L_box + g_obj (S / 640)^2 L_obj + g_class (C / 80) L_class) n

for n images of S = sqrt(H W) pixels a side. Each part is a sum over levels,

    L_box    mean over matches of 1 - CIoU
    L_obj    4, 1 and 0.4 (on the levels) times the mean over cells and anchors of BCE; the target
             is max(CIoU, 0) at a match, the largest of several, without gradient, and 0 elsewhere
    L_class  mean over matches and classes of BCE with one-hot targets; 0 for a single class

A box matches an anchor of a level if max(w / a_w, a_w / w, h / a_h, a_h / h) < 4. The cell of
its centre then predicts the box, and so do up to two nearest neighbours of the cell: the left one
if the fraction of x is below 1/2 and x > 1, and likewise the ones above, right (with W - x) and
below.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.engine.dtypes import wide
from fedjax_bn.models.yolo import Anchors

Outputs = Sequence[jax.Array]
_SIDE, _CLASSES = 640, 80  # image side and number of classes to which the gains refer
_BALANCE = (4.0, 1.0, 0.4)  # of L_obj on the levels
# The cell itself, and its neighbours left, up, right and down: (across, down).
_STEPS = ((0, 0), (-1, 0), (0, -1), (1, 0), (0, 1))
_RATIO = 4.0  # of the sides of a box and an anchor, below which they match
_LEAST = 1e-7  # keeps quotients finite


class Recipe(NamedTuple):
    """The settings of the loss."""

    box: float = 0.05  # box, objectness, classes: the gains g, at least 0
    objectness: float = 1.0
    classes: float = 0.5
    scaled: bool = True  # whether the factors (S / 640)^2 and C / 80 above apply


def detection_loss(
    outputs: Outputs,
    label: dict[str, jax.Array],
    valid: jax.Array,
    anchors: Anchors,
    recipe: Recipe | None = None,
) -> jax.Array:
    """Returns the loss f[] above, computed in at least float32.

    Args:
      outputs: for each level f[B, H, W, A, 5 + C]: x, y, width, height, objectness, classes.
      label: {"boxes": corners f[B, M, 4] in [0, 1] of the image, "class": i32[B, M]}; rows with a
        class below 0, such as -1 for padding, are ignored.
      valid: bool[B], images that count.
      anchors: the model's anchors; others than those of the outputs raise ValueError.
    """
    recipe = recipe or Recipe()
    anchor_counts = [raw.shape[3] for raw in outputs]
    if anchor_counts != [len(level) for level in anchors.sizes]:
        problem = f"levels have {anchor_counts} anchors a cell, but the task's are {anchors.sizes}"
        raise ValueError(f"{problem}: make the task by detection(model.anchors)")
    outputs = [wide(raw) for raw in outputs]
    dtype = outputs[0].dtype
    real = valid[:, None] & (label["class"] >= 0)
    corners = label["boxes"].astype(dtype)
    low, high = corners[..., :2], corners[..., 2:]
    boxes = jnp.concatenate([(low + high) / 2, high - low], -1)  # centres and sides
    levels = []
    for raw, sizes, stride in zip(outputs, *anchors, strict=True):
        cells, inside = raw.shape[1:3], jnp.asarray(sizes, dtype) / stride
        scale = jnp.asarray(cells[::-1] * 2, dtype)
        matches = _match_anchors(boxes * scale, real, inside, cells)
        levels.append(_of_level(raw, matches, label["class"], valid, inside))
    box, objectness, classes = zip(*levels, strict=True)
    by_area = by_classes = 1.0
    if recipe.scaled:
        height, width = outputs[0].shape[1:3]
        by_area = height * width * anchors.strides[0] ** 2 / _SIDE**2
        by_classes = (outputs[0].shape[-1] - 5) / _CLASSES
    balanced = zip(_BALANCE[: len(objectness)], objectness, strict=True)
    weighted = sum(weight * part for weight, part in balanced)
    total = recipe.box * sum(box)
    total += recipe.objectness * by_area * weighted
    total += recipe.classes * by_classes * sum(classes)
    return total * valid.sum().astype(total.dtype)


def _match_anchors(
    boxes: jax.Array, real: jax.Array, anchors: jax.Array, cells: tuple[int, int]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the matches of M boxes per image on one level, with P = 5 cells per box."""
    # The results are `place` i32[B, M, P, A], indices of predictions among the H * W * A of the
    # level; `matched` bool[B, M, P, A], which places count; and the boxes f[B, M, P, 4] in cells,
    # with centres relative to the cell, or offset 0 where nothing matches.
    sides = boxes[..., 2:]
    real = real & (sides > 0).all(-1)
    sides = jnp.where(real[..., None], sides, 1)  # avoids infinite quotients
    quotient = sides[..., None, :] / anchors
    fits = jnp.maximum(quotient, 1 / quotient).max(-1) < _RATIO  # [B, M, A]

    centre, size = boxes[..., :2], jnp.asarray(cells[::-1], boxes.dtype)
    low, high = centre % 1, (size - centre) % 1
    before = (low < 0.5) & (centre > 1)
    after = (high > 0) & (high < 0.5) & (size - centre > 1)
    near = jnp.concatenate([jnp.ones_like(before[..., :1]), before, after], -1)  # [B, M, P]
    cell = jnp.floor(centre).astype(jnp.int32)[..., None, :] + jnp.asarray(_STEPS, jnp.int32)
    cell = jnp.clip(cell, 0, jnp.asarray(cells[::-1], jnp.int32) - 1)  # [B, M, P, 2]

    number, per_cell = cell[..., 1] * cells[1] + cell[..., 0], anchors.shape[0]
    matched = (real[..., None] & near)[..., None] & fits[..., None, :]
    offset = centre[..., None, :] - cell.astype(boxes.dtype)
    offset = jnp.where(matched.any(-1, keepdims=True), offset, 0)
    box = jnp.concatenate([offset, jnp.broadcast_to(sides[..., None, :], offset.shape)], -1)
    return number[..., None] * per_cell + jnp.arange(per_cell, dtype=jnp.int32), matched, box


def _of_level(
    raw: jax.Array,
    matches: tuple[jax.Array, jax.Array, jax.Array],
    classes: jax.Array,
    valid: jax.Array,
    anchors: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns L_box, L_obj without its balance, and L_class of one level, f[] each."""
    flat = raw.reshape(raw.shape[0], -1, raw.shape[-1])
    places, mask, boxes = matches
    place = places.reshape(raw.shape[0], -1)

    # `_match_anchors` clips places to the map, so XLA need not check each index.
    def read(row: jax.Array, index: jax.Array) -> jax.Array:
        return row.at[index].get(mode="promise_in_bounds")

    predicted = jax.vmap(read)(flat, place).reshape(*places.shape, -1)  # [B, M, P, A, 5 + C]
    overlap = _complete_iou(decode_offsets(predicted[..., :4], anchors), boxes[..., None, :])
    count = jnp.maximum(mask.sum(), 1).astype(raw.dtype)
    box = jnp.where(mask, 1 - overlap, 0).sum() / count

    goal = jnp.where(mask, jax.lax.stop_gradient(overlap), 0).reshape(place.shape)

    # `max`, because `set` would keep an arbitrary one of several boxes at the same place.
    def write(row: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
        return row.at[index].max(value, mode="promise_in_bounds")

    target = jax.vmap(write)(jnp.zeros(flat.shape[:2], raw.dtype), place, goal)
    cost = optax.sigmoid_binary_cross_entropy(flat[..., 4], target).mean(1)
    images = jnp.maximum(valid.sum(), 1).astype(raw.dtype)
    objectness = jnp.where(valid, cost, 0).sum() / images

    number = raw.shape[-1] - 5
    if number == 1:
        return box, objectness, jnp.zeros((), raw.dtype)
    hot = jax.nn.one_hot(classes, number, dtype=raw.dtype)
    cost = optax.sigmoid_binary_cross_entropy(predicted[..., 5:], hot[:, :, None, None]).mean(-1)
    return box, objectness, jnp.where(mask, cost, 0).sum() / count


def to_corners(centres: jax.Array) -> jax.Array:
    """Converts centres f[..., (x, y, width, height)] to corners f[..., (x1, y1, x2, y2)]."""
    middle, half = centres[..., :2], centres[..., 2:] / 2
    return jnp.concatenate([middle - half, middle + half], -1)


def iou(boxes: jax.Array, true_boxes: jax.Array) -> jax.Array:
    """Returns IoU f[...] of corners f[..., 4], which broadcast; 0 where neither has an area."""
    low = jnp.maximum(boxes[..., :2], true_boxes[..., :2])
    high = jnp.minimum(boxes[..., 2:], true_boxes[..., 2:])
    intersection = jnp.maximum(high - low, 0).prod(-1)
    area, true_area = (
        (corners[..., 2:] - corners[..., :2]).prod(-1) for corners in (boxes, true_boxes)
    )
    union = area + true_area - intersection
    # The inner `where` avoids 0 / 0, which would make the gradient NaN.
    return jnp.where(union > 0, intersection / jnp.where(union > 0, union, 1), 0)


def _complete_iou(predicted: jax.Array, true: jax.Array) -> jax.Array:
    """Returns complete IoU f[...] (Zheng et al., AAAI 2020), in (-2, 1]; 1 for equal boxes.

        CIoU = IoU - d^2 / c^2 - a v,    v = 4 / pi^2 (atan(w / h) - atan(w' / h'))^2,
        a = v / (v - IoU + 1 + 1e-7), without gradient

    with the distance d between the centres and the diagonal c of the smallest box around both. Both
    arguments are centres f[..., 4]; the true boxes have sides above 0.
    """
    corners, true_corners = to_corners(predicted), to_corners(true)
    overlap = iou(corners, true_corners)
    low = jnp.minimum(corners[..., :2], true_corners[..., :2])
    high = jnp.maximum(corners[..., 2:], true_corners[..., 2:])
    diagonal = jnp.square(high - low).sum(-1)
    distance = jnp.square(predicted[..., :2] - true[..., :2]).sum(-1)
    slope, true_slope = (
        jnp.arctan2(box[..., 2], jnp.maximum(box[..., 3], _LEAST)) for box in (predicted, true)
    )
    v = 4 / jnp.pi**2 * jnp.square(true_slope - slope)
    a = jax.lax.stop_gradient(v / (v - overlap + 1 + _LEAST))
    return overlap - distance / diagonal - a * v


def decode_offsets(raw: jax.Array, anchors: jax.Array) -> jax.Array:
    """Returns centres f[..., 4] relative to the cell, of raw f[..., 4] and anchors f[..., 2] there.

        (2 s(x) - 0.5, 2 s(y) - 0.5, (2 s(w))^2 a_w, (2 s(h))^2 a_h)

    s is the sigmoid, so the centre is in (-0.5, 1.5) cells and a side is below 4 anchor sides.
    """
    squeezed = 2 * jax.nn.sigmoid(raw)
    return jnp.concatenate([squeezed[..., :2] - 0.5, jnp.square(squeezed[..., 2:]) * anchors], -1)
