"""Counts what robust weighing rules cost: reductions on a mesh, memory, and CPU seconds.

    JAX_NUM_CPU_DEVICES=4 python benchmarks/robust.py --clients=8 --numbers=1000000

A round whose clients do not train: each adds its number to the shared leaf, so that a program has
the aggregation and nothing else. Bytes are in multiples of one upload. Memory is what XLA reserves
in addition to arguments and results (`memory_analysis`), on one device and on each of the mesh.
"""

import argparse
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


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--numbers", type=int, default=1_000_000, help="of an upload")
    options = parser.parse_args()
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("clients",))
    print(f"rule | reductions on {len(devices)} devices | uploads in them | memory of one device |")
    print("memory of each of the mesh | CPU ms of a round on one device")
    for name, rule in RULES.items():
        over, alone = (
            lowered(federate(adding(), weigh=rule, mesh=m), options.clients, options.numbers)
            for m in (mesh, None)
        )
        one = 4 * options.numbers
        found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", over.as_text())
        moved = sum(numbers(form) for form in found) / options.numbers
        memory = [p.memory_analysis().temp_size_in_bytes / one for p in (alone, over)]
        taken = seconds(alone, options.clients, options.numbers)
        print(f"{name} | {len(found)} | {moved:.1f} | ", end="")
        print(f"{memory[0]:.1f} | {memory[1]:.1f} | {1000 * taken:.0f}", flush=True)


def adding() -> Client:
    """Returns a client that adds its image, one number, to all parameters."""

    def run(received: Any, batches: Any, key: jax.Array) -> LocalUpdate:
        moved = received.shared["params"]["w"] + batches["image"][0, 0, 0]
        return LocalUpdate({"params": {"w": moved}}, (), (), jnp.ones(1), jnp.ones(1, jnp.int32))

    return Client(lambda shared, personal: (), run)


def given(method: FederatedMethod, clients: int, count: int) -> tuple:
    """Returns the arguments of a round."""
    state = method.init(KEY, {"params": {"w": jnp.zeros(count)}}, clients)
    batches = {
        "image": jnp.arange(clients, dtype=float).reshape(clients, 1, 1, 1),
        "label": jnp.zeros((clients, 1, 1), jnp.int32),
        "valid": jnp.ones((clients, 1, 1), bool),
    }
    return state, batches, KEY


def lowered(method: FederatedMethod, clients: int, count: int) -> Any:
    """Returns the compiled program of a round."""
    return method.round.lower(*given(method, clients, count)).compile()


def numbers(form: str) -> int:
    """Returns how many numbers an instruction gives, such as 12 for "(f32[3,4]{1,0})"."""
    shapes = re.findall(r"\w+\[([\d,]*)\]", form)
    return sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def seconds(program: Any, clients: int, count: int) -> float:
    """Returns the least CPU seconds of five rounds."""
    taken = []
    for _ in range(5):
        arguments = jax.block_until_ready(given(federate(adding()), clients, count))
        before = time.process_time()
        jax.block_until_ready(program(*arguments))
        taken.append(time.process_time() - before)
    return min(taken)


if __name__ == "__main__":
    main()
