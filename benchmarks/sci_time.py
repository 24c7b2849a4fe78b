"""Time of a local step with SCI's penalty, beside a plain step in the same run (FedCD, Eq. 15).

    python benchmarks/sci_time.py                            # ResNet-18, 64x64, batches of 16
    python benchmarks/sci_time.py --model DigitCNN --json    # and one JSON object as the last line

A step is the gradient of all parameters (and of the mask) and SGD's move. "autodiff" is what the
library does: the inner gradient by reverse differentiation, which with one mask before the
classifier reaches the classifier alone. "closed form" writes that gradient down from the
classifier's weights and the softmax residual. All are timed in turn; medians are compared.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.client import Received, cross_entropy, differentiate, gradient_step
from fedjax_bn.methods.fedcd import masked_step
from fedjax_bn.methods.sci import Aligned, Alignment, aligned_objective, mask_gradient
from fedjax_bn.models import DigitCNN, ResNet18, SmallCNN
from fedjax_bn.models.forward import forward
from fedjax_bn.models.masks import with_masks

MODELS = {"ResNet18": (ResNet18, 64), "DigitCNN": (DigitCNN, 28), "SmallCNN": (SmallCNN, 28)}


def main() -> None:
    """Times, prints a table and perhaps JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ResNet18", choices=MODELS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    make, size = MODELS[options.model]
    model, key = make(num_classes=7), jax.random.key(0)
    shape = (options.batch, size, size, 3)
    batch = {
        "image": jax.random.normal(key, shape),
        "label": jnp.arange(options.batch) % 7,
        "valid": jnp.ones(options.batch, bool),
        "last_epoch": jnp.ones((), bool),
    }
    variables = with_masks(model, jax.jit(model.init)(key, batch["image"]))
    steps = timed_steps(model, variables)
    seconds = time_in_turn(steps, variables, batch, options.repeats)
    plain = seconds["plain"]
    print(f"{options.model} {size}x{size}, batch {options.batch}, {jax.devices()[0]}")
    for name, value in seconds.items():
        print(f"{name:<12} {1e3 * value:9.2f} ms   {value / plain:6.3f} of plain")
    if options.json:
        ratios = {name: value / plain for name, value in seconds.items()}
        print(json.dumps({"model": options.model, "batch": options.batch, "ratio": ratios}))


def timed_steps(model: Any, variables: dict) -> dict[str, Callable]:
    """name -> `step(variables, batch) -> variables`."""
    optimizer, key = optax.sgd(0.01), jax.random.key(1)
    zero = jax.tree.map(jnp.zeros_like, variables["mask"])
    received = Received((), (), (), Alignment(zero, jnp.ones((), jnp.int32)))

    def read(images: jax.Array, dtype: Any) -> jax.Array:
        return images.astype(dtype)

    objectives = {
        "autodiff": aligned_objective(model, read, 0.7),
        "closed form": closed_form_objective(model, 0.7),
    }
    locals_ = {"plain": gradient_step(differentiate(cross_entropy(model, read)), optimizer)}
    locals_ |= {n: masked_step(o, optimizer, optimizer) for n, o in objectives.items()}

    def step(local: Any, variables: dict, batch: dict) -> dict:
        return local.update(variables, local.init(variables), batch, received, key)[0]

    return {
        name: lambda variables, batch, local=local: step(local, variables, batch)
        for name, local in locals_.items()
    }


def closed_form_objective(model: Any, strength: float) -> Callable:
    """As `aligned_objective`, with the mask gradient of a dense classifier called `head`."""

    def objective(
        variables: dict, batch: dict, received: Received, key: jax.Array
    ) -> tuple[jax.Array, Aligned]:
        mask, head = variables["mask"]["features"], variables["params"]["head"]
        plain = {name: variables[name] for name in ("params", "batch_stats")}
        _, features, moved = forward(
            model, plain, batch["image"], train=True, valid=batch["valid"], key=key, features=True
        )
        kernel, bias, labels = head["kernel"], head["bias"], batch["label"]
        gradient = mask_gradient(features, mask, kernel, bias, labels, batch["valid"])
        logits = (features * mask) @ kernel + bias
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        gap = jnp.square(gradient - received.server.gradient["features"]).sum()
        return loss + strength * gap, Aligned(loss, {"features": gradient}, moved)

    return objective


def time_in_turn(
    steps: dict[str, Callable], variables: dict, batch: dict, repeats: int
) -> dict[str, float]:
    """Median seconds of one step of each, inside a loop as local training has it."""

    def three(step: Callable) -> Callable:
        def run(variables: dict, batch: dict) -> dict:
            return jax.lax.fori_loop(0, 3, lambda _, v: step(v, batch), variables)

        return jax.jit(run)

    compiled = {name: three(step) for name, step in steps.items()}
    for run in compiled.values():
        jax.block_until_ready(run(variables, batch))
    taken = {name: [] for name in steps}
    for _ in range(repeats):
        for name, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(variables, batch))
            taken[name].append((time.perf_counter() - start) / 3)
    return {name: statistics.median(values) for name, values in taken.items()}


if __name__ == "__main__":
    main()
