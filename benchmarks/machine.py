"""Where a benchmark ran and how to run it again."""

import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def describe(*packages: str) -> dict[str, Any]:
    """The machine, its load, and the versions of Python, numpy and the packages named."""
    return {
        "cpu": cpu_model(),
        "cores": CORES,
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("numpy", *packages)},
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as Linux has it, or else what Python knows."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def announce(compared: str, *others: str) -> dict[str, Any]:
    """Prints what is compared, the command and the machine, which it returns as `describe`."""
    here = describe("jax", "jaxlib", "flax", *others)
    print(compared)
    print("command: " + shlex.join(["python", *sys.argv]))
    print("; ".join(f"{name} {value}" for name, value in here.items()))
    if here["load"] > CORES / 4:
        print("note: the machine is in use by others; intervals will be wide")
    return here
