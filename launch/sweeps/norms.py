"""Runs FedBN's idea on networks without batch norm: norms of a layer or a group stay at home.

    python launch/sweeps/norms.py --data FOLDER [--only 'digits/*']     see sweep.py

NAMEs of data: digits and pacs, as in unseen.py. FedAvg shares everything or, with all_but_norms,
keeps the scales and biases of all norms. FedBN on the network with batch norm also keeps running
statistics, which the other networks lack. MNIST-M and PACS's sketches are unseen; the other clients
are tested on samples of their own. Networks start from random weights. Each has one rate for all
its rows, which was not tuned. Numbers are accuracies in percent over 3 seeds.
"""

import sys

from plan import MEAN, UNSEEN, Column, Protocol, Sweep, Training, table, training
from sweep import main

COLUMNS = {"clients": Column(("",), MEAN), "unseen": Column(("",), UNSEEN)}
CONVOLUTIONS = {"optimizer__learning_rate": 0.03, "optimizer__momentum": 0.9}
TRANSFORMER = {
    **{"optimizer__name": "adam", "optimizer__learning_rate": 0.002, "optimizer__momentum": 0.0},
    "model": "ViT:width=48:depth=3:heads=3:patch=7:image_size=28",
}
NETWORKS = {
    "batch norm": ("batch", CONVOLUTIONS | {"model": "SmallCNN"}),
    "group norm": ("group", CONVOLUTIONS | {"model": "SmallCNN:norm=group"}),
    "layer norm": ("layer", TRANSFORMER),
}


def methods(network: str) -> dict[str, Training]:
    """Returns the rows of a network: FedAvg, and what keeps its norms."""
    folder, keys = NETWORKS[network]
    rows = {"FedAvg": training("fedavg", f"{folder}-everything", **keys)}
    if folder == "batch":
        rows["FedBN"] = training("fedbn", f"{folder}-norms", **keys)
    else:
        keys = keys | {"share": "all_but_norms"}
        rows["FedAvg, all_but_norms"] = training("fedavg", f"{folder}-norms", **keys)
    return {f"{network}, {label}": one for label, one in rows.items()}


METHODS = {label: one for network in NETWORKS for label, one in methods(network).items()}
BOTH = {
    **{"baselines": (), "adaptations": ("running",)},
    **{"batch_size": 32, "rounds": 40, "checkpoint_every": 40},
}
DIGITS = Protocol(
    *("digits", "configs/digits.py", COLUMNS, 3, {"data.path": "digits"}),
    {
        **{**BOTH, "data.fraction": 1.0, "data.truncate": False, "target": "mnist_m"},
        "eval_every": 40,
    },
)
PACS = Protocol(
    *("pacs", "configs/pacs.py", COLUMNS, 3, {"data.path": "pacs"}),
    {
        **{**BOTH, "data.image_size": 28, "data.augment": "none", "data.test": 0.2},
        **{"data.validation": 0.1, "validate_with": "own", "local_selection": 0},
        **{"local_steps": 20, "eval_every": 5},
    },
)
SWEEP = Sweep(
    "norms",
    "Norms that stay with a client",
    (
        table("digits", "Digits, MNIST-M left out", DIGITS, METHODS),
        table("pacs", "PACS at 28x28 from scratch, sketches left out", PACS, METHODS),
    ),
)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
