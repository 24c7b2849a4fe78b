"""Times a detector's evaluation by its parts; `round_time.py --only yolo` times its round.

    python benchmarks/detection.py                           # YOLOv5n, 320 pixels, 32 images
    python benchmarks/detection.py --side 96 --images 16 --json

The parts are the forward passes of some random images, then decoding and suppression, then mean
average precision on the host. They take turns in short pieces (see `interleave`).
"""

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.models.forward import forward
from fedjax_bn.tasks.detection import detection
from interleave import figures, interleave, show
from machine import announce
from tasks import CLASSES, YOLO, draw_variables, make_batches


def main() -> None:
    """Times the parts and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--side", type=int, default=320, help="pixels, a multiple of 32; default %(default)s")
    add("--repeats", type=int, default=9, help="pieces of each part; default %(default)s")
    add("--images", type=int, default=32, help="of the evaluation; default %(default)s")
    add("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    here = announce(f"YOLOv5n, {CLASSES} classes, {options.side} pixels a side")
    results = evaluation(options)
    if options.json:
        print(json.dumps({"machine": here, **vars(options), **results}))


def evaluation(options: argparse.Namespace) -> dict[str, Any]:
    """Times forward passes beside decoding, suppression and mean average precision."""
    yolo = YOLO._replace(side=options.side, clients=1, samples=options.images)
    model, variables = yolo.model, draw_variables(yolo)
    task = detection(model.anchors)
    batches = jax.tree.map(lambda x: jnp.asarray(x[0]), make_batches(yolo))

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
    print(f"\nevaluation of {options.images} images")
    samples = interleave(runs, options.repeats)
    show(samples, "forward")
    rest = sum(np.median(samples[name].wall) for name in samples if name != "forward")
    share = float(rest / np.median(samples["forward"].wall))
    print(f"=> decoding, suppression and precision take {share:.2f} of the forward passes' time")
    return {"evaluation_share": round(share, 3), "evaluation": figures(samples, "forward")}


if __name__ == "__main__":
    main()
