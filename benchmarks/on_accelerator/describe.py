"""Prints as JSON what this process's JAX, and PyTorch if it is there, run on.

A process of its own, because only one at a time may hold a TPU.
"""

import importlib.util
import json
from typing import Any

import jax

import machine


def device() -> dict[str, Any]:
    """The first device and the versions; of PyTorch, None without it."""
    one, packages = jax.devices()[0], ("jax", "jaxlib", "flax", "optax", "numpy")
    here = machine.describe(*packages)
    version = one.client.platform_version.lower()
    names = {"gpu": "rocm" if "rocm" in version else "cuda"}
    return {
        "platform": names.get(one.platform, one.platform),
        "kind": one.device_kind,
        "devices": jax.device_count(),
        "versions": {name: here[name] for name in ("python", *packages)},
        "cpu": f"{here['cores']} cores of {here['cpu']}",
        "torch": _torch(),
    }


def _torch() -> dict[str, Any] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return {"version": torch.__version__, "gpu": torch.cuda.is_available()}


if __name__ == "__main__":
    print(json.dumps(device()))
