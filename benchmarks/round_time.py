"""Time of a federated round and of evaluation, beside PyTorch eager in the same run.

    python benchmarks/round_time.py            # a table
    python benchmarks/round_time.py --json     # and one JSON object as the last line

Both programs train the same network on the same batches with the same plain SGD, clients one after
another, and average the models at the end (weights 1/K, everything shared). PyTorch runs at the
best of its settings here: 1 or 2 threads, contiguous or channels_last, found first by a short
trial. The two are then timed in turn, and every ratio is PyTorch's median over ours, so above 1
ours is faster. Needs torch (CPU build), which only this benchmark uses.
"""

import argparse
import copy
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # PyTorch's definitions live there

from fedjax_bn.aggregation import uniform
from fedjax_bn.data.domain import Split
from fedjax_bn.data.pixels.images import standardize
from fedjax_bn.federation import FederatedState
from fedjax_bn.methods import fedavg
from fedjax_bn.models import DigitCNN, ResNet18
from fedjax_bn.run.scoring import score_clients
from fedjax_bn.run.scoring_data import stack_batches

LEARNING_RATE = 0.01


class Task(NamedTuple):
    """A round to time.

    gigaflops: of one training sample forward (a multiplication and an addition are two), counted
      by hand from the layers; training costs three times as much.
    """

    name: str
    model: Any
    side: int
    clients: int
    samples: int
    batch: int
    gigaflops: float


DIGITS = Task("DigitCNN", DigitCNN(), 28, 5, 743, 32, 0.0955)
RESNET = Task("ResNet18", ResNet18(num_classes=10), 64, 3, 128, 16, 0.2956)


def make_batches(task: Task, clients: int | None = None) -> dict[str, np.ndarray]:
    """Random images as bytes, in batches; the last one of an epoch is short."""
    clients = clients or task.clients
    random = np.random.default_rng(0)
    steps = -(-task.samples // task.batch)
    shape = (clients, steps, task.batch)
    image = random.integers(0, 256, (*shape, task.side, task.side, 3), dtype=np.uint8)
    valid = (np.arange(steps * task.batch) < task.samples).reshape(steps, task.batch)
    label = random.integers(0, 10, shape).astype(np.int32)
    return {"image": image, "label": label, "valid": np.broadcast_to(valid, shape)}


def our_round(task: Task, clients: int | None = None) -> tuple[Callable[[], None], float]:
    """Our round as a function without arguments, and the seconds its compilation took."""
    batches = jax.tree.map(jnp.asarray, make_batches(task, clients))
    key = jax.random.key(0)
    method = fedavg(task.model, optax.sgd(LEARNING_RATE), weigh=uniform)

    @jax.jit
    def begin() -> FederatedState:
        variables = task.model.init(key, jnp.zeros((2, task.side, task.side, 3)))
        return method.init(key, variables, len(batches["label"]))

    state = begin()
    start = time.perf_counter()
    compiled = method.round.lower(state, batches, key).compile()
    compile_seconds = time.perf_counter() - start

    def run() -> None:
        nonlocal state
        state, metrics = compiled(state, batches, key)
        jax.block_until_ready((state, metrics))

    return run, compile_seconds


def torch_network(task: Task) -> Any:
    """PyTorch's module for a task; its forward returns (features, logits)."""
    import torch_models

    if task.name == "DigitCNN":
        return torch_models.DigitCNN()
    return torch_models.ResNet(torch_models.BasicBlock, (2, 2, 2, 2))


def their_round(
    task: Task, threads: int, channels_last: bool, steps: int | None = None
) -> Callable[[], None]:
    """PyTorch's loop over clients at one setting, of `steps` steps a client (default: all)."""
    import torch

    layout = torch.channels_last if channels_last else torch.contiguous_format
    server = torch_network(task).to(memory_format=layout)
    batches = make_batches(task)
    images = torch.from_numpy(batches["image"]).permute(0, 1, 2, 5, 3, 4)

    def batch(k: int, s: int) -> tuple[Any, Any]:
        n = int(batches["valid"][k, s].sum())
        labels = torch.from_numpy(batches["label"][k, s, :n]).long()
        return images[k, s, :n].contiguous(memory_format=layout), labels

    data = [[batch(k, s) for s in range(images.shape[1])[:steps]] for k in range(task.clients)]

    def train(client: list[tuple[Any, Any]]) -> dict[str, Any]:
        network = copy.deepcopy(server).train()
        optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE)
        for x, y in client:
            optimizer.zero_grad()
            _, logits = network((x.float() / 255 - 0.5) / 0.5)
            torch.nn.functional.cross_entropy(logits, y).backward()
            optimizer.step()
        return network.state_dict()

    def run() -> None:
        torch.set_num_threads(threads)
        trained = [train(client) for client in data]
        with torch.no_grad():
            for name, value in server.state_dict().items():
                value.copy_(torch.stack([one[name].float() for one in trained]).mean(0))

    return run


SETTINGS = [(threads, last) for threads in (1, os.cpu_count()) for last in (False, True)]


def fastest(runs: dict[tuple, Callable[[], None]]) -> tuple:
    """The setting whose run is fastest, by the minimum of two after a warm-up."""
    times = {}
    for setting, run in runs.items():
        run()
        times[setting] = min(seconds(run) for _ in range(2))
    return min(times, key=times.get)


def seconds(run: Callable[[], None]) -> float:
    """Wall time of one call; a pause before it lets the other program's threads go to sleep."""
    time.sleep(0.3)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(
    name: str, ours: Callable[[], None], theirs: Callable[[], None], repeats: int
) -> tuple[float, float]:
    """Times both in turn, prints median and spread; returns (our median, ratio)."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    a, b = (sorted(column) for column in zip(*pairs, strict=True))
    ratio = median(b) / median(a)
    print(
        f"{name:<36} ours {median(a):7.3f} s [{a[0]:.3f}, {a[-1]:.3f}]   "
        f"PyTorch {median(b):7.3f} s [{b[0]:.3f}, {b[-1]:.3f}]   ratio {ratio:.2f}"
    )
    return median(a), ratio


def compare_rounds(task: Task, repeats: int, rate: float) -> tuple[float, float]:
    """A round of all clients; returns (ratio, compile seconds)."""
    ours, compile_seconds = our_round(task)
    setting = fastest({setting: their_round(task, *setting, steps=2) for setting in SETTINGS})
    theirs = their_round(task, *setting)
    wall, ratio = compare(f"{task.name} round, K={task.clients}", ours, theirs, repeats)
    work = 3 * task.gigaflops * task.clients * task.samples
    print(
        f"    compiled in {compile_seconds:.1f} s; PyTorch at {setting[0]} threads, "
        f"{'channels_last' if setting[1] else 'contiguous'}; "
        f"{work / wall:.0f} Gflop/s of direct convolution, {work / wall / rate:.0%} of the "
        "machine's matrix product"
    )
    return ratio, compile_seconds


def our_evaluation(images: int, batch: int) -> Callable[[], None]:
    """Accuracy of DigitCNN on random images, in batches."""
    method = fedavg(DIGITS.model, optax.sgd(LEARNING_RATE))
    variables = jax.jit(DIGITS.model.init)(jax.random.key(0), jnp.zeros((2, 28, 28, 3)))
    state = method.init(jax.random.key(0), variables, 1)
    data = stack_batches([evaluation_data(images)], batch)
    score = score_clients(DIGITS.model, standardize(), 1)
    return lambda: score(state, data)


def their_evaluation(
    images: int, batch: int, threads: int, channels_last: bool
) -> Callable[[], None]:
    """The same in PyTorch's inference mode at one setting."""
    import torch

    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = torch_network(DIGITS).to(memory_format=layout).eval()
    data = evaluation_data(images)
    pixels, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    pixels = pixels.permute(0, 3, 1, 2).contiguous(memory_format=layout)

    def run() -> None:
        torch.set_num_threads(threads)
        right = 0
        with torch.inference_mode():
            for i in range(0, images, batch):
                _, logits = network((pixels[i : i + batch].float() / 255 - 0.5) / 0.5)
                right += (logits.argmax(1) == labels[i : i + batch]).sum()
        right.item()

    return run


def evaluation_data(images: int) -> Split:
    """Random images and labels."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (images, 28, 28, 3), dtype=np.uint8)
    return Split(pixels, random.integers(0, 10, images).astype(np.int32))


def compare_evaluation(repeats: int, images: int = 10_000, batch: int = 500) -> tuple[float, float]:
    """Accuracy on 10,000 images in the default batches, and beside PyTorch's best batches.

    Returns:
      The ratio where both take the same batches, and where PyTorch takes those that suit it best.
    """
    ours = our_evaluation(images, batch)

    def against(sizes: Sequence[int], name: str) -> float:
        settings = [(size, *setting) for size in sizes for setting in SETTINGS]
        best = fastest({setting: their_evaluation(1_000, *setting) for setting in settings})
        ratio = compare(name, ours, their_evaluation(images, *best), repeats)[1]
        print(
            f"    batches of {batch}; PyTorch of {best[0]} at {best[1]} threads, "
            f"{'channels_last' if best[2] else 'contiguous'}"
        )
        return ratio

    name = f"DigitCNN evaluation, {images:,} images"
    return against([batch], name), against([50, 100, 250], "the same, PyTorch's best batches")


def matrix_rate(size: int = 2048) -> float:
    """Gflop/s of a float32 matrix product of this machine in JAX, the best of ten."""
    a = jnp.ones((size, size))
    product = jax.jit(jnp.dot)
    product(a, a).block_until_ready()
    return (
        2e-9 * size**3 / min(seconds(lambda: product(a, a).block_until_ready()) for _ in range(10))
    )


def scaling(repeats: int) -> None:
    """Time of a round by the number of clients, 96 images each."""
    task = DIGITS._replace(samples=96)
    for clients in (5, 10, 20):
        ours, _ = our_round(task, clients)
        ours()
        wall = median(seconds(ours) for _ in range(repeats))
        print(f"DigitCNN round, K={clients:<3} {wall:7.3f} s, {wall / clients:.3f} s a client")


def peak_memory_mb() -> float:
    """Peak resident memory of a fresh process that runs DigitCNN rounds with K = 5."""
    import resource

    if "--memory" not in sys.argv:
        command = [sys.executable, __file__, "--memory"]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ours, _ = our_round(DIGITS)
    for _ in range(2):
        ours()
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main() -> None:
    """Runs all comparisons and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="timed pairs of each comparison")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(peak_memory_mb())
        return
    memory = peak_memory_mb()  # first: Linux counts the parent's own peak at the fork as well
    rate = matrix_rate()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, "
        f"matrix product {rate:.0f} Gflop/s; median [min, max] of {options.repeats}"
    )
    digits, compile_seconds = compare_rounds(DIGITS, options.repeats, rate)
    resnet, _ = compare_rounds(RESNET, options.repeats, rate)
    evaluation, best_batch = compare_evaluation(options.repeats)
    scaling(3)
    print(f"peak memory of DigitCNN rounds, K=5: {memory:.0f} MB")
    if options.json:
        results = {
            "digit_cnn_ratio": round(digits, 3),
            "resnet18_ratio": round(resnet, 3),
            "evaluation_ratio": round(evaluation, 3),
            "evaluation_ratio_best_batch": round(best_batch, 3),
            "compile_seconds": round(compile_seconds, 2),
            "peak_memory_mb": round(memory, 1),
        }
        print(json.dumps(results))


if __name__ == "__main__":
    main()
