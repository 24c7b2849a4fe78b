"""Compiles rounds for an NVIDIA H100 that is described, on a machine without one (Linux).

    python benchmarks/gpu_compile.py --kinds               # FedBN on ResNet18, one client at a time
    python benchmarks/gpu_compile.py --model UNet --method fedbn fedprox --clients map vmap
    python benchmarks/gpu_compile.py --table --source ../before      # README's, of another checkout

The command makes an environment with JAX of its own version and its plug-in for CUDA 13 once
(1.3 GB), and compiles each program there in a process of its own. Kernels, the megabytes that they
read and write, and launches are exact. The estimate of a step adds, for its kernels, the longer of
bytes over the bandwidth and operations over 0.6 of the peak; time of launches is not in it. The
kinds follow names of JAX's operations. The same command with a record continues where it ended.
"""

import argparse
import itertools
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from fedjax_bn.run.experiment.method import METHODS
from machine import announce
from on_gpu.cases import DTYPES, MODELS, TABLE, Case
from tpu_compile import ROOT, compile_all, environment, perform, versions

LIMIT = 900.0  # seconds of a program
DEFAULTS = {"model": ["ResNet18"], "method": ["fedbn"], "clients": ["map"], "dtype": ["bfloat16"]}
HEAD = (
    *("program", "trace s", "compile s", "temporaries MB", "kernels of a step", "MB of a step"),
    *("Gflop of a step", "estimate of a step, us", "launches of a client beside its steps"),
    *("of a round beside the steps", "of a round"),
)


def main(arguments: list[str] | None = None) -> None:
    """Compiles what the record lacks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", nargs="+", choices=MODELS, help="default: ResNet18")
    add("--method", nargs="+", choices=METHODS, metavar="METHOD", help="default: fedbn")
    add("--clients", nargs="+", help="auto, map, vmap or vmap:at_once=n; default: map")
    add("--dtype", nargs="+", choices=DTYPES, help="of all variables; default: bfloat16")
    add("--table", action="store_true", help="README's programs; the options above choose from it")
    add("--source", type=Path, default=ROOT, help="checkout of this package; default: this one")
    add("--record", type=Path, help="file of results; its programs are not compiled again")
    add("--kinds", action="store_true", help="print the kernels of a step by kind")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args(arguments)
    here, jax = announce("programs for a described H100"), metadata.version("jax")
    compilers = (f"jax=={jax}", f"jax-cuda13-plugin=={jax}")
    python = environment(ROOT / "runs" / "gpu_compile", "gpu", *compilers)
    source = str(options.source.resolve())
    about = {"source": source, **versions(python, "jax-cuda13-plugin")}
    paths = os.pathsep.join((str(ROOT / "benchmarks"), source))
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}

    def compile_one(case: Case) -> dict[str, Any]:
        return perform([python, "-m", "on_gpu.compiling", json.dumps(case)], variables, LIMIT)

    shown = compile_all(cases(options), compile_one, options.record, about, LIMIT)
    print(", ".join(f"{name} {value}" for name, value in about.items()), "", sep="\n")
    print(markdown(shown))
    for compiled in shown if options.kinds else ():
        print(by_kind(compiled))
    if options.json:
        print(json.dumps({"machine": here, "about": about, "programs": shown}))
    sys.exit(any(compiled["outcome"] == "failed" for compiled in shown))


def cases(options: argparse.Namespace) -> list[Case]:
    """Returns the cases that the options choose."""
    values = {name: getattr(options, name) for name in Case._fields if getattr(options, name)}
    if options.table:
        return [c for c in TABLE if all(getattr(c, name) in values[name] for name in values)]
    return list(itertools.starmap(Case, itertools.product(*(DEFAULTS | values).values())))


def markdown(shown: list[dict[str, Any]]) -> str:
    """Returns the table; a program that was not compiled shows the reason."""
    rows = (HEAD, ("---", *["---:"] * (len(HEAD) - 1)), *map(row, shown))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(compiled: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a case."""
    case = Case(*compiled["case"])
    if compiled["outcome"] != "done":
        return (case.name, f"{compiled['outcome']}: {compiled['why']}".replace("|", "/"))
    kernels, size, seconds = map(sum, zip(*compiled["kinds"].values(), strict=True))
    launches, steps = compiled["launches"], compiled["steps"]
    numbers = (
        *(compiled["trace_seconds"], compiled["compile_seconds"], compiled["temporaries"] / 1e6),
        *(kernels, size / 1e6, compiled["flops"] / steps / 1e9, seconds * 1e6),
        *(compiled["launches_of_a_client"], launches - steps * kernels, launches),
    )
    return (case.name, *(f"{number:,.0f}" for number in numbers))


def by_kind(compiled: dict[str, Any]) -> str:
    """Returns a table of the kernels of a step by kind."""
    name = Case(*compiled["case"]).name
    lines = [f"\n| {name} | kernels | MB | estimate, us |", "|---|---:|---:|---:|"]
    for kind, (count, size, seconds) in compiled.get("kinds", {}).items():
        lines.append(f"| {kind} | {count} | {size / 1e6:,.1f} | {seconds * 1e6:,.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
