"""Keeps compiled programs, so that further runs with the same method and shapes compile nothing."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

PyTree = Any
_Made = TypeVar("_Made")
_MOST = 64  # programs; the least recently used one is dropped
_BY_VALUE = (str, bytes, int, float, type(None), np.dtype, jax.sharding.Sharding)
_made: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()


def made_once(key: tuple[Any, ...], make: Callable[[], _Made]) -> _Made:
    """Returns `make()`, or what it returned when it was called for an equal key.

    Args:
      key: all on which the result depends. Numbers, texts and tuples of them are compared by value,
        functions, models and other objects by identity. So methods are the same only if they are
        one object.
      make: makes a program, or another function.
    """
    place = _comparable(key)
    if place not in _made:
        # The key is kept, so that no other object gets the identity of a part of it.
        _made[place] = (key, make())
        if len(_made) > _MOST:
            _made.popitem(last=False)
    _made.move_to_end(place)
    return _made[place][1]


def _comparable(part: Any) -> Any:
    if isinstance(part, tuple):
        return (type(part), *map(_comparable, part))
    by_value = isinstance(part, _BY_VALUE) or type(part) is jax.tree_util.PyTreeDef
    return (type(part), part) if by_value else ("object", id(part))


def form_of(tree: PyTree) -> tuple[Any, ...]:
    """Returns all of some arguments on which a program that is compiled for them depends."""
    leaves, structure = jax.tree.flatten(tree)
    options = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    forms = ((leaf.shape, str(leaf.dtype), getattr(leaf, "sharding", None)) for leaf in leaves)
    return (options, structure, *forms)
