"""Describes the machine of a run, on which the last bits of its results depend."""

import os
import platform
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
    limited = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if limited else os.cpu_count() or 1
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
    """Returns a message on what of `describe_machine` has changed since a run began, or ""."""
    recorded, current = _facts_of(read_json(workdir / "config.json")), _facts_of(about)
    changes = [
        f"{name} ({recorded[name]!r} there, {current[name]!r} now)"
        for name in sorted(recorded.keys() & current.keys())
        if recorded[name] != current[name]
    ]
    if not changes:
        return ""
    return (
        f"{workdir} began with other values of {', '.join(changes)}; from here on its last bits "
        "may differ from those of a run that was never stopped"
    )


def _facts_of(about: Any, name: str = "") -> dict[str, Any]:
    """Returns name -> each fact that config.json has of the machine."""
    if not isinstance(about, dict):
        return {name.removeprefix("machine."): about}
    facts = {}
    for key in about if name else about.keys() & {"versions", "devices", "machine"}:
        facts |= _facts_of(about[key], f"{name}.{key}".strip("."))
    return facts
