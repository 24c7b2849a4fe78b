"""Lists what is timed on an accelerator: networks, clients, methods, mappings, dtypes, options."""

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
PARTS = {"digit_cnn": {5: 3, 50: 10}, "resnet18": {3: 2, 30: 6}, "unet": {}}
ROUNDS = {
    "digit_cnn": tasks.DIGITS._replace(samples=12 * BATCH, batch=BATCH),
    "resnet18": tasks.RESNET._replace(side=224, samples=4 * BATCH, batch=BATCH),
    "unet": tasks.UNET._replace(side=128, samples=4 * 16, batch=16),
}
# Variant of a case of ours -> XLA's options. By default XLA makes CUDA graphs of at least five
# kernels, without loops, and without convolutions that are not fused.
FUSED = {"xla_gpu_experimental_enable_conv_fusion": True}
LOOPS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,WHILE"
LOOPED = FUSED | {"xla_gpu_enable_command_buffer": LOOPS}
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "before": {},  # with the package of `--before`
    "profile": {},  # also lists the kernels of a round; XLA makes no graphs while it is profiled
    "conv_fusion": FUSED,
    "graph_loops": LOOPED,
    "unrolled": LOOPED | {"xla_gpu_command_buffer_unroll_loops": True},
    "concurrent": FUSED | {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
    "small_graphs": {"xla_gpu_graph_min_graph_size": 1},
    "latency_hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
# What may be fastest on either side, the most informative first: part, K, method, clients, dtype,
# variant.
CONTENDERS = """
    resnet18  3  fedbn   map            bfloat16
    resnet18  3  PyTorch compiled       bfloat16
    resnet18  3  PyTorch compiled_graph bfloat16
    digit_cnn 50 fedbn   map            bfloat16
    digit_cnn 50 PyTorch graph          bfloat16
    digit_cnn 50 PyTorch compiled_graph bfloat16
    resnet18  3  fedbn   map            bfloat16 before
    digit_cnn 50 fedbn   map            bfloat16 before
    resnet18  3  fedbn   map            bfloat16 conv_fusion
    digit_cnn 50 fedbn   map            bfloat16 conv_fusion
    resnet18  3  PyTorch compiled_graph mixed
    resnet18  3  PyTorch graph          bfloat16
    resnet18  3  fedbn   map            bfloat16 graph_loops
    digit_cnn 50 fedbn   map            bfloat16 graph_loops
    resnet18  3  fedbn   map            bfloat16 profile
    digit_cnn 50 fedbn   map            bfloat16 profile
    digit_cnn 50 fedbn   vmap           float32
    digit_cnn 50 PyTorch compiled_graph float32
    resnet18  3  fedbn   map            mixed
    resnet18  3  fedbn   map            bfloat16 unrolled
    digit_cnn 50 fedbn   map            bfloat16 unrolled
    resnet18  3  fedbn   map            bfloat16 concurrent
    digit_cnn 50 fedbn   map            bfloat16 small_graphs
    resnet18  3  fedbn   map            float32
    resnet18  3  fedbn   map            float32  before
    resnet18  3  PyTorch compiled_graph float32
    unet      4  fedbn   map            bfloat16
    unet      4  fedbn   map            bfloat16 before
    unet      4  PyTorch compiled_graph bfloat16
    unet      4  fedbn   map            bfloat16 profile
    unet      4  fedbn   map            bfloat16 conv_fusion
    resnet18  3  fedbn   map            mixed    before
    digit_cnn 50 fedbn   map            bfloat16 concurrent
    resnet18  3  fedbn   map            bfloat16 small_graphs
    resnet18  3  fedbn   map            bfloat16 latency_hiding
    resnet18  3  PyTorch graph          mixed
    resnet18  3  PyTorch compiled       mixed
    digit_cnn 50 PyTorch compiled_graph mixed
    unet      4  fedbn   map            float32
    unet      4  PyTorch compiled_graph float32
    resnet18  3  PyTorch autotune_graph bfloat16
    digit_cnn 50 PyTorch autotune_graph bfloat16
"""
SMALL = """
    digit_cnn 2  fedavg  map            float32
    digit_cnn 2  PyTorch eager          float32
    digit_cnn 2  fedbn   vmap           bfloat16
    digit_cnn 2  fediga  vmap:1         float32
    resnet18  2  fedavg  map            float32
    resnet18  2  PyTorch eager          float32
    unet      2  fedbn   map            mixed    profile
    unet      2  PyTorch eager          float32
    unet      2  PyTorch compiled_graph bfloat16
"""


class Case(NamedTuple):
    """One program to time."""

    part: str  # `digit_cnn`, `resnet18` or `unet`
    num_clients: int
    method: str  # of `fedjax_bn.methods`, or "PyTorch": its loop over the clients of FedAvg
    # how clients are mapped: `map`, `vmap` or `vmap:n`; of PyTorch how its loop runs: `eager`,
    # `graph` (a whole round is one CUDA graph), and compiled without or with such a graph
    clients: str
    dtype: str  # of all variables and images; "mixed": of layers alone (PyTorch's AMP)
    variant: str = ""  # of ours, see `VARIANTS`
    small: bool = False  # whether the sizes are so small that a CPU takes seconds

    @property
    def name(self) -> str:
        """Returns the name of the case in the record and in the table."""
        ours = (f"K={self.num_clients}", self.method, self.clients, self.variant, self.dtype)
        return " ".join(filter(None, ours))


def cases(fastest: bool = False, small: bool = False) -> list[Case]:
    """Returns all cases, the most informative first: time may run out before the last."""
    if small:
        return [case._replace(small=True) for case in _listed(SMALL)]
    if fastest:
        return _listed(CONTENDERS)
    return [
        Case(part, count, method, clients, dtype)
        for part, counts in PARTS.items()
        for methods in (("fedbn", "PyTorch"), ("fediga", "fedavg"))
        for dtype in ("float32", "bfloat16")
        for method in methods
        for count, some in counts.items()
        for clients in (
            ("eager", "compiled") if method == "PyTorch" else ("vmap", "map", f"vmap:{some}")
        )
    ]


def _listed(text: str) -> list[Case]:
    lines = [line.split() for line in text.strip().splitlines()]
    return [Case(part, int(count), *more) for part, count, *more in lines]


def task_of(case: Case) -> tasks.Task:
    """Returns the round: 12 steps of DigitCNN on 28x28 pixels, 4 of the others."""
    task = ROUNDS[case.part]._replace(clients=case.num_clients)
    if case.small:
        task = task._replace(samples=4, batch=2, side=min(task.side, 32))
    return task


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
