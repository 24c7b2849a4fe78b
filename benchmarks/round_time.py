"""Times a federated round and evaluation beside PyTorch eager in the same run.

    python benchmarks/round_time.py                          # all parts, at most six minutes
    python benchmarks/round_time.py --quick                  # two parts, at most two minutes
    python benchmarks/round_time.py --only digits --repeats 11 --json
    python benchmarks/round_time.py --only digits resnet unet --clients 4 8
    python benchmarks/round_time.py --only digits resnet --cores 1 2 4 8 16

Both programs train the same network on the same batches with the same plain SGD, and average the
models at the end (weights 1/K, everything shared). Ours trains clients side by side, over host
devices, as `simulate` does; "in turn" is the same on one device. PyTorch has its settings: clients
in turn with all threads, or at once in threads of Python; contiguous or channels_last; in
evaluation several batch sizes. All take turns in short pieces; a setting of PyTorch stops when it
is clearly slower than another. Ratios are PyTorch's wall time over ours: above 1 ours is faster.
The headline is the ratio to PyTorch's fastest setting over all pieces, a choice that by chance
favours PyTorch. Every part runs in a process of its own, with PyTorch in another one, because ours
has a setting of the C library (`training.mesh.divide_cpu`); if a part fails, the others still run
and the status is 1. Needs torch (CPU build).
"""

import argparse
import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fedjax_bn.aggregation import uniform
from fedjax_bn.data.domain import Split
from fedjax_bn.engine.images import standardize
from fedjax_bn.engine.programs import compile_round
from fedjax_bn.methods import fedavg, fedbn
from fedjax_bn.task import classification, segmentation
from fedjax_bn.tasks.detection import detection
from fedjax_bn.training.evaluation.scoring import SplitBatches, score_clients
from fedjax_bn.training.mesh import divide_cpu, side_by_side
from interleave import (
    CONFIDENCE,
    Run,
    Spent,
    fastest,
    figures,
    interleave,
    noise,
    paired_ratio,
    say,
    show,
    spend,
)
from machine import CORES, announce
from tasks import (
    DIGITS,
    LEARNING_RATE,
    RESNET,
    UNET,
    YOLO,
    Task,
    draw_variables,
    make_batches,
    make_test_images,
)

REST = 0.2  # OpenMP's threads spin for up to 0.2 s after their work
OURS, IN_TURN = "ours", "ours, in turn"
TEST_BATCH = 500
PARTS = {"memory": DIGITS._replace(clients=5), "digits": DIGITS, "resnet": RESNET, "unet": UNET}
PARTS |= {"yolo": YOLO, "evaluation": DIGITS}
QUICK = {"only": ["digits", "evaluation"], "repeats": 3, "seconds": 5}


def main() -> None:
    """Runs the chosen parts and prints the results; status 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="*", default=list(PARTS), choices=PARTS, help="default: all")
    add("--repeats", type=int, default=5, help="least pieces of a program; default %(default)s")
    add("--seconds", type=float, default=16, help="pieces of a part go on for; default %(default)s")
    add("--quick", action="store_true", help="parts digits and evaluation, fewer pieces")
    add("--clients", type=int, nargs="+", help="numbers of clients; default: the task's own")
    add("--cores", type=int, nargs="+", default=[CORES], help="numbers of cores; default: all")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    here = announce(
        "fedjax_bn (ours) and PyTorch eager, all settings in turn; ratio = PyTorch / ours, of "
        f"medians [{CONFIDENCE:.0%} interval], above 1 ours is faster; user and system are medians "
        "of CPU seconds on all cores",
        "torch",
    )
    rows, failures = run_parts(options)
    print("\n" + table(rows))
    for row in rows:
        if "noise" in row:
            print(f"{row['part']}: {row['noise']['sentence']}")
    for failure in failures:
        print(f"failed: {failure}")
    if options.json:
        print(json.dumps({"machine": here, "results": rows, "failures": failures}))
    sys.exit(bool(failures))


def run_parts(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns a row of results for each program that ran, and why others failed."""
    rows, failures = [], []
    cases = [
        (part, task._replace(clients=clients), cores)
        for part, task in PARTS.items()
        if part in options.only
        for clients in options.clients or [task.clients]
        for cores in options.cores
    ]
    for number, (part, task, cores) in enumerate(cases, 1):
        row = {"part": part, "clients": task.clients, "cores": cores}
        title = f"{part}, {task.clients} clients, {cores} cores"
        say(f"{number} of {len(cases)}: {title}")
        devices = side_by_side(task.clients, cores)
        try:
            if part == "memory":
                row["megabytes"] = apart(cores, devices, peak_memory, task)
                row["in_turn_megabytes"] = apart(cores, 1, peak_memory, task)
            else:
                measure = compare_evaluations if part == "evaluation" else compare_rounds
                row |= apart(cores, devices, measure, task, options.repeats, options.seconds)
            rows.append(row)
        except Exception as error:  # whatever it is, the other programs still run
            failures.append(f"{title}: {[type(error).__name__, *str(error).splitlines()][-1]}")
    return rows, failures


def apart(cores: int, devices: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns a function's result, computed in a new process with these cores and host devices."""
    if cores < CORES:  # the process inherits them before JAX and PyTorch count them
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(allowed)[:cores])
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), configure, (devices,)) as pool:
            return pool.submit(function, *arguments).result()
    finally:
        if cores < CORES:
            os.sched_setaffinity(0, allowed)


def configure(devices: int) -> None:
    """Gives JAX its devices before it starts, as `simulate` does."""
    jax.config.update("jax_platforms", "cpu")
    divide_cpu(devices, 0, devices)
    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured


def compare_rounds(task: Task, repeats: int, seconds: float) -> dict[str, Any]:
    """Times a round beside PyTorch's; returns the ratios and all figures."""
    print(f"\n{task.name} round, {task.clients} clients of {task.samples} images", flush=True)
    runs, compilation = {}, {}
    for name, mesh in meshes(task).items():
        say(f"  compiling {name}")
        jax.clear_caches()
        runs[name], spent = our_round(task, mesh)
        cpu = spent.user + spent.system
        compilation[name] = {"wall": spent.wall, "cpu": cpu}
        print(f"{name}: traced and compiled once in {spent.wall:.1f} s, {cpu:.1f} s of CPU")
    with beside(torch_rounds, task) as (in_turn, at_once):
        row = compare(runs, in_turn, at_once, repeats, seconds)
    gigaflop = 3 * task.gigaflops * task.clients * task.samples
    print(f"{gigaflop / row['seconds']:.0f} Gflop/s of direct convolution", flush=True)
    return row | {"compilation": compilation}


def compare_evaluations(
    task: Task, repeats: int, seconds: float, images: int = 500
) -> dict[str, Any]:
    """Times the evaluation of clients' own models beside PyTorch's in several batch sizes."""
    print(f"\n{task.name} evaluation, {task.clients} clients of {images} images", flush=True)
    runs = {name: our_evaluation(task, mesh, images) for name, mesh in meshes(task).items()}
    with beside(torch_evaluations, task, images) as (in_turn, at_once):
        return compare(runs, in_turn, at_once, repeats, seconds)


Groups = tuple[Mapping[str, Run], ...]  # of programs by name
_here: dict[str, Run] = {}  # the programs that `beside` made in this process


@contextmanager
def beside(make: Callable[..., Groups], *arguments: Any) -> Iterator[Groups]:
    """Yields the programs of `make(*arguments)`, which run and are timed in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:

        def elsewhere(name: str) -> Run:
            return lambda: pool.submit(_spend_here, name).result()

        groups = pool.submit(_make_here, make, *arguments).result()
        yield tuple({name: elsewhere(name) for name in names} for names in groups)


def _make_here(make: Callable[..., Groups], *arguments: Any) -> list[list[str]]:
    groups = make(*arguments)
    for programs in groups:
        _here.update(programs)
    return [list(programs) for programs in groups]


def _spend_here(name: str) -> Spent:
    return spend(_here[name])


def torch_rounds(task: Task) -> Groups:
    """Returns PyTorch's rounds with clients in turn, and at once."""
    import in_torch  # not in the processes of our programs

    kinds = (in_torch.settings(task.clients, at_once=at_once) for at_once in (False, True))
    return tuple(in_torch.rounds(task, settings) for settings in kinds)


def torch_evaluations(task: Task, images: int) -> Groups:
    """Returns PyTorch's evaluations with clients in turn, and at once."""
    import in_torch

    kinds = (in_torch.settings(task.clients, at_once=at_once) for at_once in (False, True))
    return tuple(in_torch.evaluations(task, images, settings) for settings in kinds)


def compare(
    runs: Mapping[str, Run],
    in_turn: Mapping[str, Run],
    at_once: Mapping[str, Run],
    repeats: int,
    seconds: float,
) -> dict[str, Any]:
    """Times our programs and PyTorch's, prints and returns the ratios and all figures."""
    rivals = [group for group in (in_turn, at_once) if group]
    programs = {**runs, **in_turn, **at_once}
    samples = interleave(programs, repeats, seconds=seconds, rivals=rivals, rest=REST)
    show(samples, OURS)
    best, best_in_turn = fastest(samples, [*in_turn, *at_once]), fastest(samples, in_turn)
    ratios = {
        "ratio": (best, OURS),
        "ratio_of_pytorch_in_turn": (best_in_turn, OURS),
        "ratio_both_in_turn": (best_in_turn, IN_TURN),
    }
    if IN_TURN not in runs:
        del ratios["ratio_both_in_turn"]
    row: dict[str, Any] = {"pytorch": best, "noise": noise(samples)}
    for name, (numerator, denominator) in ratios.items():
        ratio = paired_ratio(samples[numerator], samples[denominator])
        print(f"=> {numerator} / {denominator}: {ratio}")
        row[name] = ratio._asdict()
    for name, program in (("", OURS), ("pytorch_", best)):
        wall, *cpu = map(np.median, samples[program])
        row |= {f"{name}seconds": float(wall), f"{name}cpu_seconds": float(sum(cpu))}
    return row | {"programs": figures(samples, OURS)}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the results as a table in Markdown."""
    lines = [
        "| part, clients, cores | ours, ms | PyTorch, ms | ratio | of least pieces "
        "| PyTorch's clients in turn | both in turn | CPU s | PyTorch, CPU s | compile, s |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [f"{row['part']}, {row['clients']}, {row['cores']}"]
        if "ratio" in row:
            ratio = row["ratio"]
            interval = f" [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio["low"] else ""
            both, compilation = row.get("ratio_both_in_turn"), row.get("compilation", {}).get(OURS)
            cells += [
                f"{1e3 * row['seconds']:,.0f}",
                f"{1e3 * row['pytorch_seconds']:,.0f}",
                f"{ratio['of_medians']:.2f}{interval}",
                f"{ratio['of_least']:.2f}",
                f"{row['ratio_of_pytorch_in_turn']['of_medians']:.2f}",
                f"{both['of_medians']:.2f}" if both else "",
                f"{row['cpu_seconds']:.2f}",
                f"{row['pytorch_cpu_seconds']:.2f}",
                f"{compilation['wall']:.1f}" if compilation else "",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        f"peak memory of DigitCNN, {row['clients']} clients, {row['cores']} cores: "
        f"{row['megabytes']:,.0f} MB, in turn {row['in_turn_megabytes']:,.0f} MB"
        for row in rows
        if "megabytes" in row
    ]
    return "\n".join(lines)


def peak_memory(task: Task) -> float:
    """Returns the peak memory of this process in MB, after two rounds."""
    run, _ = our_round(task, meshes(task)[OURS])
    for _ in range(2):
        run()
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def meshes(task: Task) -> dict[str, Mesh | None]:
    """Returns the name of our program -> its mesh: in turn on one device, and over all devices."""
    devices = np.array(jax.devices()[: side_by_side(task.clients, CORES)])
    if len(devices) == 1:
        return {OURS: None}
    in_turn = {} if task.name == YOLO.name else {IN_TURN: None}  # YOLO compiles for half a minute
    return in_turn | {OURS: Mesh(devices, ("clients",))}


def our_round(task: Task, mesh: Mesh | None) -> tuple[Run, Spent]:
    """Returns a call of our round, and the seconds of tracing and compiling it (see `spend`)."""
    learned, prepare = classification(), standardize()
    if task.name == UNET.name:
        learned = segmentation(2)
    elif task.name == YOLO.name:
        learned, prepare = detection(task.model.anchors), standardize(0.0, 1.0)
    method = fedavg(
        task.model,
        optax.sgd(LEARNING_RATE),
        task=learned,
        prepare=prepare,
        weigh=uniform,
        mesh=mesh,
    )
    batches, key = jax.tree.map(jnp.asarray, make_batches(task)), jax.random.key(0)
    state = method.init(key, draw_variables(task), task.clients)
    programs: list[Any] = []
    traced = method.round.trace
    spent = spend(lambda: programs.append(compile_round(traced(state, batches, key))))
    placed = jax.device_put((state, batches, key), programs[0].input_shardings[0])
    state, batches, key = placed

    def run() -> None:
        nonlocal state
        state, metrics = programs[0](state, batches, key)
        jax.block_until_ready((state, metrics))

    return run, spent


def our_evaluation(task: Task, mesh: Mesh | None, images: int) -> Run:
    """Returns a call that computes the accuracy of each client's model on its images."""
    method = fedbn(task.model, optax.sgd(LEARNING_RATE), mesh=mesh)
    state = method.init(jax.random.key(0), draw_variables(task), task.clients)
    split = Split(*make_test_images(task, images))
    data = SplitBatches([split] * task.clients, TEST_BATCH, mesh).all_at_once()
    score = score_clients(task.model, standardize(), task.clients, mesh=mesh)
    return lambda: score(state, data)


if __name__ == "__main__":
    main()
