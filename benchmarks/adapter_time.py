"""Time of inference by adaptation, beside plain inference in the same run (FedIG, Table 4).

    python benchmarks/adapter_time.py                        # ResNet-18, 64x64, batches of 64
    python benchmarks/adapter_time.py --size 224 --json      # and one JSON object as the last line

All are timed in turn (see `interleave`). The zero-shot adapter needs passes over every map for
the samples' statistics, and two dense layers a batch norm; the claim is that it costs at most 5 %
more than plain inference with those dense layers in every batch norm, timed as one program.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from fedjax_bn import adaptation
from fedjax_bn.models import DigitCNN, ResNet18
from fedjax_bn.models.cpu import in_cache
from fedjax_bn.normalization import Layer, Statistics, normalize_with, running_statistics
from fedjax_bn.normalization.adapter import estimate, with_adapter
from fedjax_bn.normalization.layer import is_spatial
from interleave import Samples, conclude, figures, interleave, paired_ratio, show
from machine import announce

MODELS = {"ResNet18": ResNet18, "DigitCNN": DigitCNN}
TIMED = ("running", "batch", "tsmobn", "fixed_alpha", "iabn", "zero_shot_adapter", "mixnorm")


def main() -> None:
    """Times, prints a table, and JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet18", choices=MODELS)
    parser.add_argument("--size", type=int, default=64, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--inner", type=int, default=1, help="batches in one program")
    parser.add_argument("--only", nargs="*", default=TIMED, choices=TIMED)
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    here = announce(
        f"{options.model} {options.size}x{options.size}, batches of {options.batch}: inference by "
        f"adaptation beside plain inference (running), on {jax.devices()[0]}",
    )

    model = MODELS[options.model](num_classes=7)
    key = jax.random.key(0)
    shape = (options.inner, options.batch, options.size, options.size, 3)
    images = jax.random.normal(key, shape)
    variables = jax.jit(lambda x: with_adapter(key, model, model.init(key, x), x))(images[0])
    functions = {name: predict(name, model) for name in dict.fromkeys(("running", *options.only))}
    functions["running and dense"] = plain_with_dense(model)
    functions["running at once"] = at_once(model)
    results = report(time_in_turn(functions, variables, images, options.repeats))
    if options.json:
        print(json.dumps({"machine": here, **vars(options), "results": results}))


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
) -> dict[str, Samples]:
    """Times of one batch by each; a program takes all of `images`."""

    def loop(function: Callable) -> Callable[[], object]:
        run = jax.jit(lambda variables, images: jax.lax.map(partial(function, variables), images))
        return lambda: jax.block_until_ready(run(variables, images))

    runs = {name: loop(function) for name, function in functions.items()}
    taken = interleave(runs, repeats)
    return {name: samples.per(len(images)) for name, samples in taken.items()}


def report(taken: dict[str, Samples]) -> dict[str, Any]:
    """Prints times and ratios to plain inference; returns them for JSON."""
    show(taken, "running")
    results = figures(taken, "running")
    if "zero_shot_adapter" in taken:
        claim = paired_ratio(taken["zero_shot_adapter"], taken["running and dense"])
        conclude("adapter / plain with dense layers", claim)
        results["claim"] = claim.figures()
    return results


if __name__ == "__main__":
    main()
