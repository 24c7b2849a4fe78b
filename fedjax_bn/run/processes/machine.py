"""What the last bits of a run depend on besides its configuration, data and seed."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from fedjax_bn import __version__
from fedjax_bn.run.files.forms import OBJECT
from fedjax_bn.run.files.workdir import read_json

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_OPTIONS = ("enable_x64", "default_matmul_precision", "disable_most_optimizations")
_VARIABLES = ("XLA_FLAGS", "NPROC")  # NPROC is how many threads XLA takes on CPU
# By these XLA's compiler chooses its vectors, and its libraries their kernels.
_FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def describe_machine() -> dict[str, Any]:
    """Versions, devices, and what else sums are ordered and rounded by, for the record."""
    devices = jax.devices()
    return {
        "versions": {"fedjax_bn": __version__, "python": platform.python_version()}
        | {name: version(name) for name in _PACKAGES},
        "devices": [str(device) for device in devices],
        "machine": {
            "backend": jax.default_backend(),
            "device_kind": devices[0].device_kind,
            "architecture": platform.machine(),
            "cpu": _of_processor("model name"),
            "cpu_features": [f for f in _FEATURES if f in _of_processor("flags").split()],
            "cores": _cores(),  # XLA divides a sum among them, and so orders it
            "options": {name: jax.config.values[f"jax_{name}"] for name in _OPTIONS},
            "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
        },
    }


def difference(workdir: Path, about: dict[str, Any]) -> str:
    """A sentence on what is other than where a run was begun; empty where its bits stay the same.

    Args:
      workdir: with the config.json of a run.
      about: as `describe_machine` makes it, of now.

    Raises:
      WorkdirError: config.json is damaged.
    """
    old = read_json(workdir / "config.json", OBJECT)
    parts = ("versions", "devices", "machine")
    there, here = ({k: m.get(k) for k in parts} for m in (old, about))
    changes = [
        f"{key} ({before:.60} there, {now:.60} now)"
        for key, before, now in _differing(there, here)
        if before != now
    ]
    if not changes:
        return ""
    return (
        f"{workdir} was begun where these were others: {', '.join(changes)}; what follows may "
        "differ in its last bits from a run that was never stopped"
    )


def _differing(there: Any, here: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """(name, text there, text here) of all leaves that both have; older runs recorded fewer."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted(there.keys() & here.keys()):
            yield from _differing(there[key], here[key], f"{name}.{key}" if name else key)
    elif there is not None:
        yield name.removeprefix("machine."), repr(there), repr(here)


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _of_processor(key: str) -> str:
    """A line of Linux's /proc/cpuinfo; elsewhere what Python knows, and nothing of features."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = {"flags": ("flags", "Features")}.get(key, (key,))
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return platform.processor() if key == "model name" else ""
