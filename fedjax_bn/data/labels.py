"""The labels of a user's file, checked before anything is cast."""

import numpy as np

_KINDS = "iuf"  # of dtypes: integers with and without sign, floats


def class_labels(
    labels: np.ndarray, place: str, classes: int | None = None, first: int = 0
) -> np.ndarray:
    """Labels as a file has them, counted from `first`, as i32[N] counted from 0.

    Integers of any width are taken, and floats that are exactly whole numbers, as MATLAB and
    HDF5 files have them; truth values, texts, objects and times are not.

    Args:
      labels: [N], as read.
      place: the file and what of it, to begin a sentence with.
      classes: how many there are; None where the labels themselves tell.
      first: the label of the first class.

    Raises:
      ValueError: another dtype or shape, or a label that is no whole number or out of range.
    """
    labels = np.asarray(labels)
    count = 2**31 if classes is None else classes  # as many as i32 tells apart
    allowed = f"whole numbers, counted from {first}"
    if classes is not None:
        allowed = f"whole numbers in {first}..{first + classes - 1}"
    if labels.dtype.kind not in _KINDS or labels.ndim != 1:
        raise ValueError(
            f"{place} is {labels.dtype} {labels.shape}; it must be [N] of {allowed}: write it again"
        )
    # in the file's own dtype or a wider one: nothing wraps around, and NaN fails all comparisons
    values = labels
    if labels.dtype.kind == "f":
        values = labels.astype(np.result_type(labels, np.float64))
    right = (values >= first) & (values < first + count)
    if labels.dtype.kind == "f":
        right &= np.floor(values) == values
    if not right.all():
        index = int(np.argmin(right))
        raise ValueError(
            f"{place} has label {labels[index]} at index {index}; labels must be {allowed}"
        )
    return (labels.astype(np.int64) - first).astype(np.int32)
