"""FedIG's Table 4: parameters, time of a training step and of inference, method by method.

    python benchmarks/fedig_costs.py                         # ResNet-18, 64x64, batches of 64
    python benchmarks/fedig_costs.py --size 224 --json       # and one JSON object as the last line

A training step is a local step within a round of one client, as the library runs it, FedIG-A's with
the step of its adapter after it. Inference is of one batch by the method's own adaptation; MixNorm
has five views of each image. All are timed in turn (see `interleave`), and beside them stand the
paper's numbers (a single RTX A5000, batches of 64, images of 224x224 by its protocol). Its
11.31M parameters are not those of a ResNet-18 of 7 classes, which has 11.18M; what compares is what
an adapter adds.
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
from interleave import Samples, interleave, paired_ratio, show
from machine import announce

MODELS = {"ResNet18": ResNet18, "DigitCNN": DigitCNN, "SmallCNN": SmallCNN}
CLASSES = 7


class Row(NamedTuple):
    """A row of Table 4.

    Attributes:
      training: its method in `methods_of`.
      inference: its adaptation.
      parameters, trained, inferred, accuracy: as printed: millions, ms, ms, percent.
    """

    training: str
    inference: str
    parameters: float
    trained: float
    inferred: float
    accuracy: float


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
    """Times, prints a table, and JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet18", choices=MODELS)
    parser.add_argument("--size", type=int, default=64, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2, help="of one timed round")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    here = announce(
        f"{options.model} {options.size}x{options.size}, batches of {options.batch}: a training "
        f"step and inference of FedIG's Table 4, on {jax.devices()[0]}"
    )
    model = MODELS[options.model](num_classes=CLASSES)
    batches = make_batches(options.steps, options.batch, options.size)
    states = start(methods_of(model), model, batches)
    results = measure(model, states, batches, options.repeats)
    print(table(results))
    if options.json:
        print(json.dumps({"machine": here, **vars(options), "rows": results}))


def make_batches(steps: int, batch: int, size: int) -> dict[str, jax.Array]:
    """The batches of one client."""
    key = jax.random.key(0)
    return {
        "image": jax.random.normal(key, (1, steps, batch, size, size, 3)),
        "label": jax.random.randint(key, (1, steps, batch), 0, CLASSES),
        "valid": jnp.ones((1, steps, batch), bool),
    }


def methods_of(model: Any) -> dict[str, FederatedMethod]:
    """The methods that Table 4 trains, with the paper's optimizer."""
    given = {"prepare": lambda images, dtype: images.astype(dtype)}
    optimizer = optax.sgd(0.01, 0.5)
    return {
        "fedavg": methods.fedavg(model, optimizer, **given),
        "fedbn": methods.fedbn(model, optimizer, **given),
        "fedig": methods.fedig(model, optimizer, cafl="mean", **given),
        "bin": methods.fedig(model, optimizer, cafl="mean", gates=True, **given),
        "fediga": methods.fediga(model, optimizer, cafl="mean", **given),
    }


def start(
    trained: dict[str, FederatedMethod], model: Any, batches: dict[str, jax.Array]
) -> dict[str, tuple[FederatedMethod, Any]]:
    """Each method with its first state, all from one model."""
    key = jax.random.key(1)
    variables = jax.jit(model.init)(key, batches["image"][0, 0])
    return {name: (method, method.init(key, variables, 1)) for name, method in trained.items()}


def measure(
    model: Any, states: dict[str, tuple[FederatedMethod, Any]], batches: dict, repeats: int
) -> dict[str, dict[str, Any]]:
    """Row -> parameters, milliseconds of a step and of inference, and the paper's numbers."""
    steps, key = batches["label"].shape[1], jax.random.key(2)
    images, rounds, passes = batches["image"][0, 0], {}, {}
    for name, (method, state) in states.items():
        rounds[name] = timed(method.round, state, batches, key)
    for label, row in ROWS.items():
        variables = global_variables(states[row.training][1])
        passes[label] = timed(inference(row.inference, model), variables, images)
    print("\na training step")
    taken = {name: s.per(steps) for name, s in interleave(rounds, repeats).items()}
    show(taken, "fedavg")
    print("\ninference")
    inferred = interleave(passes, repeats)
    show(inferred, "FedAvg")
    return {
        label: {
            "parameters": count(states[row.training][1]),
            "training": summary(taken[row.training], taken["fedavg"]),
            "inference": summary(inferred[label], inferred["FedAvg"]),
            "published": row._asdict(),
        }
        for label, row in ROWS.items()
    }


def timed(function: Callable, *arguments: Any) -> Callable[[], object]:
    """A call of the compiled function that ends when its results are there."""
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*arguments))


def inference(name: str, model: Any) -> Callable:
    """One pass by an adaptation, without state."""
    adapt = getattr(adaptation, name)(model)
    return lambda variables, images: adapt.predict(variables, adapt.init(variables), images)[0]


def count(state: Any) -> int:
    """Parameters of one client's model, an adapter's included, running statistics not."""
    variables = client_variables(state)
    return sum(
        leaf[0].size
        for name, tree in variables.items()
        if name != "batch_stats"
        for leaf in jax.tree.leaves(tree)
    )


def summary(samples: Samples, base: Samples) -> dict[str, float | None]:
    """Milliseconds, the least and the median, and how many times the base's."""
    ratio = paired_ratio(samples, base)
    milliseconds = 1000 * samples.wall
    return {
        "least_ms": float(milliseconds.min()),
        "median_ms": float(sorted(milliseconds)[len(milliseconds) // 2]),
        "ratio": ratio.median if ratio.measured else None,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Beside the paper's: parameters, and times as multiples of FedAvg's."""
    base = ROWS["FedAvg"]
    lines = [
        "\nmethod              parameters  paper   training  paper   inference  paper",
    ]
    for label, row in ROWS.items():
        found = results[label]
        ratios = [found[kind]["ratio"] for kind in ("training", "inference")]
        trained, inferred = ("   -" if ratio is None else f"{ratio:4.2f}" for ratio in ratios)
        lines.append(
            f"{label:18}  {found['parameters'] / 1e6:8.2f}M  {row.parameters:.2f}M  "
            f"{trained:>7}x  {row.trained / base.trained:4.2f}x  "
            f"{inferred:>8}x  {row.inferred / base.inferred:4.2f}x"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
