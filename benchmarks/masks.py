"""Measures what shrinks FedCD's masks: the optimizer, its decay, bounds, or the masked layer.

    python benchmarks/masks.py [--seeds 3] [--model SmallCNN] [--rounds 60] [--only bounds,adam] \
        [--config.data.fraction=1 ...]

It runs FedCD's SCI (by size, lambda = 0.7) on the embedded scanners, one left out, with batches of
16, SGD with learning rate 0.05 and momentum 0.9, and batch norm kept at the clients. A row has the
masks' mean L1 norm divided by the number of masked features (1 at the start), after some rounds and
at the last; the share of entries below 1; and the accuracies at the last round: mean and standard
deviation over seeds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.methods import sci
from fedjax_bn.run.config.file import read, split_changes
from fedjax_bn.run.train import run
from fedjax_bn.training.workdir import read_json

RATE = "0.05"
SGD = f"sgd:learning_rate={RATE}:momentum=0.9"
READINGS = {  # options of the method
    "as_model": "",  # the clients' optimizer trains the masks too
    "no_penalty": ":lambda_sci=0",
    "decay": f":mask_optimizer={SGD}:weight_decay=0.0005",
    "decay_20": f":mask_optimizer={SGD}:weight_decay=0.01",
    "adam": ":mask_optimizer=adam:learning_rate=0.001",
    "bounds": ":bounds=0,1",
    "bounds_adam": ":bounds=0,1:mask_optimizer=adam:learning_rate=0.001",
    "alignment": "",  # only the penalty moves the masks; penalty and loss move the model
    "inside": ":names=norm1",  # signed maps of an inner layer, after a batch norm
    "inside_bounds": ":names=norm1:bounds=0,1",
}


def main() -> None:
    """Trains with each reading and prints a row for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="SmallCNN")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default=",".join(READINGS), help="readings, comma-separated")
    changes, others = split_changes(sys.argv[1:])
    options = parser.parse_args(others)
    for reading in options.only.split(","):
        keys = {
            **{"method": f"fedcd{READINGS[reading]}", "weigh": "by_size"},
            **{"data.name": "scanners:seed=0", "target": "fax", "model": options.model},
            **{"rounds": str(options.rounds), "eval_every": str(options.rounds)},
            **{"batch_size": "16", "adaptations": "batch", "share": "all_but_batch_norm"},
            **{"optimizer.learning_rate": RATE, "optimizer.momentum": "0.9"},
            "optimizer.schedule": "constant",
            **dict(changes),
        }
        align = _only_alignment if reading == "alignment" else sci.align
        rows = []
        for seed in range(options.seeds):
            seeded = [*keys.items(), ("seed", str(seed))]
            with tempfile.TemporaryDirectory() as folder, mock.patch.object(sci, "align", align):
                rows.append(measure(seeded, Path(folder)))
        table = np.array([[*row.values()] for row in rows])
        cells = zip(rows[0], table.mean(0).round(3), table.std(0, ddof=1).round(3), strict=True)
        shown = {name: [float(mean), float(deviation)] for name, mean, deviation in cells}
        print(json.dumps({"reading": reading, **shown}), flush=True)


def measure(changes: list[tuple[str, str]], folder: Path) -> dict[str, float]:
    """Returns a run's masks and accuracies."""
    summary = run(read("quickstart", changes), folder / "run", say=lambda text: None)
    masks = []  # of each round, all in one row a client, f[K, C]
    for file in sorted((folder / "run" / "masks").glob("*.npz")):
        with np.load(file) as arrays:
            names = [n for n in arrays if n != "clients" and not n.endswith(".mean")]
            masks.append(np.concatenate([arrays[name] for name in names], axis=1))
    shown = sorted({0, len(masks) // 4, len(masks) // 2, len(masks) - 1})
    last = read_json(folder / "run" / "summary.json")["last_round"]
    return {f"l1, round {place + 1}": np.abs(masks[place]).mean() for place in shown} | {
        "below_1": (masks[-1] < 1).mean(),
        "clients": last["internal"]["mean"],
        "unseen": next(iter(summary["last_round"]["unseen"].values()))["batch"],
    }


def _only_alignment(
    loss: Callable, masks: sci.Masks, global_gradient: sci.Masks, strength: jax.Array
) -> tuple[jax.Array, sci._Aligned]:
    """Returns L_e without the loss's gradient of the masks, see `sci.align`."""
    (value, moved), gradient = jax.value_and_grad(loss, has_aux=True)(masks)
    still, _ = loss(jax.lax.stop_gradient(masks))
    gaps = jax.tree.map(lambda a, b: jnp.square(a - b).sum(), gradient, global_gradient)
    penalty = strength * jax.tree.reduce(jnp.add, gaps)
    return still + penalty, sci._Aligned(value, gradient, moved)


if __name__ == "__main__":
    main()
