"""Times a round on a GPU or TPU under each way to map clients, and beside PyTorch's best loop.

    python benchmarks/accelerator.py --record h100.jsonl
    python benchmarks/accelerator.py --record h100.jsonl --only digit_cnn --seconds 500
    python benchmarks/accelerator.py --record h100.jsonl --compile-at-once 10
    python benchmarks/accelerator.py --record h100.jsonl --fastest --before ../older --seconds 570
    python benchmarks/accelerator.py --record cpu.jsonl --small     # all of it in tiny, on any CPU

`digit_cnn` has 5 and 50 clients, `resnet18` (224x224 pixels) 3 and 30. FedAvg, FedBN and FedIG-A
are timed under `map`, `vmap` and `vmap:n`, in float32 and with all variables and images in
bfloat16, and beside them PyTorch's loop over clients, where PyTorch is installed. `--fastest` times
instead what may be fastest on either side (`cases.CONTENDERS`): FedBN under XLA's options, with the
package of an older checkout (`--before`) and with a profile; PyTorch compiled, and as one CUDA
graph; also in mixed precision. The last column compares with PyTorch's best program in float32, or
in either form of bfloat16.

Every case runs in a process of its own, so that peak memory is measured by case, and a case that
runs out of memory ends no other. After each case the record gets a line with its numbers, or the
reason why they are missing. The same command continues with the cases that are missing or have
failed, and prints the table of all. The status is 1 if a case failed.

`--compile-at-once 10` starts ten processes at once where time on the device is short. They compile
side by side and are timed one after another, when all ten have compiled. Seconds of compilation
and the compiler's choice among kernels, which it times, are then those of a busy machine.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from on_accelerator import profiles
from on_accelerator.cases import COMPILING, PARTS, Case, cases

FOLDER = Path(__file__).parent
LIMIT = 180.0  # seconds of a case, with its start and compilation
TIMED = 2.0  # seconds in which a round is repeated
FINAL = ("done", "out of memory", "too long")  # other outcomes are tried again
# A process whose output has one of these in its last lines ran out of memory.
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "OutOfMemoryError")
DESCRIBE = """
import importlib.util, json, jax
one = jax.devices()[0]
rocm = "rocm" in one.client.platform_version.lower()
platform = {"gpu": "rocm" if rocm else "cuda"}.get(one.platform, one.platform)
torch = None
if importlib.util.find_spec("torch"):
    import torch
    torch = {"version": torch.__version__, "gpu": torch.cuda.is_available()}
print(json.dumps({"platform": platform, "kind": one.device_kind, "jax": jax.__version__} |
    {"torch": torch}))
"""
# Beginning of JAX's `device_kind` -> peak Tflop/s in bfloat16, and in the default format of float32
# products: TF32 if a GPU has it; None if no figure was found. H100 SXM and H200: NVIDIA's as
# tabulated at glennklockwood.com/garden/processors/h100. A100, L4, L40S, T4, V100: as listed by
# dealers (seen 2026-11). TPU: docs.cloud.google.com/tpu/docs/v5e and v6e. All without sparsity:
# check a figure in the maker's own data sheet before you rest a claim on it, and add your chip's.
PEAKS: dict[str, tuple[float | None, float | None]] = {
    "NVIDIA H100 80GB HBM3": (989.4, 494.7),
    "NVIDIA H200": (989.4, 494.7),
    "NVIDIA H200 NVL": (None, None),  # slower; not read
    "NVIDIA A100": (312.0, 156.0),
    "NVIDIA L4": (121.0, 60.0),
    "NVIDIA L40S": (362.0, 183.0),
    "Tesla T4": (None, 8.1),
    "Tesla V100-SXM2": (None, 15.7),
    "TPU v5 lite": (197.0, None),
    "TPU v5e": (197.0, None),
    "TPU v6 lite": (918.0, None),
    "TPU v6e": (918.0, None),
}
HEAD = (
    *("case", "samples/s", "round s [least, most]", "Tflop/s", "of bfloat16 peak"),
    *("of float32 peak", "compile s", "peak MB", "PyTorch / ours"),
)


def main(arguments: list[str] | None = None) -> None:
    """Times what the record lacks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--record", type=Path, required=True, help="file of timings; finished cases are skipped")
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--seconds", type=float, default=1800, help="then it ends; default %(default)s")
    add("--compile-at-once", type=int, default=1, help="cases, timed one by one; default 1")
    add("--fastest", action="store_true", help="what may be fastest, PyTorch's too")
    add("--before", type=Path, help="an older checkout for --fastest, whose package is timed too")
    add("--small", action="store_true", help="tiny sizes, to see on a CPU that everything runs")
    options = parser.parse_args(arguments)
    end, about = time.monotonic() + options.seconds, describe()
    if about["platform"] == "cpu" and not options.small:
        raise SystemExit("JAX finds no accelerator here: install its plug-in, or give --small")
    about = {**about, "small": options.small, "compiled_at_once": options.compile_at_once}
    about["before"] = options.before and str(options.before.resolve())
    done: dict[str, dict[str, Any]] = {part: {} for part in PARTS}  # part -> case -> what was found
    for line in lines_of(options.record, about):
        done[line["part"]][line["case"]] = line["record"]  # the last line of a case counts
    chosen = [case for case in cases(options.fastest, options.small) if case.part in options.only]
    left = [
        case for case in chosen if done[case.part].get(case.name, {}).get("outcome") not in FINAL
    ]
    left.sort(key=lambda case: done[case.part].get(case.name, {}).get("outcome") == "failed")
    while left and time.monotonic() < end:
        batch, left = left[: options.compile_at_once], left[options.compile_at_once :]
        limit = LIMIT if len(batch) == 1 else 2 * LIMIT  # several wait for each other
        limit = min(limit, max(1.0, end - time.monotonic()))
        for case, found in zip(batch, perform_all(batch, about, limit), strict=True):
            done[case.part][case.name] = found
            with options.record.open("a") as file:
                line = {"about": about, "part": case.part, "case": case.name, "record": found}
                file.write(json.dumps(line) + "\n")
            print(
                f"{case.part}, {case.name}: {found['outcome']} {found.get('why', '')}", flush=True
            )
    print(markdown(about, done))
    outcomes = [done[case.part].get(case.name, {}).get("outcome") for case in chosen]
    if left_out := sum(outcome in (None, "left out") for outcome in outcomes):
        counted = f"{left_out} of {len(chosen)} cases"
        print(f"\n{counted} are left out: the same command continues with them")
    if any(one["outcome"] == "failed" for part in done.values() for one in part.values()):
        sys.exit(1)


def lines_of(record: Path | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the lines of a record; ends the command if they are of something else."""
    texts = record.read_text().splitlines() if record and record.exists() else []
    lines = [json.loads(text) for text in texts]
    for line in lines:
        source = line.pop("about")
        if differ := [key for key in about if about[key] != source.get(key)]:
            raise SystemExit(f"{record} has another {', '.join(differ)}: give another --record")
    return lines


def environment(
    about: dict[str, Any] | None = None, checkout: str | Path = FOLDER.parent
) -> dict[str, str]:
    """Returns this process's variables, with the checkout on Python's path and JAX's backend."""
    paths = [str(FOLDER), str(checkout), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if about:  # so JAX reports a missing backend, and does not silently use the CPU
        found["JAX_PLATFORMS"] = ",".join(dict.fromkeys((about["platform"], "cpu")))
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".95"  # by default it takes three quarters
        if about["compiled_at_once"] > 1:  # no process may take all memory at its start
            found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if about["small"]:
            found["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # nearly all of the time is compilation
    return found


def describe() -> dict[str, Any]:
    """Returns device and versions from another process, because a TPU serves one at a time."""
    command = [sys.executable, "-c", DESCRIBE]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"JAX finds no device: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def perform_all(batch: list[Case], about: dict[str, Any], limit: float) -> list[dict[str, Any]]:
    """Runs a process for each case; they compile at once, and are timed one after another."""
    with (
        tempfile.NamedTemporaryFile() as file,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(len(batch)) as pool,
    ):
        turns = [stack.enter_context(open(file.name)) for _ in batch]
        for turn in turns:  # before any process starts, so that none is timed before all compiled
            fcntl.flock(turn, fcntl.LOCK_SH)
        return list(pool.map(lambda *one: perform(*one, about, limit), batch, turns))


def absence(case: Case, about: dict[str, Any]) -> str | None:
    """Returns why a case cannot run here, or None."""
    torch, platform = about["torch"], about["platform"]
    if case.method != "PyTorch":
        if case.variant == "before" and not about["before"]:
            return "no --before"
        return "it has options for GPUs" if case.variant and platform == "tpu" else None
    if torch is None:
        return "PyTorch is not installed"
    if platform != "cpu" and not torch["gpu"]:
        return f"PyTorch {torch['version']} has no device of this kind"
    return "it needs a GPU" if platform == "cpu" and case.clients != "eager" else None


def perform(case: Case, turn: TextIO, about: dict[str, Any], limit: float) -> dict[str, Any]:
    """Times a case in a process; returns its `outcome`, and its numbers or `why` it failed.

    The process inherits the shared lock on the file `turn`, which is closed here, and holds it
    while it compiles (`cases.wait_for_turn`).
    """
    module = "torch_case" if case.method == "PyTorch" else "jax_case"
    timed = 0.1 if about["small"] else TIMED
    checkout = about["before"] if case.variant == "before" else FOLDER.parent
    with turn:
        if why := absence(case, about):
            return {"outcome": "absent", "why": why}
        process = subprocess.Popen(
            [sys.executable, "-m", f"on_accelerator.{module}", json.dumps(case), str(timed)],
            cwd=FOLDER,  # Python looks in the current folder first, which may be a checkout
            env=environment(about if module == "jax_case" else None, checkout),
            stdin=turn,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children too, which are in its group
        process.communicate()
        outcome = "too long" if limit == LIMIT else "left out"  # what is left out is tried again
        return {"outcome": outcome, "why": f"not done in {limit:.0f} s"}
    if not process.returncode:
        return {"outcome": "done", **json.loads(output.splitlines()[-1])}
    lines = [line.strip()[:300] for line in (errors or output).splitlines() if line.strip()]
    for line in reversed(lines):
        if any(sign in line for sign in OUT_OF_MEMORY):
            return {"outcome": "out of memory", "why": line}
    if process.returncode == -signal.SIGALRM:
        return {"outcome": "too long", "why": f"not compiled in {COMPILING} s"}
    if process.returncode == -signal.SIGKILL:
        return {"outcome": "out of memory", "why": "the system killed the process"}
    return {"outcome": "failed", "why": f"status {process.returncode}: {(lines or [''])[-1]}"}


def peak_of(kind: str) -> tuple[float | None, float | None]:
    """Returns the peaks of a device kind by the longest name that fits; (None, None) if unknown."""
    # names match whole words only: an L40S is neither an L40 nor an L4
    fits = [name for name in PEAKS if f"{kind} ".startswith((f"{name} ", f"{name}-"))]
    return PEAKS[max(fits, key=len)] if fits else (None, None)


def markdown(about: dict[str, Any], done: dict[str, dict[str, Any]]) -> str:
    """Returns a table for each part; a case without numbers shows the reason."""
    peaks = peak_of(about["kind"])
    many = about["compiled_at_once"]
    beside = f", compiled {many} at a time" if many > 1 else ""
    lines = [f"# {about['kind']} ({about['platform']}), jax {about['jax']}{beside}", ""]
    kinds = zip(peaks, ("bfloat16", "float32"), strict=True)
    shown = ", ".join(f"{peak:g} Tflop/s in {kind}" for peak, kind in kinds if peak)
    lines += [f"Peak: {shown or 'unknown, so no fractions of it'}."]
    for part, found in done.items():
        if found:
            lines += ["", f"## {part}", "", f"| {' | '.join(HEAD)} |"]
            lines += ["|---|" + "---:|" * (len(HEAD) - 1)]
            lines += [f"| {' | '.join(row(name, found, peaks))} |" for name in found]
            profiled = {name: one for name, one in found.items() if one.get("profile")}
            lines += [profiles.markdown(name, one["profile"]) for name, one in profiled.items()]
    return "\n".join(lines)


def row(name: str, found: dict[str, Any], peaks: tuple) -> tuple[str, ...]:
    """Returns the cells of a case; only FedAvg and FedBN have a ratio to PyTorch's best FedAvg."""
    record = found[name]
    if record["outcome"] != "done":
        why = f"{record['outcome']}: {record['why']}".replace("|", "/")
        return (name, why, *[""] * (len(HEAD) - 2))
    count, method, *_, dtype = name.split()
    theirs = [
        timing["round_seconds"]
        for case, timing in found.items()
        if case.startswith(f"{count} PyTorch ") and timing["outcome"] == "done"
        if case.endswith("float32") == (dtype == "float32")
    ]
    ratio = None
    if method in ("fedavg", "fedbn") and theirs:
        ratio = min(theirs) / record["round_seconds"]
    rate = record.get("teraflops")
    shares = [rate / peak if rate and peak else None for peak in peaks]
    memory = record.get("peak_megabytes") or record.get("planned_megabytes")
    numbers = (rate, *shares, record.get("compile_seconds"), memory, ratio)
    forms = (".1f", ".1%", ".1%", ".1f", ",.0f", ".2f")
    least, median, most = (record[f"{kind}_seconds"] for kind in ("least", "round", "most"))
    return (
        f"{name} ({record['best']})" if "best" in record else name,
        f"{record['samples_per_second']:,.0f}",
        f"{median:.4f} [{least:.4f}, {most:.4f}]",
        *("" if n is None else format(n, form) for n, form in zip(numbers, forms, strict=True)),
    )


if __name__ == "__main__":
    main()
