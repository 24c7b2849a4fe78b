"""Times a federated round and evaluation beside PyTorch eager in the same run.

    python benchmarks/round_time.py                          # all parts, a quarter of an hour
    python benchmarks/round_time.py --quick                  # rounds alone, some two minutes
    python benchmarks/round_time.py --only digits --repeats 40 --json
    python benchmarks/round_time.py --only unet              # FedBN, segmentation

Both programs train the same network on the same batches with the same plain SGD, clients one after
another, and average the models at the end (weights 1/K, everything shared). Ours and PyTorch at
each of its settings (1 or all threads; contiguous or channels_last; in evaluation several batch
sizes) take turns in short pieces. Ratios are PyTorch's wall time over ours: above 1 ours is faster.
The headline is the ratio to PyTorch's fastest setting over all pieces, a choice that by chance
favours PyTorch. Needs torch (CPU build).
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import uniform
from fedjax_bn.data.domain import Split
from fedjax_bn.engine.images import standardize
from fedjax_bn.methods import fedavg, fedbn
from fedjax_bn.task import classification, segmentation
from fedjax_bn.training.evaluation.scoring import SplitBatches, score_clients
from interleave import (
    CONFIDENCE,
    FEWEST,
    Samples,
    conclude,
    fastest,
    figures,
    interleave,
    paired_ratio,
    say,
    show,
    spend,
)
from machine import announce
from tasks import DIGITS, LEARNING_RATE, RESNET, UNET, Task, make_batches, make_test_images

REST = 0.3  # OpenMP's threads spin for up to 0.2 s after their work


def main() -> None:
    """Runs the chosen parts and prints the results; status 1 if no ratio could be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--repeats", type=int, default=15, help="pieces of each program; default %(default)s")
    add("--only", nargs="*", default=list(PARTS), choices=PARTS, help="default: all")
    add("--samples", type=int, help="images of a client in a round; default: the task's own")
    add("--quick", action="store_true", help="parts digits and resnet, few images and pieces")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    if options.quick:
        options.only, options.repeats, options.samples = ["digits", "resnet"], FEWEST, 32
    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured
    here = announce(
        "DigitCNN, ResNet18 and UNet in fedjax_bn (ours) and PyTorch eager, all settings in turn; "
        f"ratio = PyTorch / ours: median of pairs [{CONFIDENCE:.0%} interval], above 1 ours is "
        "faster; user and system are medians of CPU seconds on all cores",
        "torch",
    )
    results: dict[str, Any] = {}
    parts = [part for part in PARTS if part in options.only]
    for number, part in enumerate(parts, 1):
        say(f"part {number} of {len(parts)}: {part}")
        results |= PARTS[part](options)
    if options.json:
        print(json.dumps({"machine": here, "repeats": options.repeats, **results}))
    ratios = [value for name, value in results.items() if name.endswith("_ratio")]
    if ratios and all(ratio is None for ratio in ratios):
        sys.exit(1)


def compare_rounds(task: Task, label: str, options: argparse.Namespace) -> dict[str, Any]:
    """Times a round beside PyTorch's."""
    import in_torch  # here, because torch must not count into `peak_memory`

    task = task._replace(samples=options.samples or task.samples)
    print(f"\n{task.name} round, {task.clients} clients of {task.samples} images", flush=True)
    compile_round, repeat = our_round(task)
    times = 1 if options.quick else 3
    spent = []
    for number in range(1, times + 1):
        say(f"  compiling, {number} of {times}")
        jax.clear_caches()
        spent.append(spend(compile_round))
    wall, cpu = min(wall for wall, _, _ in spent), min(user + system for _, user, system in spent)
    print(f"compiled in {wall:.1f} s, {cpu:.1f} s of CPU, the least of {times}", flush=True)
    runs = {"ours": repeat(compile_round())} | in_torch.rounds(task)
    samples = interleave(runs, options.repeats, rest=REST)
    show(samples, "ours")
    ratio = headline(samples, [name for name in samples if name != "ours"])
    show_rate(3 * task.gigaflops * task.clients * task.samples, samples["ours"])
    return {
        f"{label}_ratio": ratio,
        f"{label}_compile_seconds": round(wall, 2),
        f"{label}_compile_cpu_seconds": round(cpu, 2),
        f"{label}_round": figures(samples, "ours"),
    }


def evaluation(options: argparse.Namespace, images: int = 1_000, batch: int = 500) -> dict:
    """Times DigitCNN's evaluation in batches of `batch`, and PyTorch's in several batch sizes."""
    import in_torch

    print(f"\nDigitCNN evaluation, {images:,} images, ours in batches of {batch}")
    theirs = in_torch.evaluations(DIGITS, images, (50, 100, 250, batch))
    runs = {name: run for by_setting in theirs.values() for name, run in by_setting.items()}
    runs["ours"] = our_evaluation(DIGITS, images, batch)
    samples = interleave(runs, options.repeats, rest=REST)
    show(samples, "ours")
    same = headline(samples, theirs[batch])
    best = headline(samples, [name for name in samples if name != "ours"])
    return {
        "evaluation_ratio": same,
        "evaluation_best_batch_ratio": best,
        "evaluation": figures(samples, "ours"),
    }


def headline(samples: Mapping[str, Samples], names: Iterable[str]) -> float | None:
    """Prints the ratio of the fastest of `names` to ours; returns it, None if not measured."""
    best = fastest(samples, names)
    ratio = paired_ratio(samples[best], samples["ours"])
    conclude(f"{best} / ours", ratio)
    return round(ratio.median, 3) if ratio.measured else None


def show_rate(gigaflop: float, ours: Samples, size: int = 2048) -> None:
    """Prints our Gflop/s, and those of a plain float32 matrix product on this machine."""
    a, product = jnp.ones((size, size)), jax.jit(jnp.dot)
    taken = interleave({"product": lambda: product(a, a).block_until_ready()}, 10)["product"]
    machine, rate = 2e-9 * size**3 / taken.wall.min(), gigaflop / ours.wall.min()
    print(f"{rate:.0f} Gflop/s of direct convolution at best; matrix product {machine:.0f} Gflop/s")


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the peak memory of a fresh process that runs DigitCNN rounds with K = 5."""
    del options
    command = [sys.executable, __file__, "peak-memory"]
    peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"\npeak memory of DigitCNN rounds, K=5: {peak:.0f} MB")
    return {"peak_memory_mb": round(peak, 1)}


def peak_memory() -> float:
    """Returns the peak memory of this process in MB, after two rounds."""
    compile_round, repeat = our_round(DIGITS._replace(clients=5))
    run = repeat(compile_round())
    for _ in range(2):
        run()
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def our_round(task: Task) -> tuple[Callable[[], Any], Callable[[Any], Callable[[], None]]]:
    """Returns `compile_round() -> compiled`, `repeat(compiled) -> run`; `run()` makes our round."""
    batches = jax.tree.map(jnp.asarray, make_batches(task))
    key = jax.random.key(0)
    variables = jax.jit(task.model.init)(key, jnp.zeros((2, task.side, task.side, 3)))
    masks = task.name == UNET.name
    kind, learned = (fedbn, segmentation(2)) if masks else (fedavg, classification())
    method = kind(task.model, optax.sgd(LEARNING_RATE), task=learned, weigh=uniform)
    state = method.init(key, variables, task.clients)

    def compile_round() -> Any:
        return method.round.lower(state, batches, key).compile()

    def repeat(compiled: Any) -> Callable[[], None]:
        def run() -> None:
            nonlocal state
            state, metrics = compiled(state, batches, key)
            jax.block_until_ready((state, metrics))

        return run

    return compile_round, repeat


def our_evaluation(task: Task, images: int, batch: int) -> Callable[[], object]:
    """Returns a call that computes our accuracy on random images, in batches."""
    key = jax.random.key(0)
    variables = jax.jit(task.model.init)(key, jnp.zeros((2, task.side, task.side, 3)))
    state = fedavg(task.model, optax.sgd(LEARNING_RATE)).init(key, variables, 1)
    data = SplitBatches([Split(*make_test_images(task, images))], batch).all_at_once()
    score = score_clients(task.model, standardize(), 1)
    return lambda: score(state, data)


# Memory first: on Linux a child's peak includes the parent's memory at the fork.
PARTS = {
    "memory": memory,
    "digits": partial(compare_rounds, DIGITS, "digit_cnn"),
    "unet": partial(compare_rounds, UNET, "unet"),
    "resnet": partial(compare_rounds, RESNET, "resnet18"),
    "evaluation": evaluation,
}

if __name__ == "__main__":
    if sys.argv[1:] == ["peak-memory"]:
        print(peak_memory())
    else:
        main()
