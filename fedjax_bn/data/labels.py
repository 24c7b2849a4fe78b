"""Defines labels of samples: one number each, or a tree of arrays, such as boxes or masks.

    classification  i32[N], in [0, num_classes)
    detection       {"boxes": f32[N, M, 4], "class": i32[N, M]}
    segmentation    {"mask": u8[N, H, W]}, with "volume": i32[N] and "spacing": f32[N, 3] if known

A box is (x1, y1, x2, y2) in [0, 1] of the image's width and height. Padding to the most boxes of
an image, M, has class -1 and zeros. A crowd (a group of objects) of class c has class -2 - c: no
client learns it, and detections on it do not count as wrong.

A mask has the class of each pixel, 0 for the background, 255 for a pixel without a label. Samples
with the same volume, unique in the dataset, are slices of one scan in their order and are scored
together. The spacing is in millimetres: between slices, rows and columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_bn.engine.inputs import UNLABELLED, class_labels

PyTree = Any
BOXES, CLASS = "boxes", "class"
MASK, VOLUME, SPACING = "mask", "volume", "spacing"
PADDING = -1  # the class of a row that is not a box


def crowd(number: int) -> int:
    """Returns the number for a crowd of a class, or, from that number, the class."""
    return -2 - number


def has_boxes(labels: PyTree) -> bool:
    """Returns whether labels are boxes."""
    return isinstance(labels, dict) and CLASS in labels


def has_masks(labels: PyTree) -> bool:
    """Returns whether labels are masks."""
    return isinstance(labels, dict) and MASK in labels


def form_of_labels(labels: PyTree) -> dict[str, Any]:
    """Returns the form of labels for JSON, from which `no_labels` makes empty ones."""
    if has_boxes(labels):
        return {"boxes": labels[CLASS].shape[1]}
    return {"masks": sorted(labels)} if has_masks(labels) else {}


def no_labels(form: Mapping[str, Any], shape: Sequence[int]) -> PyTree:
    """Returns empty labels of one sample of a shape, of the form of `form_of_labels`."""
    if boxes := form.get("boxes"):
        classes = np.full((1, boxes), PADDING, np.int32)
        return {BOXES: np.zeros((1, boxes, 4), np.float32), CLASS: classes}
    if "masks" not in form:
        return np.zeros(1, np.int32)
    empty = {MASK: np.zeros((1, *shape[:2]), np.uint8), VOLUME: np.zeros(1, np.int32)}
    empty[SPACING] = np.ones((1, 3), np.float32)
    return {name: empty[name] for name in form["masks"]}


def is_of_masks(leaves: Sequence[str], shape: Sequence[int]) -> bool:
    """Returns whether labels with these leaves can be masks of samples of a shape."""
    return {MASK} <= set(leaves) <= {MASK, VOLUME, SPACING} and len(shape) == 3


def as_labels(labels: Any, place: str) -> PyTree:
    """Returns a user's labels in the dtypes in which they are stored.

    Labels are whole numbers [N]; or masks [N, H, W] of whole numbers or bools, also as the tree
    above. A ValueError begins with `place`.
    """
    if not isinstance(labels, Mapping):
        labels = np.asarray(labels)
        if labels.ndim != 3:
            return class_labels(labels, place)
        labels = {MASK: labels}
    if not {MASK} <= set(labels) <= {MASK, VOLUME, SPACING}:
        raise ValueError(f"{place} have {sorted(labels)}; give {MASK}, {VOLUME} and {SPACING}")
    mask, tree = np.asarray(labels[MASK]), dict(labels)
    # Of other dtypes than bytes, 256 would silently become 0 as a byte.
    if mask.dtype not in (bool, np.uint8):
        mask = class_labels(mask, place, UNLABELLED + 1, valid=np.ones(mask.shape, bool))
    tree[MASK] = mask.astype(np.uint8, copy=False)
    if VOLUME in tree:
        tree[VOLUME] = class_labels(tree[VOLUME], f"{place}, {VOLUME!r},")
    if SPACING in tree:
        tree[SPACING] = np.asarray(tree[SPACING], np.float32)
    return tree


def take(labels: PyTree, index: np.ndarray) -> PyTree:
    """Returns the labels of the samples at index i64[n], or of one sample."""
    return jax.tree.map(lambda leaf: leaf[index], labels)


def join(parts: Sequence[PyTree]) -> PyTree:
    """Returns labels one after the other, padded to the greatest number of boxes per image."""
    if has_boxes(parts[0]):
        most, padded = max(part[CLASS].shape[1] for part in parts), []
        for part in parts:
            rows = (0, 0), (0, most - part[CLASS].shape[1])
            classes = np.pad(part[CLASS], rows, constant_values=PADDING)
            padded.append({BOXES: np.pad(part[BOXES], (*rows, (0, 0))), CLASS: classes})
        parts = padded
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def leaves_of(labels: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) for every array of labels; a single array has the name ""."""
    return iter(sorted(labels.items()) if isinstance(labels, dict) else (("", labels),))


def stored(leaf: np.ndarray) -> np.dtype:
    """Returns the dtype in which an array of labels is stored: i32 for whole numbers but bytes."""
    is_integer = np.issubdtype(leaf.dtype, np.integer) and leaf.dtype != np.uint8
    return np.dtype(np.int32) if is_integer else leaf.dtype


def strata(labels: PyTree) -> np.ndarray:
    """Returns the class by which samples are stratified, i32[N].

    It is the most frequent of an image's boxes, or pixels without the background, the lowest of
    equals; -1 without any.
    """
    if has_masks(labels):
        classes_of_samples = [mask[(mask > 0) & (mask != UNLABELLED)] for mask in labels[MASK]]
    elif has_boxes(labels):
        classes_of_samples = [row[row >= 0] for row in labels[CLASS]]  # without padding and crowds
    else:
        return labels
    return np.array(
        [np.bincount(row).argmax() if row.size else PADDING for row in classes_of_samples], np.int32
    )


def boxes_of(labels: PyTree, sample: int) -> np.ndarray:
    """Returns the boxes f32[n, 4] of one sample, without crowds; none for labels without boxes."""
    if not has_boxes(labels):
        return np.zeros((0, 4), np.float32)
    return labels[BOXES][sample][labels[CLASS][sample] >= 0]


def counted(labels: PyTree) -> str:
    """Returns what `class_counts` counts: samples, boxes or pixels."""
    return "pixels" if has_masks(labels) else "boxes" if has_boxes(labels) else "samples"


def class_counts(labels: PyTree, num_classes: int) -> np.ndarray:
    """Returns how many samples, boxes or pixels each class has, i64[num_classes]."""
    if has_masks(labels):
        mask = np.asarray(labels[MASK])
        return np.bincount(mask[mask != UNLABELLED], minlength=num_classes)
    numbers = labels[CLASS] if has_boxes(labels) else labels
    return np.bincount(numbers[numbers >= 0], minlength=num_classes)
