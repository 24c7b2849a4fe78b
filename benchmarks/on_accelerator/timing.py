"""Repeating a round, and figures of its times."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from tasks import Task

FEWEST = 3  # rounds that are timed, however long they take
MOST = 50


def repeat(run: Callable[[], None], seconds: float) -> list[float]:
    """Wall seconds of each run after a first that does not count."""
    run()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < FEWEST or (time.perf_counter() < end and len(taken) < MOST):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return taken


def figures(taken: list[float], task: Task) -> dict[str, Any]:
    """A round's time, and samples a second by its median."""
    median = statistics.median(taken)
    return {
        "round_seconds": median,
        "least_seconds": min(taken),
        "most_seconds": max(taken),
        "rounds": len(taken),
        "samples_per_second": task.clients * task.samples / median,
    }
