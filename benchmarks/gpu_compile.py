"""Compiles rounds for an NVIDIA H100 that is described, on a machine without one (Linux).

    python benchmarks/gpu_compile.py --kinds               # FedBN on ResNet18, one client at a time
    python benchmarks/gpu_compile.py --model UNet --method fedbn fedprox --dtype bfloat16 float32
    python benchmarks/gpu_compile.py --table                          # README's programs
    python benchmarks/gpu_compile.py --table --source ../before       # the same of another checkout

The command makes an environment with JAX of its own version and its plug-in for CUDA 13 once
(1.2 GB), and compiles each program there in a process of its own. It prints seconds, temporaries of
the compiler's plan, and what follows exactly from the compiled program: kernels of a local step and
the megabytes that they read and write, launches beside the steps in the loop over clients and in
all, and launches of a round. The estimate of a step adds up, kernel by kernel, the longer of bytes
over the bandwidth and operations over 0.6 of the peak; the time of launches is not in it, nor is
the choice among kernels that cuDNN makes on a device. `--kinds` splits a step by what the names of
JAX's operations say that its kernels do.

After each program the record gets a line. The same command continues with those that are missing
or have failed. The status is 1 if one failed.
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

DEFAULTS = {"model": ["ResNet18"], "method": ["fedbn"], "clients": ["map"], "dtype": ["bfloat16"]}
HEAD = (
    *("program", "trace s", "compile s", "temporaries MB", "kernels of a step", "MB of a step"),
    *("Gflop of a step", "estimate of a step, us", "beside the steps, a client"),
    *("beside the steps, in all", "launches of a round"),
)


def main(arguments: list[str] | None = None) -> None:
    """Compiles what the record lacks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", nargs="+", choices=MODELS, help="default: ResNet18")
    add("--method", nargs="+", choices=METHODS, metavar="METHOD", help="default: fedbn")
    add("--clients", nargs="+", help="auto, map, vmap or vmap:at_once=n; default: map")
    add("--dtype", nargs="+", choices=DTYPES, help="mixed: of layers alone; default: bfloat16")
    add("--table", action="store_true", help="README's programs; the options above choose from it")
    add("--source", type=Path, default=ROOT, help="checkout of this package; default: this one")
    add("--record", type=Path, help="file of results; its programs are not compiled again")
    add("--limit", type=float, default=900, help="seconds of a program; default %(default)s")
    add("--environment", type=Path, default=ROOT / "runs" / "gpu_compile", help="folder; is kept")
    add("--kinds", action="store_true", help="print the kernels of a step by kind")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args(arguments)
    chosen = cases(options)
    here = announce("programs for a described H100; times of kernels are estimates")
    jax = metadata.version("jax")
    python = environment(options.environment, "gpu", f"jax=={jax}", f"jax-cuda13-plugin=={jax}")
    source = options.source.resolve()
    about = {"source": str(source), **versions(python, "jax-cuda13-plugin")}
    paths = os.pathsep.join((str(ROOT / "benchmarks"), str(source)))
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}

    def compile_one(case: Case) -> dict[str, Any]:
        command = [python, "-m", "on_gpu.compiling", json.dumps(case)]
        return perform(command, variables, options.limit)

    shown = compile_all(chosen, compile_one, options.record, about, options.limit)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(markdown(shown))
    for compiled in shown if options.kinds else ():
        print(by_kind(compiled))
    if options.json:
        print(json.dumps({"machine": here, "about": about, "programs": shown}))
    if any(compiled["outcome"] == "failed" for compiled in shown):
        sys.exit(1)


def cases(options: argparse.Namespace) -> list[Case]:
    """Returns the cases that the options choose."""
    values = {name: getattr(options, name) or DEFAULTS[name] for name in Case._fields}
    if not options.table:
        return list(itertools.starmap(Case, itertools.product(*values.values())))
    asked = {name: values[name] for name in values if getattr(options, name)}
    chosen = [c for c in TABLE if all(getattr(c, name) in asked[name] for name in asked)]
    return chosen or sys.exit("the table has no such program: leave out --table to compile it")


def markdown(shown: list[dict[str, Any]]) -> str:
    """Returns a table for each network; a program that was not compiled shows the reason."""
    lines = []
    for model, size in MODELS.items():
        if rows := [row(compiled) for compiled in shown if compiled["case"][0] == model]:
            sizes = f"{size.clients} clients, {size.steps} steps of {size.batch} images"
            lines += ["", f"### {model}: {sizes} of {size.side} pixels a side", ""]
            lines += [f"| {' | '.join(HEAD)} |", "|---|" + "---:|" * (len(HEAD) - 1)]
            lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines)


def row(compiled: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a case."""
    case = Case(*compiled["case"])
    if compiled["outcome"] != "done":
        why = f"{compiled['outcome']}: {compiled['why']}".replace("|", "/")
        return (case.program, why, *[""] * (len(HEAD) - 2))
    return (
        case.program,
        f"{compiled['trace_seconds']:.1f}",
        f"{compiled['compile_seconds']:.1f}",
        f"{compiled['temporaries'] / 1e6:,.0f}",
        f"{compiled['step_kernels']:,}",
        f"{compiled['step_bytes'] / 1e6:,.0f}",
        f"{compiled['flops'] / compiled['steps'] / 1e9:,.1f}",
        f"{compiled['step_estimate'] * 1e6:,.0f}",
        f"{compiled['outside_of_a_client']:,}" if compiled["outside_of_a_client"] else "-",
        f"{compiled['outside_of_the_steps']:,}",
        f"{compiled['launches']:,}",
    )


def by_kind(compiled: dict[str, Any]) -> str:
    """Returns a table of the kernels of a step by kind."""
    lines = [f"\n{Case(*compiled['case']).name}", ""]
    lines += [
        "| kind | kernels | MB read | MB written | estimate, us |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, (count, received, written, seconds) in compiled.get("kinds", {}).items():
        figures = f"{received / 1e6:,.1f} | {written / 1e6:,.1f} | {seconds * 1e6:,.1f}"
        lines.append(f"| {kind} | {count} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
