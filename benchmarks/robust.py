"""Counts what robust weighing rules cost: reductions on a mesh, memory, and CPU seconds.

    JAX_NUM_CPU_DEVICES=4 python benchmarks/robust.py

A round whose clients do not train: each adds its number to the shared leaf, so that a program has
the aggregation and nothing else. Bytes are in multiples of one upload. Memory is what XLA reserves
in addition to arguments and results (`memory_analysis`), on one device and on each of the mesh.
"""

import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_bn import aggregation
from fedjax_bn.client import Client, LocalUpdate
from fedjax_bn.federation import FederatedMethod, federate

RULES = {
    "by_size": aggregation.by_size,
    "risk_extrapolation": aggregation.risk_extrapolation(),
    "coordinate_median": aggregation.coordinate_median(),
    "trimmed_mean": aggregation.trimmed_mean(),
    "krum": aggregation.krum(),
    "geometric_median": aggregation.geometric_median(),
    "norm_clipping": aggregation.norm_clipping(),
}
KEY = jax.random.key(0)
CLIENTS, NUMBERS = 8, 1_000_000  # of the federation, of an upload


def main() -> None:
    """Prints a table."""
    mesh = Mesh(np.array(jax.devices()), ("clients",))
    print(f"rule | reductions on {mesh.size} devices | uploads in them | memory of one device |")
    print("memory of each of the mesh | CPU ms of a round on one device")
    for name, rule in RULES.items():
        methods = (federate(adding(), weigh=rule, mesh=m) for m in (None, mesh))
        alone, over = (method.round.lower(*given(method)).compile() for method in methods)
        found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", over.as_text())
        moved = sum(numbers(form) for form in found) / NUMBERS
        memory = [p.memory_analysis().temp_size_in_bytes / (4 * NUMBERS) for p in (alone, over)]
        print(f"{name} | {len(found)} | {moved:.1f} | ", end="")
        print(f"{memory[0]:.1f} | {memory[1]:.1f} | {1000 * seconds(alone):.0f}", flush=True)


def adding() -> Client:
    """Returns a client that adds its image, one number, to all parameters."""

    def run(received: Any, batches: Any, key: jax.Array) -> LocalUpdate:
        moved = received.shared["params"]["w"] + batches["image"][0, 0, 0]
        return LocalUpdate({"params": {"w": moved}}, (), (), jnp.ones(1), jnp.ones(1, jnp.int32))

    return Client(lambda shared, personal: (), run)


def given(method: FederatedMethod) -> tuple:
    """Returns the arguments of a round."""
    state = method.init(KEY, {"params": {"w": jnp.zeros(NUMBERS)}}, CLIENTS)
    batches = {
        "image": jnp.arange(CLIENTS, dtype=float).reshape(CLIENTS, 1, 1, 1),
        "label": jnp.zeros((CLIENTS, 1, 1), jnp.int32),
        "valid": jnp.ones((CLIENTS, 1, 1), bool),
    }
    return state, batches, KEY


def numbers(form: str) -> int:
    """Returns how many numbers an instruction gives, such as 12 for "(f32[3,4]{1,0})"."""
    shapes = re.findall(r"\w+\[([\d,]*)\]", form)
    return sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def seconds(program: Any) -> float:
    """Returns the least CPU seconds of five rounds."""
    taken = []
    for _ in range(5):
        arguments = jax.block_until_ready(given(federate(adding())))
        before = time.process_time()
        jax.block_until_ready(program(*arguments))
        taken.append(time.process_time() - before)
    return min(taken)


if __name__ == "__main__":
    main()
