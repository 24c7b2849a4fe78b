"""Compiles one case for a described GPU: python -m on_gpu.compiling CASE.

CASE is JSON, such as '["DigitCNN", "fedbn", "map", "bfloat16"]'. The last line of the output is
JSON too. It needs JAX's plug-in for CUDA, and no GPU.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import optax
from jax.experimental import topologies

from accelerator import PEAKS
from fedjax_bn.engine.backend import traced_for
from fedjax_bn.run.experiment.method import METHODS
from on_accelerator import flops
from on_gpu import kernels
from on_gpu.cases import MODELS, Case
from on_tpu.compiling import arguments, network, placed

GPU = (Path(__file__).parents[1] / "on_accelerator" / "h100.txtpb").read_text()
BANDWIDTH = int(re.findall(r"memory_bandwidth: (\d+)", GPU)[0])  # bytes a second
BFLOAT16, TF32 = PEAKS[re.findall(r'device_description_str: "(.*)"', GPU)[0]]
REACHED = 0.6  # share of the peak


def compile_case(case: Case) -> dict[str, Any]:
    """Traces and compiles a round; returns its outcome and its figures."""
    described = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=GPU)
    model, options = network(case.model)
    begin = time.perf_counter()
    with traced_for("cuda"):
        method = METHODS[case.method](model, optax.sgd(0.01), clients=case.clients, **options)
        shapes = arguments(method, case.model, MODELS[case.model], dtype=case.dtype)
        traced = method.round.trace(*placed(shapes, None, described.devices[0]))
        lowered = traced.lower()
    between = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - between
    program = kernels.read(compiled.as_text())
    return {
        "outcome": "done",
        "trace_seconds": round(between - begin, 1),
        "compile_seconds": round(seconds, 1),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "flops": flops.count(traced.jaxpr),
        "steps": program.steps,
        "launches_of_a_client": program.of_a_client,
        "launches": program.launches,
        "kinds": by_kind(program.step),
    }


def by_kind(step: list[kernels.Kernel]) -> dict[str, tuple[int, int, float]]:
    """Returns kernels, bytes and estimated seconds by kind, most bytes first."""
    sums: dict[str, tuple[int, int, float]] = {}
    for kernel in step:
        count, size, seconds = sums.get(kernel.kind, (0, 0, 0.0))
        sums[kernel.kind] = (count + 1, size + kernel.size, seconds + estimate(kernel))
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def estimate(kernel: kernels.Kernel) -> float:
    """Returns the longer of the seconds that a kernel's bytes and its operations take."""
    peak = 1e12 * (BFLOAT16 if kernel.half else TF32)
    return max(kernel.size / BANDWIDTH, kernel.flops / (REACHED * peak))


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured
    print(json.dumps(compile_case(Case(*json.loads(sys.argv[1])))))
