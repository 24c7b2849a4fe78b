"""Measures how far the numbers of the examples move with the seed and with the number of cores.

    python benchmarks/examples.py --workdir runs/examples [--only README quickstart]

README's first example and the configs that need no data, with seeds 0 to 4 on two cores, and with
seed 0 on one core and on four. XLA gets as many threads and devices as on so many cores, also where
the machine has fewer. A run that was stopped continues; finished ones are read from the workdir.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import fedjax_bn
from fedjax_bn.run import train
from fedjax_bn.run.config.file import read
from fedjax_bn.training.score_tables import columns, heading

README = Path(__file__).parents[1] / "README.md"
CONFIGS = "quickstart", "segmentation", "signs"
SEEDS = {1: (0,), 2: (0, 1, 2, 3, 4), 4: (0,)}  # number of cores -> seeds


def main() -> None:
    """Makes the runs that are missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=Path("runs/examples"))
    parser.add_argument("--only", nargs="+", default=("README", *CONFIGS))
    options = parser.parse_args()
    print("| example | number | one core | two | four | seeds: mean | least to most |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for example in options.only:
        results = {}
        for cores, seeds in SEEDS.items():
            # A process of its own: JAX chooses its threads and devices once.
            alone = ProcessPoolExecutor(1, get_context("spawn"), use_cores, (cores,))
            with alone as process:
                for seed in seeds:
                    folder = options.workdir / f"{example}-{cores}-{seed}"
                    results[cores, seed] = process.submit(numbers, example, seed, folder).result()
        for name in results[2, 0]:
            of_cores = (f"{results[cores, 0][name]:.1f}" for cores in SEEDS)
            of_seeds = np.array([results[2, seed][name] for seed in SEEDS[2]])
            span = f"{of_seeds.min():.1f} to {of_seeds.max():.1f}"
            cells = (example, name, *of_cores, f"{of_seeds.mean():.1f}", span)
            print(f"| {' | '.join(cells)} |", flush=True)


def use_cores(cores: int) -> None:
    """Makes this process as one on a machine with so many cores; JAX has not started."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    os.environ["NPROC"] = str(cores)  # the number of XLA's threads
    os.sched_getaffinity = lambda process: set(range(cores))


def numbers(example: str, seed: int, folder: Path) -> dict[str, float]:
    """Returns what an example prints with a seed, name -> percent."""
    record = folder / "numbers.json"
    if not record.exists():
        record.parent.mkdir(parents=True, exist_ok=True)
        summaries = readme(seed) if example == "README" else run(example, seed, folder)
        values = {
            f"{name}{heading(column)}": value
            for name, summary in summaries.items()
            for column, value in columns(summary).items()
        }
        record.write_text(json.dumps(values))
    return json.loads(record.read_text())


def readme(seed: int) -> dict[str, dict]:
    """Runs README's first example, with a seed of `simulate`; returns its summary."""
    code = README.read_text().split("```python\n")[1].split("```")[0]
    names, simulate = {}, fedjax_bn.simulate

    def with_seed(method: Any, **options: Any) -> Any:
        return simulate(method, seed=seed, show_progress=False, **options)

    with mock.patch.object(fedjax_bn, "simulate", with_seed):
        exec(code, names)
    return {"": {"accuracy": names["result"].accuracy}}


def run(example: str, seed: int, folder: Path) -> dict[str, dict]:
    """Runs the method and the baselines of a config; returns "method, " -> summary."""
    return {
        f"{config.method}, ": train.run(config, place, say=lambda text: None)
        for config, place in train.runs(read(example, [("seed", str(seed))]), folder)
    }


if __name__ == "__main__":
    main()
