"""Time of a local step with SCI's penalty, beside a plain step in the same run (FedCD, Eq. 15).

    python benchmarks/sci_time.py                            # ResNet-18, 64x64, batches of 16
    python benchmarks/sci_time.py --model DigitCNN --json    # and one JSON object as the last line

A step is the gradient of all parameters (and of the mask) and SGD's move. "autodiff" is what the
library does: the inner gradient by reverse differentiation, which with one mask before the
classifier reaches the classifier alone. "closed form" writes that gradient down from the
classifier's weights and the softmax residual. All are timed in turn (see
`interleave`).
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.local_step import differentiate, gradient_step
from fedjax_bn.methods.fedcd import _masked_step
from fedjax_bn.methods.learning import learning, supervised
from fedjax_bn.methods.sci import Alignment, _Aligned, aligned_objective
from fedjax_bn.models import DigitCNN, ResNet18, SmallCNN
from fedjax_bn.models.forward import forward
from fedjax_bn.models.masks import with_masks
from fedjax_bn.state import Received
from interleave import Samples, conclude, figures, interleave, paired_ratio, show
from machine import announce

MODELS = {"ResNet18": (ResNet18, 64), "DigitCNN": (DigitCNN, 28), "SmallCNN": (SmallCNN, 28)}


def main() -> None:
    """Times, prints a table, and JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet18", choices=MODELS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    make, size = MODELS[options.model]
    here = announce(
        f"{options.model} {size}x{size}, batches of {options.batch}: a step with SCI's penalty "
        f"beside a plain step, on {jax.devices()[0]}",
    )
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
    taken = time_in_turn(steps, variables, batch, options.repeats)
    show(taken, "plain")
    for name in ("autodiff", "closed form"):
        conclude(f"{name} / plain", paired_ratio(taken[name], taken["plain"]))
    if options.json:
        print(json.dumps({"machine": here, **vars(options), "results": figures(taken, "plain")}))


def timed_steps(model: Any, variables: dict) -> dict[str, Callable]:
    """name -> `step(variables, batch) -> variables`."""
    optimizer, key = optax.sgd(0.01), jax.random.key(1)
    zero = jax.tree.map(jnp.zeros_like, variables["mask"])
    received = Received((), (), (), Alignment(zero, jnp.ones((), jnp.int32)))

    def read(images: jax.Array, dtype: Any) -> jax.Array:
        return images.astype(dtype)

    learned, _ = learning(model, prepare=read)
    objectives = {
        "autodiff": aligned_objective(learned, 0.7),
        "closed form": closed_form_objective(model, 0.7),
    }
    masked = {name: differentiate(one, ("params", "mask")) for name, one in objectives.items()}
    locals_ = {"plain": gradient_step(differentiate(supervised(learned)), optimizer)}
    locals_ |= {name: _masked_step(gradient, optimizer) for name, gradient in masked.items()}

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
    ) -> tuple[jax.Array, tuple[jax.Array, _Aligned]]:
        mask, head = variables["mask"]["features"], variables["params"]["head"]
        plain = {name: variables[name] for name in ("params", "batch_stats")}
        passed = {"train": True, "valid": batch["valid"], "key": key, "wanted": ["features"]}
        out = forward(model, plain, batch["image"], **passed)
        features = out.features
        kernel, bias, labels = head["kernel"], head["bias"], batch["label"]
        gradient = mask_gradient(features, mask, kernel, bias, labels, batch["valid"])
        logits = (features * mask) @ kernel + bias
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        gap = jnp.square(gradient - received.server.gradient["features"]).sum()
        value = loss + strength * gap
        return value, (value, _Aligned(loss, {"features": gradient}, out.moved))

    return objective


def mask_gradient(
    features: jax.Array,
    mask: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    valid: jax.Array | None = None,
) -> jax.Array:
    """dL/dmask f[F] in closed form, where a dense layer reads the masked features.

    With logits (mask * f_i) W + b and residuals r_i = softmax(logits_i) - onehot(y_i), the mean
    cross entropy L over n samples has dL/dmask_j = 1/n sum_i f_ij (W r_i)_j.

    Args:
      features: f[B, F], before the mask.
      mask: f[F].
      kernel, bias: W f[F, classes] and b f[classes].
      labels: i32[B].
      valid: bool[B], the samples that count; None for all.
    """
    logits = (features * mask) @ kernel + bias
    residuals = jax.nn.softmax(logits) - jax.nn.one_hot(labels, len(bias), dtype=logits.dtype)
    parts = features * (residuals @ kernel.T)
    if valid is None:
        return parts.mean(0)
    count = jnp.maximum(valid.sum(dtype=parts.dtype), 1)
    return jnp.where(valid[:, None], parts, 0).sum(0) / count


def time_in_turn(
    steps: dict[str, Callable], variables: dict, batch: dict, repeats: int
) -> dict[str, Samples]:
    """Times of one step of each, inside a loop as local training has it."""

    def three(step: Callable) -> Callable[[], object]:
        @jax.jit
        def run(variables: dict, batch: dict) -> dict:
            return jax.lax.fori_loop(0, 3, lambda _, v: step(v, batch), variables)

        return lambda: jax.block_until_ready(run(variables, batch))

    taken = interleave({name: three(step) for name, step in steps.items()}, repeats)
    return {name: samples.per(3) for name, samples in taken.items()}


if __name__ == "__main__":
    main()
