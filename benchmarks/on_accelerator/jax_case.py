"""Times one case of this library in a process of its own, so that its peak memory is its own.

    python -m on_accelerator.jax_case '["digit_cnn", 5, "fedavg", "vmap", "float32", false]' 10

The last line is JSON.
"""

import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn import methods
from fedjax_bn.aggregation import uniform
from on_accelerator import flops
from on_accelerator.timing import figures, repeat
from on_accelerator.work import Case, task_of
from tasks import LEARNING_RATE, Task, make_batches


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Compiles a round and repeats it.

    Args:
      case: what.
      seconds: after which no further round begins, but for the fewest.
    """
    task = task_of(case)
    method, state, batches = _prepare(case, task)
    key = jax.random.key(1)
    begin = time.perf_counter()
    traced = method.round.trace(state, batches, key)
    lowered = traced.lower()
    between = time.perf_counter()
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - between

    losses = None

    def run() -> None:
        nonlocal state, losses
        state, metrics = jax.block_until_ready(compiled(state, batches, key))
        losses = metrics["loss"]

    taken = repeat(run, seconds)
    return {
        **figures(taken, task),
        "teraflops": flops.count(traced.jaxpr) / statistics.median(taken) / 1e12,
        "trace_seconds": between - begin,
        "compile_seconds": compile_seconds,
        "loss": float(losses.mean()),
        **_memory(compiled),
    }


def _prepare(case: Case, task: Task) -> tuple[Any, Any, Any]:
    """Method, state and batches on the device."""
    batches = jax.tree.map(jnp.asarray, make_batches(task))
    key = jax.random.key(0)
    variables = jax.jit(task.model.init)(key, jnp.zeros((2, task.side, task.side, 3)))
    variables = jax.tree.map(lambda leaf: leaf.astype(case.dtype), variables)
    # From random weights CAFL's sum diverges (docs/results.md); the mean costs the same.
    options = {"cafl": "mean"} if case.method == "fediga" else {}
    make = getattr(methods, case.method)
    method = make(
        task.model, optax.sgd(LEARNING_RATE), weigh=uniform, clients=case.clients, **options
    )
    return method, method.init(key, variables, task.clients), batches


def _memory(compiled: Any) -> dict[str, float | None]:
    """Megabytes at the peak as the device counted, and of the program by the compiler's plan."""
    counted = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    plan = compiled.memory_analysis()
    planned = plan and (
        plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
        + plan.temp_size_in_bytes
    )
    return {
        "peak_megabytes": counted and counted / 1e6,
        "planned_megabytes": planned and planned / 1e6,
    }


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured
    print(json.dumps(measure(Case(*json.loads(sys.argv[1])), float(sys.argv[2]))))
