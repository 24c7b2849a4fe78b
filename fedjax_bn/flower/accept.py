"""Which uploads a server takes: a stated rule, which needs nothing of Flower.

An upload is taken if it has exactly the names, shapes and dtypes of the method's own, comes from
the client that was asked, with the size that it reported, is marked as finite and is, and is
within the norm bound: sqrt(sum (y_k - x)^2) over the shared leaves, the norms of its message and
of the personal leaves that it sends as well. Its losses, where it reports them, are at most 1e6,
and no running variance is negative.
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
_MOST_LOSS = 1e6


class Expected(NamedTuple):
    """What an upload of one client must be.

    Attributes:
      upload: its form.
      personal: the form of the personal leaves that it sends as well; () for none.
      shared: what was broadcast, [...] as the upload's.
      client: the number of the client that was asked.
      population: how many clients there are in all.
      size: its samples, as it reported before; 0 where it does not, and counts as one.
      losses: whether it reports its losses; else they are NaN.
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
      upload: what the client sent.
      personal: the personal leaves that it sent as well; () for none.
      norm: of the client's update.
    """

    upload: Upload
    personal: PyTree
    norm: float


def accept(arrays: Mapping[str, np.ndarray], expected: Expected) -> Accepted:
    """Returns the upload in the arrays that a client sent.

    Raises:
      ValueError: it is not taken; the message says why.
    """
    # Only personal leaves have a prefix in a message.
    split = {
        name if name.startswith("personal/") else f"upload/{name}": array
        for name, array in arrays.items()
    }
    both = {"upload": expected.upload, "personal": expected.personal}
    upload, personal = (from_named(split, both)[name] for name in ("upload", "personal"))
    if int(upload.client) != expected.client:
        raise ValueError(f"it speaks for client {int(upload.client)}")
    if int(upload.population) != expected.population or not upload.participates:
        raise ValueError("it is an upload of another federation, or of a client that sits out")
    if int(upload.size) != (expected.size or 1):
        said = expected.size or "nothing and counts as one"
        raise ValueError(f"it claims {int(upload.size)} samples, where it said {said}")
    if not upload.finite:
        raise ValueError("its update is not finite")
    parts = {"shared": upload.shared, "message": upload.message, "personal": personal}
    check_numbers(to_named(parts))
    for name in ("risk", "loss"):
        value = float(getattr(upload, name))
        if expected.losses and not abs(value) <= _MOST_LOSS:  # so NaN is refused too
            raise ValueError(f"its {name}, {value:.4g}, is not within {_MOST_LOSS:g}")
        if not expected.losses and not math.isnan(value):
            raise ValueError(f"it sends a {name}, {value:.4g}, though it reports none")
    norm = _norm(upload.shared, expected.shared)
    norms = {"update": norm, "message": _norm(upload.message), "personal leaves": _norm(personal)}
    for what, size in norms.items():
        if not size <= expected.norm_bound:
            raise ValueError(
                f"the norm of its {what}, {size:.4g}, is above norm-bound={expected.norm_bound:g}"
            )
    return Accepted(upload, personal, norm)


def _norm(tree: PyTree, start: PyTree = None) -> float:
    """Returns sqrt of the sum of squares of all leaves, less those of `start`, in float64."""
    leaves, total = jax.tree.leaves(tree), 0.0
    starts = [None] * len(leaves) if start is None else jax.tree.leaves(start)
    for leaf, less in zip(leaves, starts, strict=True):
        flat = np.asarray(leaf).reshape(-1)
        less = None if less is None else np.asarray(less).reshape(-1)
        # Leaves have millions of numbers: blocks stay in the caches, and no dot product is taken,
        # since BLAS wakes threads that spin for it, 3 CPU seconds for 57 MB.
        for begin in range(0, flat.size, _BLOCK):
            part = slice(begin, begin + _BLOCK)
            block = flat[part].astype(np.float64)
            if less is not None:
                block -= less[part].astype(np.float64)
            total += float(np.square(block, out=block).sum())
    return math.sqrt(total)
