"""Time and temporary memory of a round over a cohort, by the number of all clients.

    python benchmarks/cohort.py --method scaffold --repeats 50 --json

C of K clients take part. The state of all K is in a store; a round gathers the cohort's rows,
trains on arrays of C rows, and scatters the rows back. Timed are the three apart and as one
program, for every K and backend; the claim is that the round itself does not grow with K.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_bn import federation, methods
from fedjax_bn.models import SmallCNN
from interleave import conclude, figures, interleave, paired_ratio, show
from machine import announce

STEPS, BATCH, SIDE = 2, 8, 28


def main() -> None:
    """Times, prints a table for each backend, and JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--method", default="fedbn", help="scaffold: a model's size a client")
    add("--populations", type=int, nargs="+", default=[100, 1000], help="K; default %(default)s")
    add("--cohort", type=int, default=16, help="C; default %(default)s")
    add("--clients", nargs="+", default=["map", "vmap"], help="default %(default)s")
    add("--repeats", type=int, default=30)
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    here = announce(
        f"{options.method}, SmallCNN: a round of {options.cohort} of K clients, {STEPS} steps of "
        f"{BATCH} images, on {jax.devices()[0]}"
    )
    results = {clients: compare(clients, options) for clients in options.clients}
    if options.json:
        print(json.dumps({"machine": here, **vars(options), "results": results}))


def compare(clients: str, options: argparse.Namespace) -> dict[str, Any]:
    """All populations under one backend, beside the first of them."""
    programs = {
        f"{name}, K={population}": program
        for population in options.populations
        for name, program in compile_all(clients, population, options).items()
    }
    print(f"\nclients={clients!r}")
    taken = interleave({name: run for name, (run, _) in programs.items()}, options.repeats)
    first, *others = options.populations
    show(taken, f"round, K={first}")
    temporary = {name: size for name, (_, size) in programs.items()}
    print("temporary bytes: " + "; ".join(f"{name} {size:,}" for name, size in temporary.items()))
    for other in others:
        for name in ("gather", "round", "scatter", "whole"):
            ratio = paired_ratio(taken[f"{name}, K={other}"], taken[f"{name}, K={first}"])
            conclude(f"{name}, K={other} / K={first}", ratio)
    return {"times": figures(taken, f"round, K={first}"), "temporary_bytes": temporary}


def compile_all(
    clients: str, population: int, options: argparse.Namespace
) -> dict[str, tuple[Callable[[], object], int]]:
    """name -> (run, its temporary bytes) for gather, round, scatter and all in one."""
    key, model = jax.random.key(0), SmallCNN()
    method = getattr(methods, options.method)(model, optax.sgd(0.01), clients=clients)
    batches = make_batches(population, options.cohort)
    variables = jax.jit(model.init)(key, jnp.zeros((2, SIDE, SIDE, 3)))
    store, client = method.init(key, variables, population), batches["client"]

    cohort = jax.jit(federation.take_rows)(store, client)

    def whole(store: Any, batches: dict, client: jax.Array) -> Any:
        rows, _ = method.round(federation.take_rows(store, client), batches, key)
        return federation.put_rows(store, rows, client)

    return {
        "gather": program(federation.take_rows, store, client),
        "round": program(lambda *args: method.round(*args, key)[0], cohort, batches, moves=True),
        "scatter": program(federation.put_rows, store, cohort, client, moves=True),
        "whole": program(whole, store, batches, client, moves=True),
    }


def program(
    function: Callable, state: Any, *rest: Any, moves: bool = False
) -> tuple[Callable[[], object], int]:
    """Compiles; returns `run()` and the temporary bytes. What moves the state does it in place."""
    jitted = jax.jit(function, donate_argnums=(0,) if moves else ())
    compiled = jitted.lower(state, *rest).compile()
    state = jax.tree.map(jnp.copy, state)  # this program's own, because it is donated

    def run() -> None:
        nonlocal state
        result = jax.block_until_ready(compiled(state, *rest))
        state = result if moves else state

    return run, compiled.memory_analysis().temp_size_in_bytes


def make_batches(population: int, cohort: int) -> dict[str, jax.Array]:
    """Random images of random participants."""
    random, shape = np.random.default_rng(0), (cohort, STEPS, BATCH)
    return {
        "image": jnp.asarray(random.integers(0, 256, (*shape, SIDE, SIDE, 3), dtype=np.uint8)),
        "label": jnp.asarray(random.integers(0, 10, shape), jnp.int32),
        "valid": jnp.ones(shape, bool),
        "client": jnp.asarray(np.sort(random.permutation(population)[:cohort]), jnp.int32),
        "population": jnp.asarray(population, jnp.int32),
    }


if __name__ == "__main__":
    main()
