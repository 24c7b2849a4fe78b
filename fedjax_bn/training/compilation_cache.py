"""Keeps compiled programs between runs in JAX's persistent cache, on by default, safe to share.

JAX names an entry by the program, the versions, XLA's options and the hardware, including the
features of the CPU, so different machines can share a folder. JAX writes an entry in place: a
reader may find it half written, and a killed run leaves it so. Here the size is limited, which
makes JAX lock the folder, and entries that a killed run left half written are deleted.
"""

import os
import warnings
from pathlib import Path

import jax
from filelock import FileLock
from jax.experimental.compilation_cache.compilation_cache import reset_cache

_SETTINGS = {
    "jax_compilation_cache_max_size": 2 * 2**30,  # bytes; JAX deletes the least recently used
    "jax_persistent_cache_min_compile_time_secs": 0.1,  # programs that take less are compiled again
}
_ENTRY, _USED = "-cache", "-atime"  # JAX writes -atime last, so an entry with it is complete


def keep_compiled(folder: str) -> None:
    """Lets JAX look for compiled programs in a folder and keep new ones there.

    JAX's own environment variables have priority: JAX_COMPILATION_CACHE_DIR, its limits, and
    JAX_ENABLE_COMPILATION_CACHE=false, with which nothing is kept. If the folder cannot be written,
    it is not used, with a warning.

    Args:
      folder: a path, in which ~ is the home folder, or a bucket (`gs://...`); "" for none.
    """
    name = "jax_compilation_cache_dir"
    if not jax.config.jax_enable_compilation_cache or name.upper() in os.environ:
        return
    remote = "://" in folder  # a bucket's objects appear whole
    place = folder if remote or not folder else str(Path(folder).expanduser())
    if place and not remote:
        try:
            _drop_torn(Path(place))
        except (OSError, NotImplementedError) as error:  # not writable, or without locks
            warnings.warn(
                f"compiled programs are not kept in {place} ({error}): give another folder as "
                "config.compilation_cache, or leave it empty",
                stacklevel=2,
            )
            place = ""
    for key, value in ({} if remote else _SETTINGS).items():
        if key.upper() not in os.environ:
            jax.config.update(key, value)
    if jax.config.jax_compilation_cache_dir != (place or None):
        jax.config.update(name, place or None)
        reset_cache()  # otherwise JAX keeps the folder that it opened first


def _drop_torn(folder: Path) -> None:
    """Deletes entries that a killed process left half written or half removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lockfile", timeout=60):  # JAX's own
        names = set(os.listdir(folder))
        for name in names:
            for end, partner in ((_ENTRY, _USED), (_USED, _ENTRY)):
                if name.endswith(end) and name.removesuffix(end) + partner not in names:
                    (folder / name).unlink()
