"""Measures a round whose clients are drawn from 100, 1,000 and 10,000.

    python benchmarks/population.py --json

It runs FedBN on configs/population.py: 64 clients a round with 16 samples each, whose own parts are
in the host's memory. Each population trains in a process of its own, with the same program as a
run. The claim is that time and device memory do not grow with the population, and that host memory
grows with the rows alone.
"""

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import jax

from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.training.population import start_population
from fedjax_bn.training.rounds import open_rounds
from machine import announce

CONFIG = Path(__file__).parents[1] / "configs" / "population.py"
FIGURES = ("round_seconds", "device_megabytes", "host_megabytes", "rows_megabytes")


def main() -> None:
    """Measures every population, prints a table and JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--populations", type=int, nargs="+", default=[100, 1000, 10_000])
    add("--cohort", type=int, default=64, help="clients a round; default %(default)s")
    add("--method", default="fedbn", help="scaffold: a model's size a client")
    add("--model", default="SmallCNN", help="default %(default)s")
    add("--rounds", type=int, default=10, help="default %(default)s; the first does not count")
    add("--json", action="store_true", help="print a JSON object as the last line")
    add("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.alone, options)))
        return
    here = announce(
        f"{options.method}, {options.model}: rounds of {options.cohort} clients out of "
        f"{', '.join(f'{n:,}' for n in options.populations)}, {options.rounds} each"
    )
    found = {}
    for count in options.populations:  # each in its own process, because peak memory is by process
        command = [sys.executable, *sys.argv, "--alone", str(count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[str(count)] = json.loads(done.stdout.splitlines()[-1])
    show(found)
    if options.json:
        figures = {name: {n: one[name] for n, one in found.items()} for name in FIGURES}
        print(json.dumps({"machine": here, **vars(options), "details": found} | figures))


def measure(population: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains some rounds with one population; returns median seconds and peak memory."""
    changes = {"data.num_clients": population, "clients_per_round": options.cohort}
    changes |= {"method": options.method, "model": options.model, "rounds": options.rounds}
    changes |= {"population": "host", "adaptations": "running"}
    changes["eval_clients"] = min(100, population)  # more than all clients is an error
    config = read(str(CONFIG), [(key, str(value)) for key, value in changes.items()])
    experiment, keys, start = prepare(config)
    state, seconds, cpu = start_population(experiment, start)(), [], []
    with device_bytes() as most:
        step = open_rounds(experiment, keys, state).compile(state)
        for _ in range(options.rounds):
            began, used = time.perf_counter(), time.process_time()
            state, _ = step(state)
            seconds.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
    rows = sum(leaf.nbytes for leaf in jax.tree.leaves(state.rows))
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "round_seconds": median(seconds[1:]),
        "fastest_seconds": min(seconds[1:]),
        "cpu_seconds": median(cpu[1:]),
        "device_megabytes": round(most[0] / 2**20, 2),
        "host_megabytes": round(host / 2**10, 1),
        "rows_megabytes": round(rows / 2**20, 2),
    }


@contextmanager
def device_bytes() -> Iterator[list[int]]:
    """Yields a list with the peak bytes of arrays on the device, or the device's own peak.

    Only the device's own count includes XLA's temporary memory.
    """
    most, done = [0], threading.Event()

    # on CPU `memory_stats` has no numbers, so the arrays are summed every 5 ms
    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], sum(array.nbytes for array in jax.live_arrays()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
        counted = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        most[0] = counted or most[0]


def show(found: dict[str, dict[str, Any]]) -> None:
    """Prints the table."""
    print("| clients | s a round (least) | CPU-s a round | device MB | host MB | rows MB |")
    print("|---:" * 6 + "|")
    for name, one in found.items():
        print(
            f"| {int(name):,} | {one['round_seconds']:.3f} ({one['fastest_seconds']:.3f}) | "
            f"{one['cpu_seconds']:.3f} | "
            f"{one['device_megabytes']:.1f} | {one['host_megabytes']:,.0f} | "
            f"{one['rows_megabytes']:.1f} |"
        )


if __name__ == "__main__":
    main()
