"""Decides which uploads a server accepts; this module does not import Flower.

The server accepts an upload if its names, shapes and dtypes are exactly those of the method; if it
comes from the client that was asked, with the size that this client reported; if it is marked as
finite, all its numbers are finite, and no running variance is negative; and if three norms are
within the bound: sqrt(sum (y_k - x)^2) of the update over the shared leaves, the norm of the
message, and the norm of the personal leaves that are sent too. Reported losses are at most 1e6 in
absolute value; a client that reports none sends NaN.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_bn.engine.named_arrays import check_numbers, from_named, to_named
from fedjax_bn.state import Upload

PyTree = Any
_BLOCK = 2**14  # numbers of a leaf that `_norm` squares at once
_MOST_LOSS = 1e6


class MisfitError(ValueError):
    """An answer that does not fit what its client said of itself when it presented itself.

    A client that was started again with other data, or as another client, answers in this way.
    """


class Expected(NamedTuple):
    """What the server expects of one client's upload.

    Attributes:
      upload: the form of the upload.
      personal: the form of the personal leaves that are sent too; () for none.
      shared: the shared leaves that were broadcast, [...] as in the upload.
      client: the number of the client that was asked.
      population: K, the number of all clients.
      size: the number of samples that the client reported; 0 if it reports none, which counts as 1.
      losses: whether the client reports its losses; otherwise they are NaN.
      norm_bound: the largest norm that is accepted, above 0.
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
    """An accepted upload, with NumPy arrays.

    Attributes:
      upload: the client's upload.
      personal: the personal leaves that were sent too; () for none.
      norm: the norm of the client's update.
    """

    upload: Upload
    personal: PyTree
    norm: float


def accept(arrays: Mapping[str, np.ndarray], expected: Expected) -> Accepted:
    """Returns the upload in the arrays that a client sent.

    Raises:
      MisfitError: names, shapes, dtypes, the client, its size or the losses that it reports are
        others than expected; the message states which.
      ValueError: the upload is not accepted for another reason, which the message states.
    """
    # In a message only personal leaves have a prefix; here the upload's leaves get one too.
    split = {
        name if name.startswith("personal/") else f"upload/{name}": array
        for name, array in arrays.items()
    }
    forms = {"upload": expected.upload, "personal": expected.personal}
    try:
        upload, personal = (from_named(split, forms)[name] for name in ("upload", "personal"))
    except ValueError as error:
        raise MisfitError(str(error)) from error
    if int(upload.client) != expected.client:
        raise MisfitError(f"it speaks for client {int(upload.client)}")
    if int(upload.population) != expected.population or not upload.participates:
        raise ValueError("it is an upload of another federation, or of a client that sits out")
    if int(upload.size) != (expected.size or 1):
        reported_size = expected.size or "nothing and counts as one"
        raise MisfitError(f"it claims {int(upload.size)} samples, where it said {reported_size}")
    if not upload.finite:
        raise ValueError("its update is not finite")
    parts = {"shared": upload.shared, "message": upload.message, "personal": personal}
    check_numbers(to_named(parts))
    for name in ("risk", "loss"):
        value = float(getattr(upload, name))
        if expected.losses and not abs(value) <= _MOST_LOSS:  # refuses NaN too
            error = MisfitError if math.isnan(value) else ValueError
            raise error(f"its {name}, {value:.4g}, is not within {_MOST_LOSS:g}")
        if not expected.losses and not math.isnan(value):
            raise MisfitError(f"it sends a {name}, {value:.4g}, though it reports none")
    norm = _norm(upload.shared, expected.shared)
    norms = {"update": norm, "message": _norm(upload.message), "personal leaves": _norm(personal)}
    for part, size in norms.items():
        if not size <= expected.norm_bound:
            raise ValueError(
                f"the norm of its {part}, {size:.4g}, is above norm-bound={expected.norm_bound:g}"
            )
    return Accepted(upload, personal, norm)


def _norm(tree: PyTree, start: PyTree = None) -> float:
    """Returns the Euclidean norm of all leaves, minus those of `start` if given, in float64."""
    leaves, total = jax.tree.leaves(tree), 0.0
    starts = [None] * len(leaves) if start is None else jax.tree.leaves(start)
    for leaf, less in zip(leaves, starts, strict=True):
        flat = np.asarray(leaf).reshape(-1)
        less = None if less is None else np.asarray(less).reshape(-1)
        # Leaves have millions of numbers, and a block of them fits into the caches. `np.dot` is
        # slower: BLAS starts threads that spin, 3 CPU seconds for 57 MB.
        for begin in range(0, flat.size, _BLOCK):
            part = slice(begin, begin + _BLOCK)
            block = flat[part].astype(np.float64)
            if less is not None:
                block -= less[part].astype(np.float64)
            with np.errstate(over="ignore"):  # an infinite norm is above every bound
                total += float(np.square(block, out=block).sum())
    return math.sqrt(total)
