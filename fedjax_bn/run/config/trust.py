"""Decides which code a finished run may import: what its user names, not only its files.

A workdir may come from anybody. Its config.json names a model and more, possibly as
`package.module:name`, and the folder where the run was started.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from fedjax_bn.arguments.choices import imports_refused
from fedjax_bn.training.workdir import Record

_PACKAGE = Path(__file__).resolve().parents[3]  # the folder that holds `fedjax_bn`
_INSTALLED = {"site-packages", "dist-packages"}


def recorded_code(
    folder: Path, about: Record, typed: Iterable[Any] = (), trust: bool = False
) -> AbstractContextManager[None]:
    """Returns a context in which a run's own configuration imports only what its user allows.

    The user allows the names that they have typed, and modules in a folder of `sys.path` that is
    not Python's, this package's, or one of installed packages. The current folder counts only if
    PYTHONPATH has it as an absolute path.

    Args:
      folder: the workdir.
      about: its config.json.
      typed: values of keys that the user has given, texts or tuples of texts.
      trust: whether everything is allowed; then modules where the run was started are found too.
    """
    place = started_in(about)
    if trust:
        sys.path += [str(place)] * (place is not None and str(place) not in sys.path)
        return nullcontext()
    typed_names = {name for value in typed for name in _names(value)}
    started = f" (the run was started in {place})" if place else ""

    def reason_to_refuse(name: str) -> str:
        if name in typed_names or _on_users_path(name.partition(":")[0]):
            return ""
        return (
            f"{folder} names it, which may come from anybody; if you trust that code{started}, add "
            "--trust, or put its folder on PYTHONPATH"
        )

    return imports_refused(reason_to_refuse)


def started_in(about: Record) -> Path | None:
    """Returns the folder where a run was started; None if it does not exist here."""
    place = Path(about.get("started_in", ""))
    return place if place.is_absolute() and place.is_dir() else None


def _names(value: Any) -> set[str]:
    """Returns each `module:name` in the value of a key."""
    if isinstance(value, tuple | list):
        return {name for part in value for name in _names(part)}
    words = [part.split(":") for part in re.split(r"[\s,='\"()\[\]]+", str(value))]
    return {":".join(word[:2]) for word in words if len(word) > 1}


def _on_users_path(module: str) -> bool:
    """Returns whether Python would find a module in a folder that the user has put on its path."""
    package, *submodules = module.split(".")
    for entry in sys.path:
        spec = PathFinder.find_spec(package, [entry])
        if spec and spec.origin:  # any folder is found as a namespace package, without an origin
            break
    else:
        return False
    for name in submodules:
        spec = PathFinder.find_spec(name, spec.submodule_search_locations or [])
        if not (spec and spec.origin):
            return False
    # An entry that is Python's, ours or the current folder was not put there by the user.
    place = Path(entry or ".").resolve()
    if place == Path.cwd().resolve():  # which may be the folder that somebody has sent
        return (
            entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            and Path(entry).is_absolute()
        )
    python = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "scripts"))
    inside = any(place.is_relative_to(Path(path).resolve()) for path in python)
    return not (inside or place == _PACKAGE or _INSTALLED & set(place.parts))
