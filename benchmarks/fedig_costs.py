"""Measures FedIG's Table 4: parameters, and times of a training step and of inference, by method.

    python benchmarks/fedig_costs.py                         # ResNet-18, 64x64, batches of 64
    python benchmarks/fedig_costs.py --only inference --repeats 200
    python benchmarks/fedig_costs.py --size 224 --json       # and one JSON object as the last line

A training step is a local step within a round of one client, as the library runs it; FedIG-A's
includes the step of its adapter. Inference takes one batch by the method's own adaptation; MixNorm
has five views of each image. All methods are timed in turn (see `interleave`), beside the paper's
numbers (a single RTX A5000, batches of 64, images of 224x224 by its protocol). The paper prints
11.31M parameters, but a ResNet-18 of 7 classes has 11.18M; only the parameters that an adapter adds
can be compared.

The zero-shot adapter passes over every map for the samples' statistics, and has two dense layers
for each batch norm. The claim is that it costs at most 5 % more than plain inference with those
dense layers in every batch norm, timed as one program.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn import adaptation, methods
from fedjax_bn.federation import FederatedMethod, client_variables, global_variables
from fedjax_bn.models import DigitCNN, ResNet18, SmallCNN
from fedjax_bn.models.cpu import in_cache
from fedjax_bn.normalization import Layer, Statistics, normalize_with, running_statistics
from fedjax_bn.normalization.adapter import estimate
from fedjax_bn.normalization.layer import is_spatial
from interleave import Samples, conclude, interleave, paired_ratio, show
from machine import announce

MODELS = {"ResNet18": ResNet18, "DigitCNN": DigitCNN, "SmallCNN": SmallCNN}
CLASSES = 7


class Row(NamedTuple):
    """A row of Table 4."""

    training: str  # its method in `methods_of`
    inference: str  # its adaptation
    parameters: float  # millions
    trained: float  # ms
    inferred: float  # ms
    accuracy: float  # percent


ROWS = {
    "FedAvg": Row("fedavg", "running", 11.31, 1.43, 1.34, 77.35),
    "FedBN": Row("fedbn", "running", 11.31, 1.43, 1.34, 80.79),
    "FedIG": Row("fedig", "running", 11.31, 2.25, 1.34, 84.07),
    "BIN w/ MixIG": Row("bin", "learned_alpha", 11.31, 3.24, 1.35, 83.54),
    "FedIG w/ MixNorm": Row("fedig", "mixnorm", 11.31, 2.25, 6.70, 84.45),
    "FedIG w/ IABN": Row("fedig", "iabn", 11.31, 2.25, 1.57, 84.11),
    "FedIG-A": Row("fediga", "zero_shot_adapter", 11.53, 3.50, 1.37, 85.53),
}


def main() -> None:
    """Times all methods, and prints a table, and JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="ResNet18", choices=MODELS)
    add("--size", type=int, default=64, help="side of the images, pixels")
    add("--batch", type=int, default=64)
    add("--steps", type=int, default=2, help="of one timed round")
    add("--repeats", type=int, default=20)
    add("--only", choices=("training", "inference"), help="default: both")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    here = announce(
        f"{options.model} {options.size}x{options.size}, batches of {options.batch}: a training "
        f"step and inference of FedIG's Table 4, on {jax.devices()[0]}"
    )
    model, key = MODELS[options.model](num_classes=CLASSES), jax.random.key(0)
    lead = (1, options.steps, options.batch)
    batches = {
        "image": jax.random.normal(key, (*lead, options.size, options.size, 3)),
        "label": jax.random.randint(key, lead, 0, CLASSES),
        "valid": jnp.ones(lead, bool),
    }
    images = batches["image"][0, 0]
    variables = jax.jit(model.init)(key, images)
    trained = methods_of(model)
    states = {name: method.init(key, variables, 1) for name, method in trained.items()}
    taken: dict[str, dict[str, Samples]] = {"training": {}, "inference": {}}
    if options.only != "inference":
        print("\na training step")
        rounds = {
            name: timed(method.round, states[name], batches, key)
            for name, method in trained.items()
        }
        steps = interleave(rounds, options.repeats)
        steps = {name: samples.per(options.steps) for name, samples in steps.items()}
        show(steps, "fedavg")
        taken["training"] = {label: steps[row.training] for label, row in ROWS.items()}
    if options.only != "training":
        print("\ninference")
        taken["inference"] = inference(model, states, images, options.repeats)
    results = {
        label: {
            "parameters": sum(
                leaf[0].size
                for name, tree in client_variables(states[row.training]).items()
                if name != "batch_stats"
                for leaf in jax.tree.leaves(tree)
            ),
            **{kind: summary(own, label) for kind, own in taken.items() if own},
            "published": row._asdict(),
        }
        for label, row in ROWS.items()
    }
    print(table(results))
    if options.json:
        print(json.dumps({"machine": here, **vars(options), "rows": results}))


def methods_of(model: Any) -> dict[str, FederatedMethod]:
    """Returns the methods that Table 4 trains, with the paper's optimizer."""
    given = {"prepare": lambda images, dtype: images.astype(dtype)}
    optimizer = optax.sgd(0.01, 0.5)
    return {
        "fedavg": methods.fedavg(model, optimizer, **given),
        "fedbn": methods.fedbn(model, optimizer, **given),
        "fedig": methods.fedig(model, optimizer, cafl="mean", **given),
        "bin": methods.fedig(model, optimizer, cafl="mean", gates=True, **given),
        "fediga": methods.fediga(model, optimizer, cafl="mean", **given),
    }


def timed(function: Callable, *arguments: Any) -> Callable[[], object]:
    """Returns a call of the compiled function that waits for its results."""
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*arguments))


def inference(
    model: Any, states: dict[str, Any], images: jax.Array, repeats: int
) -> dict[str, Samples]:
    """Times inference of a batch by each row's adaptation, and by two programs for comparison.

    "with dense layers" also runs the adapter's two dense layers in every batch norm and ignores
    their results; "at once" is plain inference of the whole batch, which adaptations divide.
    """

    def with_dense(variables: dict, images: jax.Array) -> jax.Array:
        plain = {name: tree for name, tree in variables.items() if name != "adapter"}

        def logits(chunk: jax.Array) -> jax.Array:
            results = []

            def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
                if is_spatial(x):
                    some = x.reshape(len(x), -1)[:, : 2 * x.shape[-1]]
                    results.append(sum(estimate(variables["adapter"][layer.name], some)))
                return running_statistics(layer, x, valid)

            with normalize_with(rule):
                y = model.apply(plain, chunk)
            return y + 1e-30 * sum(results)[:, None]  # negligible, but XLA cannot drop it as unused

        return in_cache(logits, images)

    passes = {}
    for label, row in ROWS.items():
        adapt = getattr(adaptation, row.inference)(model)
        variables = global_variables(states[row.training])
        passes[label] = timed(
            lambda v, x, adapt=adapt: adapt.predict(v, adapt.init(v), x)[0], variables, images
        )
    passes["with dense layers"] = timed(with_dense, variables, images)  # FedIG-A's, the last row's
    passes["at once"] = timed(model.apply, global_variables(states["fedavg"]), images)
    taken = interleave(passes, repeats)
    show(taken, "FedAvg")
    claim = paired_ratio(taken["FedIG-A"], taken["with dense layers"])
    conclude("adapter / plain with dense layers (at most 1.05)", claim)
    return taken


def summary(samples: dict[str, Samples], label: str) -> dict[str, float]:
    """Returns the least and the median milliseconds, and their ratio to FedAvg's."""
    ratio, own = paired_ratio(samples[label], samples["FedAvg"]), 1000 * samples[label].wall
    return {
        "least_ms": float(own.min()),
        "median_ms": float(sorted(own)[len(own) // 2]),
        "ratio": ratio.of_medians,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns parameters, and times as multiples of FedAvg's, beside the paper's."""
    base = ROWS["FedAvg"]
    lines = ["\nmethod              parameters  paper   training  paper   inference  paper"]
    for label, row in ROWS.items():
        found = results[label]
        ratios = [found.get(kind, {}).get("ratio") for kind in ("training", "inference")]
        trained, inferred = ("   -" if ratio is None else f"{ratio:4.2f}" for ratio in ratios)
        lines.append(
            f"{label:18}  {found['parameters'] / 1e6:8.2f}M  {row.parameters:.2f}M  "
            f"{trained:>7}x  {row.trained / base.trained:4.2f}x  "
            f"{inferred:>8}x  {row.inferred / base.inferred:4.2f}x"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
