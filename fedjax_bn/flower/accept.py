"""Which uploads a server takes: a stated rule, as a pure function of the arrays that arrived.

An upload is taken if it has exactly the names, shapes and dtypes of the method's own, comes from
the client that was asked, of the size that it has said, says that it is finite and is, and is
within the norm bound: sqrt(sum (y_k - x)^2) over the shared leaves, and the norm of its message.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_bn.named_arrays import from_named
from fedjax_bn.state import Upload

PyTree = Any
_BLOCK = 2**14  # numbers


class Expected(NamedTuple):
    """What an upload of one client must be.

    Attributes:
      upload: its form.
      personal: the form of the personal leaves that it sends besides; () for none.
      shared: what was broadcast, [...] as the upload's.
      client: who was asked.
      population: how many clients there are in all.
      size: its samples, as it said before; 0 where it keeps that to itself.
      norm_bound: above 0.
    """

    upload: Upload
    personal: PyTree
    shared: PyTree
    client: int
    population: int
    size: int
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
    if not upload.finite or not _is_finite((upload.shared, upload.message, personal)):
        raise ValueError("its update is not finite")
    norm = _norm(upload.shared, expected.shared)
    for what, size in (("update", norm), ("message", _norm(upload.message))):
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
    if size < 1 or (expected.size and size != expected.size):
        raise ValueError(f"it claims {size} samples, where it said {expected.size or 'nothing'}")


def _is_finite(tree: PyTree) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


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
