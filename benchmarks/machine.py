"""Describes a benchmark's machine and command, and measures processes (Linux)."""

import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def describe(*packages: str) -> dict[str, Any]:
    """Returns the machine, its load, and the versions of Python, numpy and the packages named."""
    return {
        "cpu": cpu_model(),
        "cores": CORES,
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("numpy", *packages)},
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the CPU's name from /proc/cpuinfo, or else from Python."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def announce(compared: str, *others: str) -> dict[str, Any]:
    """Prints what is compared, the command and the machine; returns the result of `describe`."""
    here = describe("jax", "jaxlib", "flax", *others)
    print(compared)
    print("command: " + shlex.join(["python", *sys.argv]))
    print("; ".join(f"{name} {value}" for name, value in here.items()))
    if here["load"] > CORES / 4:
        print("note: the machine is in use by others; intervals will be wide")
    return here


def tree(root: int) -> list[int]:
    """Returns a process and its living descendants, itself first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    # the list grows while it is read, so that grandchildren are found too
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _stat(process: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name; [] if the process has just ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_seconds(process: int) -> tuple[float, float]:
    """Returns user and system seconds of a process and of the children that it has waited for."""
    user, system, user_children, system_children = map(int, _stat(process)[11:15] or [0] * 4)
    tick = os.sysconf("SC_CLK_TCK")
    return (user + user_children) / tick, (system + system_children) / tick


def megabytes(process: int) -> float:
    """Returns the memory of a process in MB, with its proportional share of shared pages."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Pss:")}
    return float(sizes.get("Pss", 0)) * 1024 / 1e6
