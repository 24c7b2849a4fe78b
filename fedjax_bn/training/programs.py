"""Keeps compiled programs, in this process and, by JAX's persistent cache, between runs.

JAX writes an entry of its cache in place, so a reader may find it half written, and a killed run
leaves it so. Here the size is limited, which makes JAX lock the folder, and entries that a killed
run left half written are deleted.
"""

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from filelock import FileLock
from jax.experimental.compilation_cache.compilation_cache import reset_cache

PyTree = Any
_Made = TypeVar("_Made")
_MOST_PROGRAMS = 64  # the least recently used one is dropped
_BY_VALUE = (str, bytes, int, float, type(None), np.dtype, jax.sharding.Sharding)
_made: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()
_SETTINGS = {
    "jax_compilation_cache_max_size": 2 * 2**30,  # bytes; JAX deletes the least recently used
    "jax_persistent_cache_min_compile_time_secs": 0.1,  # programs that take less are compiled again
}


def made_once(key: tuple[Any, ...], make: Callable[[], _Made], arguments: PyTree = ()) -> _Made:
    """Returns `make()`, or what it returned for an equal key and arguments of equal form.

    Numbers, texts and tuples of them in the key are compared by value, all else by identity.
    """
    leaves, structure = jax.tree.flatten(arguments)
    options = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    forms = ((leaf.shape, str(leaf.dtype), getattr(leaf, "sharding", None)) for leaf in leaves)
    place = _comparable((*key, options, structure, *forms))
    if place not in _made:
        # The key is kept, so that no other object gets the identity of a part of it.
        _made[place] = (key, make())
        if len(_made) > _MOST_PROGRAMS:
            _made.popitem(last=False)
    _made.move_to_end(place)
    return _made[place][1]


def _comparable(part: Any) -> Any:
    if isinstance(part, tuple):
        return (type(part), *map(_comparable, part))
    by_value = isinstance(part, _BY_VALUE) or type(part) is jax.tree_util.PyTreeDef
    return (type(part), part) if by_value else ("object", id(part))


def keep_compiled(folder: str) -> None:
    """Lets JAX keep compiled programs in a folder or bucket (`gs://...`); "" is none.

    JAX's own environment variables have priority. A folder that cannot be written is not used, with
    a warning.
    """
    name = "jax_compilation_cache_dir"
    if not jax.config.jax_enable_compilation_cache or name.upper() in os.environ:
        return
    place = folder or None
    if "://" not in folder:  # a bucket's objects appear whole
        for key, value in _SETTINGS.items():
            if key.upper() not in os.environ:
                jax.config.update(key, value)
        try:
            if place:
                place = str(Path(place).expanduser())
                _drop_torn(Path(place))
        except (OSError, NotImplementedError) as error:  # not writable, or without locks
            warnings.warn(f"config.compilation_cache={folder} is unusable: {error}", stacklevel=2)
            place = None
    if jax.config.jax_compilation_cache_dir != place:
        jax.config.update(name, place)
        reset_cache()  # otherwise JAX keeps the folder that it opened first


def _drop_torn(folder: Path) -> None:
    """Deletes entries that a killed process left half written or half removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lockfile", timeout=60):  # JAX's own
        names = set(os.listdir(folder))
        for name in names:
            # JAX writes -atime last, so only an entry that has both is complete.
            for end, partner in (("-cache", "-atime"), ("-atime", "-cache")):
                if name.endswith(end) and name.removesuffix(end) + partner not in names:
                    (folder / name).unlink()
