"""The loss of a detector with anchors: boxes by complete IoU, objectness and classes by logits.

Written from the formulas: anchors and logistic classes of YOLOv3 (Redmon & Farhadi 2018), CIoU
(Zheng et al., AAAI 2020), matches as in `fedjax_bn.detection.matching`. Shapes are fixed, so it
works under `jit`, `vmap`, `scan` and `shard_map`: M boxes x 5 cells x A anchors a level, of which a
mask says what counts.

    L = (g_box L_box + g_obj (S / 640)^2 L_obj + g_class (C / 80) L_class) n

over n images of S = sqrt(H W) pixels a side; each part is a sum over levels,

    L_box    mean over matches of 1 - CIoU
    L_obj    balance * mean over cells and anchors of BCE with target max(CIoU, 0) at a match,
             the greatest of several, without gradient; 0 elsewhere
    L_class  mean over matches and classes of BCE with one-hot targets; 0 for a single class
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.detection.anchors import Anchors
from fedjax_bn.detection.boxes import ciou, decode_offsets, to_centres
from fedjax_bn.detection.matching import Matches, match

Outputs = Sequence[jax.Array]
_SIDE, _CLASSES = 640, 80  # those for which the gains are stated
_BALANCE = (4.0, 1.0, 0.4)


class Recipe(NamedTuple):
    """The free choices of the loss.

    Attributes:
      box, objectness, classes: the gains g, at least 0.
      balance: of the objectness of each level; () for the first of 4, 1, 0.4.
      scaled: whether objectness grows with the images' area and classes with their number, as
        above; False for the gains as they are.
      by_batch: whether L is multiplied by n, as above; False for a mean over images.
      ratio: how many times a box's side may be larger or smaller than its anchor's, above 1.
      smoothing: e in [0, 1): the targets of classes are 1 - e / 2 and e / 2.
    """

    box: float = 0.05
    objectness: float = 1.0
    classes: float = 0.5
    balance: tuple[float, ...] = ()
    scaled: bool = True
    by_batch: bool = True
    ratio: float = 4.0
    smoothing: float = 0.0


class Parts(NamedTuple):
    """The parts of the loss, each f[]: sums over levels, without their gains."""

    box: jax.Array
    objectness: jax.Array
    classes: jax.Array


def detection_loss(
    outputs: Outputs,
    label: dict[str, jax.Array],
    valid: jax.Array,
    anchors: Anchors,
    recipe: Recipe | None = None,
) -> jax.Array:
    """The loss f[] above, in the dtype of the outputs.

    Args:
      outputs: of each level f[B, H, W, A, 5 + C]: x, y, width, height, objectness, classes.
      label: {"boxes": corners f[B, M, 4] in [0, 1] of the image, "class": i32[B, M]}; with a class
        below 0, such as -1 of padding, there is no box to be learned.
      valid: bool[B], images that count.
      anchors: of the levels.
      recipe: `Recipe()` by default.

    Raises:
      ValueError: the outputs do not have the levels of the anchors.
    """
    recipe = recipe or Recipe()
    parts = detection_parts(outputs, label, valid, anchors, recipe)
    by_area = by_classes = 1.0
    if recipe.scaled:
        height, width = outputs[0].shape[1:3]
        by_area = height * width * anchors.strides[0] ** 2 / _SIDE**2
        by_classes = (outputs[0].shape[-1] - 5) / _CLASSES
    total = recipe.box * parts.box
    total += recipe.objectness * by_area * parts.objectness
    total += recipe.classes * by_classes * parts.classes
    return total * valid.sum().astype(total.dtype) if recipe.by_batch else total


def detection_parts(
    outputs: Outputs,
    label: dict[str, jax.Array],
    valid: jax.Array,
    anchors: Anchors,
    recipe: Recipe,
) -> Parts:
    """The three parts of `detection_loss`; its arguments and errors."""
    _check_levels(outputs, anchors, recipe)
    dtype = outputs[0].dtype
    real = valid[:, None] & (label["class"] >= 0)
    boxes = to_centres(label["boxes"].astype(dtype))
    levels = []
    for raw, sizes, stride in zip(outputs, *anchors, strict=True):
        cells, inside = raw.shape[1:3], jnp.asarray(sizes, dtype) / stride
        scale = jnp.asarray(cells[::-1] * 2, dtype)
        matches = match(boxes * scale, real, inside, cells, recipe.ratio)
        part = _of_level(raw, matches, label["class"], valid, inside, recipe.smoothing)
        levels.append(part)
    weights = recipe.balance or _BALANCE
    return Parts(
        sum(part.box for part in levels),
        sum(weight * part.objectness for weight, part in zip(weights, levels, strict=False)),
        sum(part.classes for part in levels),
    )


def _of_level(
    raw: jax.Array,
    matches: Matches,
    classes: jax.Array,
    valid: jax.Array,
    anchors: jax.Array,
    smoothing: float,
) -> Parts:
    """The parts of one level; objectness without its balance."""
    flat = raw.reshape(raw.shape[0], -1, raw.shape[-1])
    place, mask = matches.place.reshape(raw.shape[0], -1), matches.matched
    found = jax.vmap(lambda row, index: row.at[index].get(mode="promise_in_bounds"))(flat, place)
    found = found.reshape(*matches.place.shape, -1)  # [B, M, P, A, 5 + C]
    overlap = ciou(decode_offsets(found[..., :4], anchors), matches.box[..., None, :])
    count = jnp.maximum(mask.sum(), 1).astype(raw.dtype)
    box = jnp.where(mask, 1 - overlap, 0).sum() / count

    goal = jnp.where(mask, jax.lax.stop_gradient(overlap), 0).reshape(place.shape)
    target = jax.vmap(lambda row, index, value: row.at[index].max(value, mode="promise_in_bounds"))(
        jnp.zeros(flat.shape[:2], raw.dtype), place, goal
    )
    cost = optax.sigmoid_binary_cross_entropy(flat[..., 4], target).mean(1)
    images = jnp.maximum(valid.sum(), 1).astype(raw.dtype)
    objectness = jnp.where(valid, cost, 0).sum() / images

    number = raw.shape[-1] - 5
    if number == 1:
        return Parts(box, objectness, jnp.zeros((), raw.dtype))
    hot = jax.nn.one_hot(classes, number, dtype=raw.dtype) * (1 - smoothing) + smoothing / 2
    cost = optax.sigmoid_binary_cross_entropy(found[..., 5:], hot[:, :, None, None]).mean(-1)
    return Parts(box, objectness, jnp.where(mask, cost, 0).sum() / count)


def _check_levels(outputs: Outputs, anchors: Anchors, recipe: Recipe) -> None:
    """Raises ValueError unless outputs, anchors and balance have the same levels."""
    each = [raw.shape[3] for raw in outputs]
    if each != [len(level) for level in anchors.sizes]:
        raise ValueError(
            f"the detector's levels have {each} anchors a cell, but the task's anchors are "
            f"{anchors.sizes}: make the task of the model's own, detection(model.anchors)"
        )
    if len(recipe.balance or _BALANCE[: len(each)]) != len(each):
        raise ValueError(
            f"a detector of {len(each)} levels needs a balance of each, not {recipe.balance}: "
            "give Recipe(balance=...)"
        )
