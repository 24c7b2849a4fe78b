"""Compiles one case for a described GPU: python -m on_gpu.compiling CASE.

CASE is JSON, such as '["DigitCNN", "fedbn", "map", "bfloat16"]'. The last line of the output is
JSON too. It needs JAX's plug-in for CUDA, and no GPU.
"""

import json
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

from accelerator import PEAKS
from fedjax_bn.engine.backend import traced_for
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.run.experiment.method import METHODS
from on_accelerator import flops
from on_gpu import kernels
from on_gpu.cases import MODELS, Case
from on_tpu.compiling import arguments, network, placed

GPU = (Path(__file__).parents[1] / "on_accelerator" / "h100.txtpb").read_text()


def compile_case(case: Case) -> dict[str, Any]:
    """Traces and compiles a round; returns its outcome and its figures."""
    described = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=GPU)
    begin = time.perf_counter()
    with traced_for("cuda"):
        traced = trace(case, described.devices[0])
        lowered = traced.lower()
    between = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - between
    plan, found = compiled.memory_analysis(), kernels.read(compiled.as_text())
    return {
        "outcome": "done",
        "trace_seconds": round(between - begin, 1),
        "compile_seconds": round(seconds, 1),
        "arguments": plan.argument_size_in_bytes,
        "temporaries": plan.temp_size_in_bytes,
        "flops": flops.count(traced.jaxpr),
        "step_kernels": len(found.step),
        "step_bytes": sum(one.read + one.written for one in found.step),
        "step_estimate": sum(estimate(one) for one in found.step),
        "steps": found.steps,
        "outside_of_a_client": found.of_a_client,
        "outside_of_the_steps": found.outside,
        "launches": found.launches,
        "kinds": by_kind(found.step),
    }


def trace(case: Case, device: Any) -> Any:
    """Returns the traced round of a case, with plain SGD."""
    model, options = network(case.model)
    if case.dtype == "mixed":
        model = in_dtype(model, jnp.bfloat16)
    build = METHODS[case.method]
    method: FederatedMethod = build(model, optax.sgd(0.01), clients=case.clients, **options)
    dtype = jnp.bfloat16 if case.dtype == "bfloat16" else None
    shapes = arguments(method, case.model, MODELS[case.model], dtype=dtype)
    return method.round.trace(*placed(shapes, None, device))


def estimate(kernel: kernels.Kernel) -> float:
    """Returns the seconds that bandwidth or peak allow a kernel at best, on the described GPU."""
    (name,) = re.findall(r'device_description_str: "(.*)"', GPU)
    (bandwidth,) = re.findall(r"memory_bandwidth: (\d+)", GPU)
    bfloat16, tf32 = (1e12 * (teraflops or 0) for teraflops in PEAKS[name])
    return kernel.seconds(float(bandwidth), (bfloat16, tf32))


def by_kind(step: list[kernels.Kernel]) -> dict[str, tuple[int, int, int, float]]:
    """Returns kernels, bytes read and written, and estimated seconds by kind, most bytes first."""
    groups: dict[str, list[kernels.Kernel]] = defaultdict(list)
    for one in step:
        groups[one.kind].append(one)
    sums = {
        kind: (
            len(group),
            sum(one.read for one in group),
            sum(one.written for one in group),
            sum(map(estimate, group)),
        )
        for kind, group in groups.items()
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1][1] - item[1][2]))


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured
    print(json.dumps(compile_case(Case(*json.loads(sys.argv[1])))))
