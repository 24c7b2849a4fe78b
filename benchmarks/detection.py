"""Times a detector's round beside PyTorch eager, and its evaluation by parts.

    python benchmarks/detection.py                           # YOLOv5n, 320 pixels, some minutes
    python benchmarks/detection.py --side 96 --only round --json

Both programs train the same network (tests/support/torch_yolo.py builds PyTorch's from the same
table of layers) by the same loss and plain SGD on the same random images and boxes: two clients of
two batches of four, one after another, then plain averaging. Ours and PyTorch at each of its
settings take turns in short pieces (see `interleave`); a ratio above 1 means that ours is faster.
Only ours is evaluated: the forward passes of some images, then decoding, suppression and mean
average precision on the host. The round needs torch (CPU build).
"""

import argparse
import json
import resource
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_bn.aggregation import uniform
from fedjax_bn.engine.images import standardize
from fedjax_bn.methods import fedavg
from fedjax_bn.models import YOLOv5n
from fedjax_bn.models.forward import forward
from fedjax_bn.tasks.detection import detection
from interleave import conclude, fastest, figures, interleave, paired_ratio, show, spend
from machine import announce

CLIENTS, STEPS, BATCH, BOXES, CLASSES = 2, 2, 4, 20, 10
RATE = 1e-3
REST = 0.3  # OpenMP's threads spin for up to 0.2 s after their work


def main() -> None:
    """Runs the chosen parts and prints their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--side", type=int, default=320, help="pixels, a multiple of 32; default %(default)s")
    add("--repeats", type=int, default=9, help="pieces of each program; default %(default)s")
    add("--images", type=int, default=32, help="images of an evaluation; default %(default)s")
    add("--only", nargs="*", default=list(PARTS), choices=PARTS, help="default: all")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured
    packages = ("torch",) if "round" in options.only else ()
    here = announce(f"YOLOv5n, {CLASSES} classes, {options.side} pixels a side", *packages)
    results: dict[str, Any] = {}
    for part in options.only:
        results |= PARTS[part](options)
    if options.json:
        print(json.dumps({"machine": here, **vars(options), **results}))


def batches_of(side: int, clients: int = CLIENTS, steps: int = STEPS) -> dict[str, Any]:
    """Returns random bytes and boxes."""
    rng = np.random.default_rng(0)
    shape = (clients, steps, BATCH)
    low = rng.uniform(0, 0.6, (*shape, BOXES, 2))
    boxes = np.concatenate([low, low + rng.uniform(0.03, 0.4, low.shape)], -1)
    return {
        "image": rng.integers(0, 256, (*shape, side, side, 3), dtype=np.uint8),
        "label": {
            "boxes": boxes.astype(np.float32),
            "class": rng.integers(0, CLASSES, (*shape, BOXES)).astype(np.int32),
        },
        "valid": np.ones(shape, bool),
    }


def start(side: int) -> tuple[Any, dict[str, Any]]:
    """Returns the model and random variables, drawn without a compiled program."""
    model, rng = YOLOv5n(CLASSES), np.random.default_rng(0)
    images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    like = jax.eval_shape(model.init, jax.random.key(0), images)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].key != "kernel":
            return jnp.full(leaf.shape, float(path[-1].key in ("scale", "var")), leaf.dtype)
        bound = np.sqrt(3 / np.prod(leaf.shape[:-1]))
        return jnp.asarray(rng.uniform(-bound, bound, leaf.shape), leaf.dtype)

    return model, jax.tree_util.tree_map_with_path(draw, like)


def compiled_round(side: int) -> tuple[Callable[[], None], tuple[float, float, float]]:
    """Returns our compiled round, and the wall, user and system seconds of its compilation."""
    model, variables = start(side)
    method = fedavg(
        model,
        optax.sgd(RATE),
        task=detection(model.anchors),
        prepare=standardize((0.0,) * 3, (1.0,) * 3),
        weigh=uniform,
    )
    batches, key = jax.tree.map(jnp.asarray, batches_of(side)), jax.random.key(0)
    state = method.init(key, variables, CLIENTS)
    programs = []
    spent = spend(lambda: programs.append(method.round.lower(state, batches, key).compile()))

    def run() -> None:
        nonlocal state
        state, metrics = programs[0](state, batches, key)
        jax.block_until_ready((state, metrics))

    return run, spent


def a_round(options: argparse.Namespace) -> dict[str, Any]:
    """Measures compile time and memory of a round, and its time beside PyTorch's."""
    run, (wall, user, system) = compiled_round(options.side)
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"\na round, {CLIENTS} clients of {STEPS} batches of {BATCH}: traced, lowered and compiled "
        f"in {wall:.1f} s, {user + system:.1f} s of CPU, {megabytes:,.0f} MB at most so far"
    )

    runs = {"ours": run} | rounds_in_torch(batches_of(options.side))
    samples = interleave(runs, options.repeats, rest=REST)
    show(samples, "ours")
    best = fastest(samples, [name for name in samples if name != "ours"])
    ratio = paired_ratio(samples[best], samples["ours"])
    conclude(f"{best} / ours", ratio)
    return {
        "compile_seconds": round(wall, 1),
        "compile_cpu_seconds": round(user + system, 1),
        "compile_megabytes": round(megabytes),
        "round_ratio": round(ratio.median, 3) if ratio.measured else None,
        "round": figures(samples, "ours"),
    }


def rounds_in_torch(arrays: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """Returns the same round in PyTorch at each of its settings."""
    import torch

    import in_torch
    import torch_yolo  # beside the other networks' definitions, see `in_torch`

    images = torch.from_numpy(arrays["image"]).permute(0, 1, 2, 5, 3, 4)
    boxes, classes = (torch.from_numpy(arrays["label"][name]) for name in ("boxes", "class"))

    def at(setting: Any) -> Callable[[], None]:
        def loss(model: Any, x: Any, *label: Any) -> Any:
            x = x.contiguous(memory_format=setting.layout).float() / 255
            return torch_yolo.detection_loss(model(x), *label)

        clients = [
            [(images[k, s], boxes[k, s], classes[k, s].long()) for s in range(STEPS)]
            for k in range(CLIENTS)
        ]
        return in_torch.round_of(setting, torch_yolo.YOLOv5(CLASSES), clients, loss, RATE)

    return {str(setting): at(setting) for setting in in_torch.SETTINGS}


def evaluation(options: argparse.Namespace) -> dict[str, Any]:
    """Times forward passes beside decoding, suppression and mean average precision."""
    model, variables = start(options.side)
    task, steps = detection(model.anchors), -(-options.images // BATCH)
    batches = jax.tree.map(lambda x: jnp.asarray(x[0]), batches_of(options.side, 1, steps))

    def outputs(batch: dict[str, Any]) -> Any:
        images = batch["image"].astype(jnp.float32) / 255
        return forward(model, variables, images).outputs

    passes = jax.jit(lambda batches: jax.lax.map(outputs, batches))
    keep = jax.jit(
        lambda outputs, batches: jax.lax.map(
            lambda given: task.score.of_batch(given[0], given[1]["label"], given[1]["valid"]),
            (outputs, batches),
        )
    )
    found = jax.block_until_ready(passes(batches))
    kept = jax.tree.map(np.asarray, keep(found, batches))
    runs = {
        "forward": lambda: jax.block_until_ready(passes(batches)),
        "decode and suppress": lambda: jax.block_until_ready(keep(found, batches)),
        "average precision": lambda: task.score.of_all(kept),
    }
    print(f"\nevaluation of {steps * BATCH} images")
    samples = interleave(runs, options.repeats)
    show(samples, "forward")
    rest = sum(np.median(samples[name].wall) for name in samples if name != "forward")
    share = float(rest / np.median(samples["forward"].wall))
    print(f"=> decoding, suppression and precision take {share:.2f} of the forward passes' time")
    return {"evaluation_share": round(share, 3), "evaluation": figures(samples, "forward")}


PARTS = {"round": a_round, "evaluation": evaluation}

if __name__ == "__main__":
    main()
