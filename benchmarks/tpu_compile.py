"""Compiles rounds by the TPU's own compiler, on a machine without a TPU (Linux on x86-64).

    python benchmarks/tpu_compile.py                     # FedBN on DigitCNN, one client at a time
    python benchmarks/tpu_compile.py --method fedbn fedcd --clients map vmap --where 9
    python benchmarks/tpu_compile.py --table --record v5e.jsonl    # all of README's, some hours

The command makes an environment with JAX of its own version and libtpu once (1.6 GB), and compiles
each program there in a process of its own, for a TPU that is described and need not exist. It
prints seconds, memory of a device, collectives, the cycles that the compiler estimates for a round
and for a local step of all clients of a device, the floating-point operations that the network's
definition has, and the share of the chip's peak that both give.

After each program the record gets a line. The same command continues with those that are missing
or have failed. A program that does not compile within the limit, or does not fit into the chip's
memory, is listed as such. The status is 1 if one failed.
"""

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import accelerator
import peers
from fedjax_bn.engine.devices import clients_at_once
from fedjax_bn.run.experiment.method import METHODS
from machine import announce
from on_tpu.cases import MODELS, PRODUCTS, STEPS, TABLE, Case
from on_tpu.chips import Chip, chip_of, devices_of

ROOT = Path(__file__).parents[1]
# So libtpu neither looks for a TPU, nor asks a cloud about one, nor holds other processes off.
ALONE = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
VERSIONS = """
import json, sys
from importlib import metadata
print(json.dumps({name: metadata.version(name) for name in ("jax", "jaxlib", *sys.argv[1:])}))
"""
DTYPES = ("bfloat16", "float32")
DEFAULTS = {
    "model": ["DigitCNN"],
    "method": ["fedbn"],
    "clients": ["map"],
    "dtype": ["bfloat16"],
    "devices": [1],
}
METHOD_HELP = f"any method, or {PRODUCTS}: FedBN's convolutions alone; default: fedbn"
HEAD = (
    *("program", "trace s", "compile s", "arguments MB", "outputs MB", "temporaries MB"),
    *("of memory", "collectives", "cycles of a round", "of a step", "Gflop of a round", "of peak"),
)


def main(arguments: list[str] | None = None) -> None:
    """Compiles what the record lacks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--topology", default="v5e:2x2", help="chip and arrangement; default %(default)s")
    add("--model", nargs="+", choices=MODELS, help="default: DigitCNN")
    add("--method", nargs="+", choices=[*METHODS, PRODUCTS], metavar="METHOD", help=METHOD_HELP)
    add("--clients", nargs="+", help="auto, map, vmap or vmap:at_once=n; default: map")
    add("--dtype", nargs="+", choices=DTYPES, help="of the layers; default: bfloat16")
    add("--devices", nargs="+", type=int, help="over which clients are spread; default: 1")
    add("--table", action="store_true", help="README's programs; the options above choose from it")
    add("--record", type=Path, help="file of results; its programs are not compiled again")
    add("--limit", type=float, default=900, help="seconds of a program; default %(default)s")
    add("--environment", type=Path, default=ROOT / "runs" / "tpu_compile", help="folder; is kept")
    add("--where", type=int, default=0, help="print so many groups of instructions, by cycles")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args(arguments)
    try:
        chosen, chip = cases(options), chip_of(options.topology)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    here = announce(f"programs for {options.topology}; cycles are the compiler's estimate")
    python = environment(options.environment, "tpu", f"jax[tpu]=={metadata.version('jax')}")
    about = {"topology": options.topology, **versions(python, "libtpu")}
    variables = accelerator.environment() | ALONE

    def compile_one(case: Case) -> dict[str, Any]:
        command = [python, "-m", "on_tpu.compiling", json.dumps(case), options.topology]
        return perform(command, variables, options.limit)

    shown = compile_all(chosen, compile_one, options.record, about, options.limit)
    print(markdown(about, chip, shown))
    for one in shown if options.where else ():
        print(largest(one, options.where))
    if options.json:
        print(json.dumps({"machine": here, "about": about, "programs": shown}))
    if any(one["outcome"] == "failed" for one in shown):
        sys.exit(1)


def cases(options: argparse.Namespace) -> list[Case]:
    """Returns the cases that the options choose.

    Raises:
      ValueError: a way to map clients or a number of devices is not possible.
    """
    given = {name: getattr(options, name) for name in DEFAULTS if getattr(options, name)}
    if options.table:
        chosen = [c for c in TABLE if all(getattr(c, name) in given[name] for name in given)]
    else:
        every = itertools.product(*(given.get(name, DEFAULTS[name]) for name in Case._fields))
        chosen = [Case(*values) for values in every]
    most = devices_of(options.topology)
    for case in chosen:
        clients_at_once(case.clients)
        if not 1 <= case.devices <= most:
            raise ValueError(
                f"{options.topology} has no {case.devices} devices: give --devices from 1 to {most}"
            )
    if not chosen:
        raise ValueError("the table has no such program: leave out --table to compile it")
    return chosen


def compile_all(
    chosen: list[Any],
    compile_one: Callable[[Any], dict[str, Any]],
    record: Path | None,
    about: dict[str, str],
    limit: float,
) -> list[dict[str, Any]]:
    """Compiles the cases that the record lacks, writes them there, and returns all."""
    lines = accelerator.lines_of(record, about)
    done = {tuple(line["case"]): line for line in lines}  # of a case the last line counts
    for case in chosen:
        if finished(done.get(case), limit):
            continue
        figures = compile_one(case)
        done[case] = {"case": case, **figures}
        if record:
            with record.open("a") as file:
                file.write(json.dumps({"about": about, **done[case]}) + "\n")
        print(f"{case.name}: {figures['outcome']} {figures.get('why', '')}", flush=True)
    return [done[case] for case in chosen]


def environment(folder: Path, name: str, *compilers: str) -> str:
    """Returns the interpreter of an environment with compilers, made where it is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    program = peers.Program(name, (*compilers, *project["dependencies"]))
    folder = folder.resolve()  # because programs run in another one
    folder.mkdir(parents=True, exist_ok=True)
    path, why = peers.prepare(
        folder, program, sys.executable, lambda _: print(f"making an environment in {folder}")
    )
    if path is None:
        raise SystemExit(
            f"the environment with {compilers[-1]} could not be made (it is there for "
            f"Linux on x86-64): {why}"
        )
    return path


def versions(python: str, compiler: str) -> dict[str, str]:
    """Returns the versions of jax and of a compiler's package in an environment."""
    done = subprocess.run([python, "-c", VERSIONS, compiler], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        raise SystemExit(f"{python} has no {compiler} ({why}): give another --environment")
    return json.loads(done.stdout)


def finished(found: dict[str, Any] | None, limit: float) -> bool:
    """Returns whether a case need not be compiled again; one that took too long may get longer."""
    outcome = found["outcome"] if found else None
    tried = outcome == "too long" and found["limit"] >= limit
    return tried or outcome in ("done", "does not fit")


def perform(command: list[str], variables: dict[str, str], limit: float) -> dict[str, Any]:
    """Runs a process; returns its `outcome`, and its last line's figures or `why` it has none."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT / "benchmarks",  # so that a checkout at hand is not put before the path's
            env=variables,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        why = f"not compiled within {limit:.0f} s"
        return {"outcome": "too long", "why": why, "limit": limit}
    if not done.returncode:
        return json.loads(done.stdout.splitlines()[-1])
    lines = [line.strip()[:300] for line in done.stderr.splitlines() if line.strip()]
    why = "the system killed it" if done.returncode == -signal.SIGKILL else (lines or [""])[-1]
    return {"outcome": "failed", "why": f"status {done.returncode}: {why}"}


def markdown(about: dict[str, str], chip: Chip, done: list[dict[str, Any]]) -> str:
    """Returns a table for each network; a program that was not compiled shows the reason."""
    versions = ", ".join(f"{name} {version}" for name, version in about.items())
    lines = [
        f"{versions}. A program can have {chip.memory / 1e6:,.0f} MB of a device, which does "
        f"{chip.per_cycle:,} operations a cycle at best."
    ]
    for model, size in MODELS.items():
        if found := [one for one in done if one["case"][0] == model]:
            sizes = f"{size.clients} clients, {STEPS} steps of {size.batch} images of {size.side}"
            lines += ["", f"### {model}: {sizes} pixels a side", "", f"| {' | '.join(HEAD)} |"]
            lines += ["|---|" + "---:|" * (len(HEAD) - 1)]
            lines += [f"| {' | '.join(row(one, chip))} |" for one in found]
    return "\n".join(lines)


def largest(found: dict[str, Any], count: int) -> str:
    """Returns the groups of instructions that take most of a round's cycles."""
    lines = [f"\n{Case(*found['case']).name}"]
    groups = found.get("where", ())
    whole = found.get("round_cycles") or sum(spent for _, spent in groups)
    for group, spent in groups[:count]:
        lines.append(f"{spent / whole:7.1%} {spent:15,} {group}")
    return "\n".join(lines)


def row(found: dict[str, Any], chip: Chip) -> tuple[str, ...]:
    """Returns the cells of a case."""
    case = Case(*found["case"])
    if found["outcome"] != "done":
        why = f"{found['outcome']}: {found['why']}".replace("|", "/")
        return (case.program, why, *[""] * (len(HEAD) - 2))
    step = found["step_cycles"]
    if case.method == PRODUCTS:
        cells = ["-", f"{found['compile_seconds']:.1f}", *["-"] * 6]
        return (PRODUCTS, *cells, f"{step:,.0f}", f"{found['flops'] / 1e9:,.1f}", "-")
    held = found["arguments"] + found["outputs"] - found["aliased"] + found["temporaries"]
    collectives = (
        f"{number} {kind}, {size / 1e6:,.1f} MB"
        for kind, (number, size) in found["collectives"].items()
    )
    return (
        case.program,
        f"{found['trace_seconds']:.1f}",
        f"{found['compile_seconds']:.1f}",
        *(f"{found[name] / 1e6:,.1f}" for name in ("arguments", "outputs", "temporaries")),
        f"{held / chip.memory:.1%}",
        "; ".join(collectives) or "-",
        f"{found['round_cycles']:,}",
        f"{step:,.0f}" if step else "-",
        f"{found['flops'] / 1e9:,.1f}",
        f"{found['share_of_peak']:.1%}",
    )


if __name__ == "__main__":
    main()
