"""Which uploads a server takes: a stated rule, as a pure function of the arrays that arrived.

An upload is taken if it has exactly the names, shapes and dtypes of the method's own, comes from
the client that was asked, of the size that it has said, says that it is finite and is, and is
within the norm bound: sqrt(sum (y_k - x)^2) over the shared leaves, the norms of its message and
of the personal leaves that it sends besides. Its losses, where it tells them, are at most 1e6, and
no running variance is negative.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_bn.engine.named_arrays import check_numbers, from_named, to_named
from fedjax_bn.state import Upload

PyTree = Any
_BLOCK = 2**14  # numbers
MOST_LOSS = 1e6  # beyond which, or below its negative, nobody's loss is believed


class Expected(NamedTuple):
    """What an upload of one client must be.

    Attributes:
      upload: its form.
      personal: the form of the personal leaves that it sends besides; () for none.
      shared: what was broadcast, [...] as the upload's.
      client: who was asked.
      population: how many clients there are in all.
      size: its samples, as it said before; 0 where it keeps that to itself and counts as one.
      losses: whether it said that it tells its losses; else they are NaN.
      norm_bound: above 0.
    """

    upload: Upload
    personal: PyTree
    shared: PyTree
    client: int
    population: int
    size: int
    losses: bool
    norm_bound: float


class Accepted(NamedTuple):
    """An upload that is taken, with NumPy arrays.

    Attributes:
      upload: it.
      personal: the personal leaves beside it; () for none.
      norm: that of the client's update.
    """

    upload: Upload
    personal: PyTree
    norm: float


def accept(arrays: Mapping[str, np.ndarray], expected: Expected) -> Accepted:
    """The upload in what a client sent.

    Raises:
      ValueError: it is not taken; the message says why.
    """
    both = {"upload": expected.upload, "personal": expected.personal}
    split = {
        name if name.startswith("personal/") else f"upload/{name}": array
        for name, array in arrays.items()
    }
    found = from_named(split, both)
    upload, personal = found["upload"], found["personal"]
    _check_identity(upload, expected)
    if not upload.finite:
        raise ValueError("its update is not finite")
    parts = {"shared": upload.shared, "message": upload.message, "personal": personal}
    check_numbers(to_named(parts))
    _check_losses(upload, expected)
    norm = _norm(upload.shared, expected.shared)
    norms = {"update": norm, "message": _norm(upload.message), "personal leaves": _norm(personal)}
    for what, size in norms.items():
        if not size <= expected.norm_bound:
            raise ValueError(
                f"the norm of its {what}, {size:.4g}, is above norm-bound={expected.norm_bound:g}"
            )
    return Accepted(upload, personal, norm)


def _check_identity(upload: Upload, expected: Expected) -> None:
    """Raises ValueError where an upload is another client's, or of no participant."""
    size = int(upload.size)
    if int(upload.client) != expected.client:
        raise ValueError(f"it speaks for client {int(upload.client)}")
    if int(upload.population) != expected.population or not upload.participates:
        raise ValueError("it is an upload of another federation, or of a client that sits out")
    if size != (expected.size or 1):
        said = expected.size or "nothing and counts as one"
        raise ValueError(f"it claims {size} samples, where it said {said}")


def _check_losses(upload: Upload, expected: Expected) -> None:
    """Raises ValueError where a loss is of no use to a weighing rule, or should be hidden."""
    for name in ("risk", "loss"):
        value = float(getattr(upload, name))
        if expected.losses and not abs(value) <= MOST_LOSS:
            raise ValueError(f"its {name}, {value:.4g}, is not within {MOST_LOSS:g}")
        if not expected.losses and not math.isnan(value):
            raise ValueError(f"it tells a {name}, {value:.4g}, though it said that it tells none")


def _norm(tree: PyTree, start: PyTree = None) -> float:
    """sqrt of the sum of squares of all leaves, less those of `start`, in float64."""
    leaves = jax.tree.leaves(tree)
    starts = [None] * len(leaves) if start is None else jax.tree.leaves(start)
    return math.sqrt(sum(map(_squares, leaves, starts)))


def _squares(leaf: np.ndarray, start: np.ndarray | None) -> float:
    """The sum of squares, in blocks that stay in the caches: leaves have millions of numbers.

    Not by a dot product, for which BLAS wakes threads that spin: 3 CPU seconds for 57 MB.
    """
    flat = np.asarray(leaf).reshape(-1)
    less = None if start is None else np.asarray(start).reshape(-1)
    total = 0.0
    for begin in range(0, flat.size, _BLOCK):
        part = slice(begin, begin + _BLOCK)
        block = flat[part].astype(np.float64)
        if less is not None:
            block -= less[part].astype(np.float64)
        total += float(np.square(block, out=block).sum())
    return total
