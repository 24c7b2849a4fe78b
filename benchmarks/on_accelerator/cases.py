"""Lists what is timed on an accelerator: networks, clients, methods, mappings, dtypes."""

import fcntl
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tasks

BATCH = 64
COMPILING = 100  # seconds; then a program is too long
FEWEST, MOST = 3, 50  # numbers of rounds that are timed
# part -> {K: n of vmap:n}; 2 of 3 and 3 of 5 leave a remainder, as a user's n may.
PARTS = {"digit_cnn": {5: 3, 50: 10}, "resnet18": {3: 2, 30: 6}}


class Case(NamedTuple):
    """One program to time."""

    part: str  # `digit_cnn` or `resnet18`
    num_clients: int
    method: str  # of `fedjax_bn.methods`, or "PyTorch": its loop over the clients of FedAvg
    clients: str  # how clients are mapped: `map`, `vmap` or `vmap:n`; empty for PyTorch
    dtype: str  # of all variables and images
    small: bool = False  # whether the sizes are so small that a CPU takes seconds

    @property
    def name(self) -> str:
        """Returns the name of the case in the record and in the table."""
        ours = (f"K={self.num_clients}", self.method, self.clients, self.dtype)
        return " ".join(filter(None, ours))


def cases(part: str, small: bool = False) -> list[Case]:
    """Returns all cases of a part, the most informative first: time may run out before the last."""
    if small:
        chosen = [("fedavg", "map", "float32"), ("PyTorch", "", "float32")]
        if part == "digit_cnn":
            chosen += [("fedbn", "vmap", "bfloat16"), ("fediga", "vmap:1", "float32")]
        return [Case(part, 2, *one, small=True) for one in chosen]
    return [
        Case(part, count, method, clients, dtype)
        for methods in (("fedbn", "PyTorch"), ("fediga", "fedavg"))
        for dtype in ("float32", "bfloat16")
        for method in methods
        for count, some in PARTS[part].items()
        for clients in (("",) if method == "PyTorch" else ("vmap", "map", f"vmap:{some}"))
    ]


def task_of(case: Case) -> tasks.Task:
    """Returns the round: 12 steps of DigitCNN on 28x28 pixels, 4 of ResNet18 on 224x224."""
    if case.part == "digit_cnn":
        task = tasks.DIGITS._replace(samples=12 * BATCH, batch=BATCH)
    else:
        task = tasks.RESNET._replace(side=224, samples=4 * BATCH, batch=BATCH)
    if case.small:
        task = task._replace(samples=4, batch=2, side=min(task.side, 32))
    return task._replace(clients=case.num_clients)


def wait_for_turn() -> None:
    """Waits until no other case compiles or is timed: standard input is a file that all lock."""
    signal.alarm(0)
    fcntl.flock(sys.stdin, fcntl.LOCK_EX)


def repeat(run: Callable[[], None], seconds: float, task: tasks.Task) -> dict[str, Any]:
    """Runs rounds for some seconds after a first one that is not timed; returns their figures."""
    run()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < FEWEST or (time.perf_counter() < end and len(taken) < MOST):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    median = statistics.median(taken)
    return {
        "round_seconds": median,
        "least_seconds": min(taken),
        "most_seconds": max(taken),
        "rounds": len(taken),
        "samples_per_second": task.clients * task.samples / median,
    }
