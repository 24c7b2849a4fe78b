"""Time of inference by adaptation, beside plain inference in the same run (FedIG, Table 4).

    python benchmarks/adapter_time.py                        # ResNet-18, 64x64, batches of 64
    python benchmarks/adapter_time.py --size 224 --json      # and one JSON object as the last line

All are timed in turn, each time in another order; a ratio is the median of the repeats' ratios,
[low, high] that median's interval at 95 %. The zero-shot adapter needs passes over every map for
the samples' statistics, and two dense layers a batch norm; the claim is that it costs at most 5 %
more than plain inference with those dense layers in every batch norm, timed as one program.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from scipy import stats

from fedjax_bn import adaptation
from fedjax_bn.models import DigitCNN, ResNet18
from fedjax_bn.models.cpu import in_cache
from fedjax_bn.normalization import Layer, Statistics, normalize_with, running_statistics
from fedjax_bn.normalization.adapter import estimate, with_adapter
from fedjax_bn.normalization.layer import is_spatial

MODELS = {"ResNet18": ResNet18, "DigitCNN": DigitCNN}
TIMED = ("running", "batch", "tsmobn", "fixed_alpha", "iabn", "zero_shot_adapter", "mixnorm")


def main() -> None:
    """Times, prints a table and perhaps JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ResNet18", choices=MODELS)
    parser.add_argument("--size", type=int, default=64, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--inner", type=int, default=1, help="batches in one program")
    parser.add_argument("--only", nargs="*", default=TIMED, choices=TIMED)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    model = MODELS[options.model](num_classes=7)
    key = jax.random.key(0)
    shape = (options.inner, options.batch, options.size, options.size, 3)
    images = jax.random.normal(key, shape)
    variables = jax.jit(lambda x: with_adapter(key, model, model.init(key, x), x))(images[0])
    functions = {name: predict(name, model) for name in options.only}
    functions["running and dense"] = plain_with_dense(model)
    functions["running at once"] = at_once(model)
    report(time_in_turn(functions, variables, images, options.repeats), options)


def predict(name: str, model: ResNet18) -> Callable:
    """One pass by an adaptation, without state."""
    adapt = getattr(adaptation, name)(model)
    return lambda variables, images: adapt.predict(variables, adapt.init(variables), images)[0]


def plain_with_dense(model: ResNet18) -> Callable:
    """Plain inference that runs the two dense layers in every batch norm and ignores the result."""

    def predict(variables: dict, images: jax.Array) -> jax.Array:
        variables = dict(variables)
        adapter = variables.pop("adapter")

        def logits(chunk: jax.Array) -> jax.Array:
            results = []

            def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
                if is_spatial(x):
                    some = x.reshape(len(x), -1)[:, : 2 * x.shape[-1]]
                    results.append(sum(estimate(adapter[layer.name], some)))
                return running_statistics(layer, x, valid)

            with normalize_with(rule):
                y = model.apply(variables, chunk)
            return y + 1e-30 * sum(results)[:, None]  # too little to see, but it must be computed

        return in_cache(logits, images)

    return predict


def at_once(model: ResNet18) -> Callable:
    """Plain inference on the whole batch, not in the chunks that adaptations take on CPU."""

    def predict(variables: dict, images: jax.Array) -> jax.Array:
        plain = {name: tree for name, tree in variables.items() if name != "adapter"}
        return model.apply(plain, images)

    return predict


def time_in_turn(
    functions: dict[str, Callable], variables: dict, images: jax.Array, repeats: int
) -> dict[str, list[float]]:
    """Seconds of one batch by each, `repeats` times; a program takes all of `images`."""

    def loop(function: Callable) -> Callable:
        return jax.jit(lambda variables, images: jax.lax.map(partial(function, variables), images))

    compiled = {name: loop(function) for name, function in functions.items()}
    for run in compiled.values():
        jax.block_until_ready(run(variables, images))
    taken = {name: [] for name in functions}
    order, shuffle = list(compiled.items()), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)  # what ran before leaves the caches in its own state
        for name, run in order:
            start = time.perf_counter()
            jax.block_until_ready(run(variables, images))
            taken[name].append((time.perf_counter() - start) / len(images))
    return taken


def report(taken: dict[str, list[float]], options: argparse.Namespace) -> None:
    """Prints milliseconds, median [least, most], and ratios to plain inference."""
    device = jax.devices()[0]
    print(f"{options.model} {options.size}x{options.size}, batch {options.batch}, {device}")
    ratios = {name: ratio(values, taken["running"]) for name, values in taken.items()}
    for name, values in taken.items():
        middle, low, high = (1e3 * f(values) for f in (statistics.median, min, max))
        times = f"{middle:9.3f} ms [{low:.3f}, {high:.3f}]"
        print(f"{name:<20}{times}   {ratios[name]} of plain")
    if "zero_shot_adapter" in taken:
        ratios["claim"] = ratio(taken["zero_shot_adapter"], taken["running and dense"])
        print(f"adapter / plain with dense layers = {ratios['claim']}")
    if options.json:
        print(json.dumps({"device": str(device), **vars(options), "ratios": ratios}))


class Ratio(NamedTuple):
    """A median and the interval in which it is with 95 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """As it is printed."""
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(values: list[float], to: list[float]) -> Ratio:
    """Median of the ratios, each of two times of one repeat."""
    ratios = np.array(values) / np.array(to)
    interval = stats.quantile_test(ratios).confidence_interval()
    return Ratio(*map(float, (np.median(ratios), interval.low, interval.high)))


if __name__ == "__main__":
    main()
