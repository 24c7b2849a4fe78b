"""Describes the machine of a run, on which the last bits of its results depend."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from fedjax_bn import __version__
from fedjax_bn.training.workdir import read_json

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# On these depends every random number, so a run cannot continue with others.
RANDOM = ("default_prng_impl", "random_seed_offset", "threefry_partitionable")
_OPTIONS = ("enable_x64", "default_matmul_precision", "disable_most_optimizations", *RANDOM)
_VARIABLES = ("XLA_FLAGS", "NPROC")  # NPROC is the number of threads that XLA uses on CPU
# XLA's compiler chooses its vectors by these features, and its libraries their kernels.
_FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def describe_machine() -> dict[str, Any]:
    """Returns versions, devices, and all else that affects how sums are ordered and rounded."""
    devices = jax.devices()
    path = Path("/proc/cpuinfo")  # only Linux has it; elsewhere the features are unknown
    lines = path.read_text().splitlines() if path.exists() else []
    about = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    flags = about.get("flags", about.get("Features", "")).split()
    # XLA splits a sum among the cores that this process may use, which determines its order.
    several = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if several else os.cpu_count() or 1
    return {
        "versions": {"fedjax_bn": __version__, "python": platform.python_version()}
        | {name: version(name) for name in _PACKAGES},
        "devices": [str(device) for device in devices],
        "machine": {
            "backend": jax.default_backend(),
            "device_kind": devices[0].device_kind,
            "architecture": platform.machine(),
            "cpu": about.get("model name", platform.processor()),
            "cpu_features": [feature for feature in _FEATURES if feature in flags],
            "cores": cores,
            "options": {name: jax.config.values[f"jax_{name}"] for name in _OPTIONS},
            "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
        },
    }


def difference(workdir: Path, about: dict[str, Any]) -> str:
    """Returns a message on what has changed since a run began; "" if nothing has.

    Args:
      workdir: with the config.json of a run.
      about: what `describe_machine` returns now, or more.

    Raises:
      WorkdirError: config.json is damaged.
    """
    recorded = read_json(workdir / "config.json")
    parts = ("versions", "devices", "machine")
    recorded_parts, current_parts = ({k: m.get(k) for k in parts} for m in (recorded, about))
    changes = [
        f"{key} ({before} there, {after} now)"
        for key, before, after in _leaves_of_both(recorded_parts, current_parts)
        if before != after
    ]
    if not changes:
        return ""
    return (
        f"{workdir} began with other values of {', '.join(changes)}; from here on its last bits "
        "may differ from those of a run that was never stopped"
    )


def _leaves_of_both(recorded: Any, current: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields (name, text there, text here) of leaves that both have; older runs recorded fewer."""
    if isinstance(recorded, dict) and isinstance(current, dict):
        for key in sorted(recorded.keys() & current.keys()):
            yield from _leaves_of_both(
                recorded[key], current[key], f"{name}.{key}" if name else key
            )
    elif recorded is not None:
        yield name.removeprefix("machine."), repr(recorded), repr(current)
