"""Vectors of a tree as one array, so that a GPU starts one kernel for all of them.

A kernel takes a few microseconds to start, as long as a small network needs for a whole layer, and
a batch norm has four vectors. XLA does not join the kernels of different leaves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.engine.backend import on_gpu

PyTree = Any
_LONGEST = 2**14  # entries of a vector; more are worth a kernel of their own


class Packing(NamedTuple):
    """A pair of inverse functions of trees whose leaves may have leading axes in common."""

    pack: Callable[[PyTree], PyTree]  # the vectors and scalars of a dtype become one array [..., N]
    unpack: Callable[[PyTree], PyTree]


def packing(like: PyTree) -> Packing:
    """Returns how to pack trees with leaves as in `like`, which may be shapes; only on GPU."""
    if not on_gpu():
        return Packing(lambda tree: tree, lambda arrays: arrays)
    shapes = jax.eval_shape(lambda tree: tree, like)
    leaves, form = jax.tree.flatten(shapes)
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)  # of random numbers
        is_packed = leaf.ndim < 2 and leaf.size <= _LONGEST and not is_key
        groups.setdefault((leaf.dtype, -1 if is_packed else number), []).append(number)

    def pack(tree: PyTree) -> list[jax.Array]:
        tree = jax.tree.map(lambda _, leaf: jnp.asarray(leaf), shapes, tree)
        arrays = jax.tree.leaves(tree)
        vectors = [x if leaf.ndim else x[..., None] for x, leaf in zip(arrays, leaves, strict=True)]

        def join(group: list[int]) -> jax.Array:
            return jnp.concatenate([vectors[number] for number in group], axis=-1)

        return [join(group) if group[1:] else arrays[group[0]] for group in groups.values()]

    def unpack(arrays: list[jax.Array]) -> PyTree:
        parts: dict[int, jax.Array] = {}
        for array, group in zip(arrays, groups.values(), strict=True):
            if len(group) == 1:
                parts[group[0]] = array
                continue
            ends = np.cumsum([leaves[number].size for number in group])
            for number, row in zip(group, jnp.split(array, ends[:-1], axis=-1), strict=True):
                parts[number] = row if leaves[number].ndim else row[..., 0]
        return jax.tree.unflatten(form, [parts[number] for number in range(len(leaves))])

    return Packing(pack, unpack)
