"""Parity, speed and accuracy on a GPU or TPU: one command, no network, one JSON and one table.

    python benchmarks/accelerator.py --out runs/h100 --shared ../shared --pacs PACS
    python benchmarks/accelerator.py --out runs/h100 --part digit_cnn resnet18
    python benchmarks/accelerator.py --out runs/cpu --small     # everything in tiny, on any CPU

The parts, each within eight minutes, all within 30: `parity` (the tests in float64 on this
backend), `quickstart`, `digit_cnn` (5 and 50 clients), `resnet18` (224x224 pixels, 3 and 30
clients), `pacs` (ResNet18 at 128 pixels, all targets, from random weights). The two timed parts
take FedAvg, FedBN and FedIG-A under `map`, `vmap` and `vmap:n`, in float32 and with all variables
and images in bfloat16, and PyTorch's loop over clients where PyTorch is there.

Every job is a process of its own, so that its peak memory is its own, and one that runs out of
memory ends nothing else. What became of it is added to OUT/accelerator.json at once. What did not
fit the time is "left out"; give the same command again and it continues there. A part that is
finished is skipped. The table is OUT/accelerator.md. The status is 1 where a job failed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from fedjax_bn.run.files.workdir import write_atomically
from on_accelerator.jobs import ROOT, Record, environment
from on_accelerator.parts import PARTS
from on_accelerator.records import do_part, open_file
from on_accelerator.table import markdown


def main(arguments: list[str] | None = None) -> None:
    """Does the parts asked for, and writes the table."""
    options = parse(arguments)
    records = open_file(options.out / "accelerator.json", describe(options))
    about = records["about"]
    print(f"{about['kind']} ({about['platform']}), jax {about['versions']['jax']}")
    if about["platform"] == "cpu" and not options.small:
        raise SystemExit("JAX finds no accelerator here: install its plug-in, or give --small")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.part:
        jobs, seconds = PARTS[name]
        path = options.out / "accelerator.json"
        do_part(path, records, name, jobs(options, about), seconds)
        write_atomically(options.out / "accelerator.md", markdown(records))
    print(f"table: {options.out / 'accelerator.md'}")
    failed = [
        f"{part}: {name}"
        for part in options.part
        for name, record in records["parts"].get(part, {}).items()
        if record["outcome"] == "failed"
    ]
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the JSON, the table and the runs")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--shared", type=Path, help="reference data of the tests; default: FEDJAX_BN_SHARED")
    add("--pacs", type=Path, help="folder of PACS, as configs/pacs.py wants it")
    add("--rounds", type=int, default=10, help="of the trainings on PACS; default %(default)s")
    add("--steps", type=int, default=100, help="of a client in a round; default %(default)s")
    add("--small", action="store_true", help="tiny sizes, to see on a CPU that everything runs")
    return parser.parse_args(arguments)


def describe(options: argparse.Namespace) -> Record:
    """Device, versions and sizes, asked of another process: a TPU serves one at a time."""
    command = [sys.executable, "-m", "on_accelerator.describe"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"JAX finds no device: {done.stderr.strip().splitlines()[-1]}")
    about = json.loads(done.stdout.splitlines()[-1])
    sizes = {"small": options.small, "rounds": options.rounds, "steps": options.steps}
    return about | {"sizes": sizes}


if __name__ == "__main__":
    main()
