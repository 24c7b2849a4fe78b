"""Measures which kernels a round runs and how long the device waits, by JAX's profiler."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

LARGEST = 20  # kernels in the table


def profile(run: Callable[[], None]) -> dict[str, Any]:
    """Profiles a call; returns its kernels by time, and the seconds in which any or none ran.

    On a CPU these are the operations of XLA's threads.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    nanoseconds, counts, spans = Counter(), Counter(), []
    for line in (line for plane in devices or planes for line in plane.lines):
        if line.name.startswith(("Stream", "tf_XLA")):
            for event in line.events:
                name = re.sub(r"[._\d]+$", "", event.name)
                nanoseconds[name] += event.duration_ns
                counts[name] += 1
                spans.append((event.start_ns, event.start_ns + event.duration_ns))
    busy, end = 0.0, min(spans)[0]
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    largest = [(name, counts[name], ns / 1e9) for name, ns in nanoseconds.most_common(LARGEST)]
    idle = end - min(spans)[0] - busy
    return {
        "kernels": largest,
        "launches": len(spans),
        "busy_seconds": busy / 1e9,
        "idle_seconds": idle / 1e9,
    }


def markdown(name: str, found: dict[str, Any]) -> str:
    """Returns the table of a profile."""
    busy, idle = 1e3 * found["busy_seconds"], 1e3 * found["idle_seconds"]
    head = f"{name}: {found['launches']:,} kernels, busy {busy:.2f} ms, idle {idle:.2f} ms"
    lines = ["", head, "", "| kernel | times | ms |", "|---|---:|---:|"]
    lines += [f"| {kernel} | {n:,} | {1e3 * s:.3f} |" for kernel, n, s in found["kernels"]]
    return "\n".join(lines)
