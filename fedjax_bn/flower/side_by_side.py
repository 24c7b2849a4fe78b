"""Uploads of a round side by side, in memory that the next round's take over."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_bn.state import Upload

PyTree = Any
_ALIGNED = 64  # bytes, from which XLA reads an array on CPU where it lies


def side_by_side(like: PyTree) -> Callable[[Sequence[PyTree]], PyTree]:
    """Returns `stack(trees) -> tree [C, ...]`, which writes into the same arrays each time.

    Whoever calls it has read, or copied, what it gave before. So a round neither asks the system
    for as much memory as all uploads take, nor does a device on the host copy them again.

    Args:
      like: the form of one tree, arrays or `jax.ShapeDtypeStruct`s.
    """
    form, leaves = jax.tree.structure(like), jax.tree.leaves(like)
    rows: list[np.ndarray] = []

    def stack(trees: Sequence[PyTree]) -> PyTree:
        if not rows or len(rows[0]) != len(trees):
            rows[:] = [_empty((len(trees), *leaf.shape), leaf.dtype) for leaf in leaves]
        for k, tree in enumerate(trees):
            for row, leaf in zip(rows, form.flatten_up_to(tree), strict=True):
                row[k] = leaf
        return form.unflatten(rows)

    return stack


def absent(form: Upload, client: int, population: int) -> Upload:
    """What stands in the place of a client that sits out: an upload that does not count.

    Args:
      form: of an upload.
      client: who sits out.
      population: K, how many clients there are in all.
    """
    yes, (number, count) = np.ones((), bool), map(np.int32, (client, population))
    return blank(form)._replace(finite=yes, client=number, population=count)


def blank(form: PyTree) -> PyTree:
    """Zeros of that form, arrays that take no memory."""
    return jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), form)


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of any content that begins at a multiple of `_ALIGNED`."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    space = np.empty(size + _ALIGNED, np.uint8)
    begin = -space.ctypes.data % _ALIGNED
    return space[begin : begin + size].view(dtype).reshape(shape)
