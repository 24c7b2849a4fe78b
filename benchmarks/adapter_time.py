"""Time of inference by adaptation, beside plain inference in the same run (FedIG, Table 4).

    python benchmarks/adapter_time.py                        # ResNet-18, 64x64, batches of 64
    python benchmarks/adapter_time.py --size 224 --json      # and one JSON object as the last line

All are timed in turn, each time in another order, and their medians compared. The zero-shot adapter
needs passes over every map for the samples' statistics, and two dense layers a batch norm; the
claim is that it costs at most 5 % more than plain inference and those dense layers, which are timed
by themselves.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_bn import adaptation
from fedjax_bn.models import DigitCNN, ResNet18
from fedjax_bn.normalization.adapter import estimate, with_adapter

MODELS = {"ResNet18": ResNet18, "DigitCNN": DigitCNN}
TIMED = ("running", "batch", "tsmobn", "fixed_alpha", "iabn", "zero_shot_adapter", "mixnorm")


def main() -> None:
    """Times, prints a table and perhaps JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ResNet18", choices=MODELS)
    parser.add_argument("--size", type=int, default=64, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--inner", type=int, default=1, help="passes of one timing")
    parser.add_argument("--only", nargs="*", default=TIMED, choices=TIMED)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    model = MODELS[options.model](num_classes=7)
    key = jax.random.key(0)
    images = jax.random.normal(key, (options.batch, options.size, options.size, 3))
    variables = jax.jit(lambda x: with_adapter(key, model, model.init(key, x), x))(images)
    functions = {name: predict(name, model) for name in options.only}
    functions["dense layers"] = dense_layers
    report(time_in_turn(functions, (variables, images), options.repeats, options.inner), options)


def predict(name: str, model: ResNet18) -> Callable:
    """One pass by an adaptation, without state."""
    adapt = getattr(adaptation, name)(model)
    return lambda variables, images: adapt.predict(variables, adapt.init(variables), images)[0]


def dense_layers(variables: dict, images: jax.Array) -> jax.Array:
    """The two dense layers of every batch norm on random statistics, and nothing else."""
    total = jnp.zeros(len(images))
    for i, layer in enumerate(variables["adapter"].values()):
        width = layer["hidden"]["kernel"].shape[0]
        seed = images.reshape(len(images), -1)[:, i : i + 1]
        delta, epsilon = estimate(layer, jnp.broadcast_to(seed, (len(images), width)))
        total += delta + epsilon
    return total


def time_in_turn(
    functions: dict[str, Callable], arguments: tuple, repeats: int, inner: int
) -> dict[str, list[float]]:
    """Seconds of one call of each, `repeats` times."""
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    for function in compiled.values():
        jax.block_until_ready(function(*arguments))
    taken = {name: [] for name in functions}
    order, shuffle = list(compiled.items()), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)  # what ran before leaves the caches in its own state
        for name, function in order:
            start = time.perf_counter()
            for _ in range(inner):
                result = function(*arguments)
            jax.block_until_ready(result)
            taken[name].append((time.perf_counter() - start) / inner)
    return taken


def report(taken: dict[str, list[float]], options: argparse.Namespace) -> None:
    """Prints milliseconds, median [least, most], and ratios of medians to plain inference."""
    device = jax.devices()[0]
    print(f"{options.model} {options.size}x{options.size}, batch {options.batch}, {device}")
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    for name, value in seconds.items():
        low, high = 1e3 * min(taken[name]), 1e3 * max(taken[name])
        ratio = value / seconds["running"]
        print(f"{name:<20}{1e3 * value:9.3f} ms [{low:.3f}, {high:.3f}]   {ratio:6.3f} of plain")
    if "zero_shot_adapter" in seconds:
        parts = seconds["running"] + seconds["dense layers"]
        ratio = seconds["zero_shot_adapter"] / parts
        print(f"adapter / (plain + dense layers) = {ratio:.3f}")
        seconds["ratio"] = ratio
    if options.json:
        print(json.dumps({"device": str(device), **vars(options), "seconds": seconds}))


if __name__ == "__main__":
    main()
