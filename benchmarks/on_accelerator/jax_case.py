"""Times one case of this library: python -m on_accelerator.jax_case CASE SECONDS.

CASE is JSON, such as '["digit_cnn", 5, "fedavg", "vmap", "float32", "", false]'. The last line of
the output is JSON too.
"""

import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import uniform
from fedjax_bn.models.precision import in_dtype
from fedjax_bn.run.experiment.method import METHODS
from fedjax_bn.task import segmentation
from on_accelerator import flops
from on_accelerator.cases import COMPILING, VARIANTS, Case, repeat, task_of, wait_for_turn
from on_accelerator.profiles import profile
from tasks import LEARNING_RATE, make_batches


def measure(case: Case, seconds: float, wait: Callable[[], None]) -> dict[str, Any]:
    """Compiles a round, waits, and repeats it for so many seconds, but at least `FEWEST` times."""
    task = task_of(case)
    batches, key = jax.tree.map(jnp.asarray, make_batches(task)), jax.random.key(0)
    variables = jax.jit(task.model.init)(key, jnp.zeros((2, task.side, task.side, 3)))
    if case.dtype == "bfloat16":
        variables = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)
    model = in_dtype(task.model, jnp.bfloat16) if case.dtype == "mixed" else task.model
    # From random weights CAFL's sum diverges (docs/results/); the mean costs the same.
    options: dict[str, Any] = {"cafl": "mean"} if case.method == "fediga" else {}
    options |= {"task": segmentation(2)} if case.part == "unet" else {}
    options |= {"weigh": uniform, "clients": case.clients}
    method = METHODS[case.method](model, optax.sgd(LEARNING_RATE), **options)
    state, losses = method.init(key, variables, task.clients), None
    begin = time.perf_counter()
    traced = method.round.trace(state, batches, key)
    lowered = traced.lower()
    between = time.perf_counter()
    compiled = lowered.compile(compiler_options=VARIANTS[case.variant] or None)
    compile_seconds = time.perf_counter() - between

    def run() -> None:
        nonlocal state, losses
        state, metrics = jax.block_until_ready(compiled(state, batches, key))
        losses = metrics["loss"]

    wait()
    # also the compiler's memory plan, because not every device counts its allocations
    found, plan = repeat(run, seconds, task), compiled.memory_analysis()
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    planned = plan and (
        plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
        + plan.temp_size_in_bytes
    )
    return {
        **found,
        "teraflops": flops.count(traced.jaxpr) / found["round_seconds"] / 1e12,
        "trace_seconds": between - begin,
        "compile_seconds": compile_seconds,
        "loss": float(losses.mean()),
        "peak_megabytes": peak and peak / 1e6,
        "planned_megabytes": planned and planned / 1e6,
        "profile": profile(run) if case.variant == "profile" else None,
    }


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured
    signal.alarm(COMPILING)  # ends the process
    print(json.dumps(measure(Case(*json.loads(sys.argv[1])), float(sys.argv[2]), wait_for_turn)))
