"""Defines labels of samples: one number each, or a tree of arrays, such as boxes.

    classification  i32[N], in [0, num_classes)
    detection       {"boxes": f32[N, M, 4], "class": i32[N, M]}

A box is (x1, y1, x2, y2) in [0, 1] of the image's width and height; M is the greatest number of
boxes of an image. Padding, class -1 and a box of zeros, follows an image's own boxes. A crowd (a
group of objects) of class c has class -2 - c: no client learns it, and detections on it do not
count as wrong.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

PyTree = Any
BOXES, CLASS = "boxes", "class"
PADDING = -1  # the class of a row that is not a box


def crowd(number: int) -> int:
    """Returns the number for a crowd of a class, or, from that number, the class."""
    return -2 - number


def has_boxes(labels: PyTree) -> bool:
    """Returns whether labels are boxes rather than one number per sample."""
    return isinstance(labels, dict)


def no_labels(boxes: int) -> PyTree:
    """Returns empty labels of one sample: `boxes` rows of padding, or the number 0 for 0 boxes."""
    if not boxes:
        return np.zeros(1, np.int32)
    return {
        BOXES: np.zeros((1, boxes, 4), np.float32),
        CLASS: np.full((1, boxes), PADDING, np.int32),
    }


def take(labels: PyTree, index: np.ndarray) -> PyTree:
    """Returns the labels of the samples at index i64[n], or of one sample."""
    return jax.tree.map(lambda leaf: leaf[index], labels)


def join(parts: Sequence[PyTree]) -> PyTree:
    """Returns labels one after the other, padded to the greatest number of boxes per image."""
    if not has_boxes(parts[0]):
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    most, boxes, classes = max(part[CLASS].shape[1] for part in parts), [], []
    for part in parts:
        more = (0, 0), (0, most - part[CLASS].shape[1])
        boxes.append(np.pad(part[BOXES], (*more, (0, 0))))
        classes.append(np.pad(part[CLASS], more, constant_values=PADDING))
    return {BOXES: np.concatenate(boxes), CLASS: np.concatenate(classes)}


def leaves_of(labels: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) for every array of labels; a single array has the name ""."""
    return iter(sorted(labels.items()) if isinstance(labels, dict) else (("", labels),))


def stored(leaf: np.ndarray) -> np.dtype:
    """Returns the dtype in which an array of labels is stored: i32 for whole numbers."""
    return np.dtype(np.int32) if np.issubdtype(leaf.dtype, np.integer) else leaf.dtype


def strata(labels: PyTree) -> np.ndarray:
    """Returns the class by which samples are stratified, i32[N].

    It is the label itself; for an image with boxes, their most frequent class, the lowest of
    equals; for an image without boxes, -1.
    """
    if not has_boxes(labels):
        return labels
    own = [row[row >= 0] for row in labels[CLASS]]  # without padding and crowds
    return np.array([np.bincount(row).argmax() if row.size else PADDING for row in own], np.int32)


def boxes_of(labels: PyTree, sample: int) -> np.ndarray:
    """Returns the boxes f32[n, 4] of one sample, without crowds; none if labels are numbers."""
    if not has_boxes(labels):
        return np.zeros((0, 4), np.float32)
    return labels[BOXES][sample][labels[CLASS][sample] >= 0]


def class_counts(labels: PyTree, num_classes: int) -> np.ndarray:
    """Returns how many samples, or boxes, each class has, i64[num_classes]."""
    numbers = labels[CLASS] if has_boxes(labels) else labels
    return np.bincount(numbers[numbers >= 0], minlength=num_classes)
