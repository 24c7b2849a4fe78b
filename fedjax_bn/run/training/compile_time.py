"""Compiling a round, which is said before it begins: with how long it took the last time."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.errors import UserError
from fedjax_bn.run.files.workdir import read_json, write_json
from fedjax_bn.run.training.progress import duration

_FILE = "compile_seconds.json"  # beside the compiled programs
_MOST = 500  # configurations remembered
# Keys that leave the program as it is.
_OTHER = {"seed", "rounds", "data.path", "data.cache", "compilation_cache", "baselines", "wandb"}


def compile_round(
    compile: Callable[[], Any], config: ConfigDict, say: Callable[[str], None]
) -> tuple[Any, float]:
    """Compiles a round and says so before.

    Args:
      compile: makes the program.
      config: the run's, by which the time is remembered, beside JAX's compiled programs.
      say: where messages go.

    Returns:
      What `compile` returns, and the seconds that it took.
    """
    known = _read()
    name = _name(config)
    before = f"; the last time it took {duration(known[name])}" if name in known else ""
    say(f"compiling a round of {config.method}{before}")
    began = time.perf_counter()
    program = compile()
    seconds = time.perf_counter() - began
    _remember(name, seconds)
    return program, seconds


def _name(config: ConfigDict) -> str:
    """Configuration, JAX and device as one word."""
    what = {key: value for key, value in flatten(config) if key not in _OTHER}
    here = [jax.__version__, jax.devices()[0].device_kind, jax.device_count()]
    return hashlib.sha256(json.dumps([what, here], sort_keys=True).encode()).hexdigest()[:16]


def _path() -> Path | None:
    """The file, if compiled programs are kept in a folder of this machine."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / _FILE if folder and "://" not in folder else None


def _read() -> dict[str, Any]:
    """Seconds by name; nothing where the file is missing or damaged: it is only a hint."""
    path, known = _path(), {}
    with suppress(OSError, UserError):
        known = read_json(path) if path else {}
    return {name: value for name, value in known.items() if isinstance(value, int | float)}


def _remember(name: str, seconds: float) -> None:
    path = _path()
    if path is None:
        return
    known = {key: value for key, value in _read().items() if key != name} | {name: seconds}
    with suppress(OSError, UserError):  # such as a folder that only others may write
        write_json(path, dict(list(known.items())[-_MOST:]))
