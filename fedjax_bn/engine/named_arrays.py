"""Converts trees to named arrays and back: leaves are sent, stored and exported in this form.

A leaf's name is its path, such as `shared/params/dense1/kernel`; None is not a leaf.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any
from urllib.parse import unquote

import jax
import numpy as np

from fedjax_bn.sharing import STATISTICS

PyTree = Any


def to_named(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree on the host, by name, in the tree's order."""
    return {name: np.asarray(leaf) for name, leaf in _leaves(tree).items()}


def names_of(tree: PyTree) -> list[str]:
    """Returns the names of a tree's leaves, arrays or `jax.ShapeDtypeStruct`s, in its order."""
    return list(_leaves(tree))


def tree_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dictionaries whose leaves `to_named` has named."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *modules, leaf = map(unquote, name.split("/"))
        reduce(lambda place, module: place.setdefault(module, {}), modules, tree)[leaf] = array
    return tree


def from_named(arrays: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
    """Returns the tree of NumPy arrays with the structure of `like`, of arrays or their shapes.

    ValueError if a name is missing or unknown, or an array has another shape or dtype.
    """
    expected = _leaves(like)
    missing, unknown = sorted(expected.keys() - arrays), sorted(arrays.keys() - expected.keys())
    if missing or unknown:
        faults = f"lack {missing[:3]} and add {str(unknown[:3])[:200]}"
        raise ValueError(f"arrays {faults}: models differ")

    def fitting(name: str, leaf: Any) -> np.ndarray:
        array, dtype = np.asarray(arrays[name]), np.dtype(leaf.dtype)
        # NumPy files store bfloat16 as bytes, "|V2", without its name.
        if array.dtype.kind == dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
            array = array.view(dtype)
        if array.shape != leaf.shape or array.dtype != dtype:
            form = f"{dtype}{list(leaf.shape)}: models, data or precision differ"
            raise ValueError(f"the array {name} is {array.dtype}{list(array.shape)}, not {form}")
        return array

    fitted = [fitting(name, leaf) for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), fitted)


def check_numbers(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError if a number of named arrays is not finite, or a variance is negative."""
    for name, array in arrays.items():
        # A leaf may be named with or without the part of the state that holds it.
        is_variance = f"/{STATISTICS}/" in f"/{name}" and name.endswith(("var", "variance"))
        if not np.isfinite(array).all() or (is_variance and (array < 0).any()):
            raise ValueError(f"the array {name} is not finite, or a negative variance")


def _leaves(tree: PyTree) -> dict[str, Any]:
    def named(entry: Any) -> str:
        # Quoted, so that a leaf "a/b" is not named as the leaf "b" of "a".
        name = jax.tree_util.keystr((entry,), simple=True)
        return name.replace("%", "%25").replace("/", "%2F")

    return {"/".join(map(named, path)): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
