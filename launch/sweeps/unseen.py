"""Tests TsmoBN, FedIG and FedIG-A on unseen clients with real images, small enough for two cores.

    python launch/sweeps/unseen.py [--only 'digits/*'] [--data FOLDER] [--dry-run]     see sweep.py

NAMEs of data: digits and pacs, as their config files take data.path; digits is an `.npz` of some
700 training images a domain (of the original data sets all images would train, unless
--config.data.fraction is given). Each domain of the digits is left out in turn; of PACS only the
sketches are. FedIG is a run of FedIG-A that is tested without its adapter, because the adapter does
not change the main network. Seeds share compiled programs if the environment has
JAX_COMPILATION_CACHE_DIR=FOLDER.

The runs differ from the papers: small networks from random weights, fewer rounds and small images.
CAFL is the mean over features, because the printed sum makes all features equal. The published
numbers beside the digits are those of Digits-DG (TsmoBN, Table E.5); beside PACS they are those of
FedIG's Table 5, whose ResNet-18 starts from ImageNet's weights.

`--only ablations` tests FedAvg's runs with MNIST left out as TsmoBN's Fig. 3 does: by batch size,
momentum and order of the stream, and without the affine parameters.
"""

import sys
from collections.abc import Mapping
from typing import NamedTuple

import figures
from plan import Protocol, Row, Sweep, Table, left_out, table, training, where
from sweep import main


class Served(NamedTuple):
    """A row: its method, its adaptation, and its names in the papers' tables."""

    method: str
    adaptation: str
    tsmobn: str = ""  # in TsmoBN's Table E.5
    fedig: str = ""  # in FedIG's Table 5


ROWS = {
    "FedAvg": Served("fedavg", "running", "FedAvg", "FedAvg"),
    "FedAvg + TsmoBN": Served("fedavg", "tsmobn", "FedAvg+TsmoBN"),
    "FedBN": Served("fedbn", "running", "FedBN", "FedBN"),
    "FedBN + TsmoBN": Served("fedbn", "tsmobn", "FedBN+TsmoBN"),
    "FedIG": Served("fediga", "running", "", "FedIG"),
    "FedIG + TsmoBN": Served("fediga", "tsmobn"),
    "FedIG-A": Served("fediga", "zero_shot_adapter", "", "FedIG-A"),
    "FedIG, alpha 0.5": Served("fediga", "fixed_alpha"),
    "FedIG, IABN": Served("fediga", "iabn"),
}
SEEDS = 3
DIGITS = {"MNIST": "mnist", "SVHN": "svhn", "USPS": "usps", "fonts": "fonts", "MNIST-M": "mnist_m"}

DIGITS_KEYS = {
    "data.fraction": 1.0,  # of an `.npz` of 554 to 743 images a domain
    "data.truncate": False,
    "model": "SmallCNN",
    "rounds": 25,
    "optimizer.learning_rate": 0.03,
    "optimizer.momentum": 0.9,
    "eval_every": 25,
    "checkpoint_every": 25,
}
PACS_KEYS = {
    "model": "ResNet10:width=32",
    "rounds": 20,
    "local_steps": 40,
    "local_selection": 20,
    "batch_size": 32,
    "optimizer.learning_rate": 0.03,
    "optimizer.momentum": 0.9,
    "eval_every": 5,
    "checkpoint_every": 20,
    "data.image_size": 48,
}
TRAININGS = {
    method: training(
        method, adaptations=tuple(row.adaptation for row in ROWS.values() if row.method == method)
    )
    for method in ("fedavg", "fedbn", "fediga")
}
ON_DIGITS = Protocol(
    "digits", "configs/digits.py", left_out(DIGITS), SEEDS, {"data.path": "digits"}, DIGITS_KEYS
)
ON_PACS = Protocol(
    "pacs", "configs/pacs.py", left_out({"S": "sketch"}), SEEDS, {"data.path": "pacs"}, PACS_KEYS
)


def compared(name: str, title: str, protocol: Protocol, printed_in: Mapping[str, str]) -> Table:
    """Returns a table with a row for each way to serve, and a column for each target."""
    rows = {}
    for label, row in ROWS.items():
        printed = row.tsmobn if printed_in["paper"] == "TsmoBN" else row.fedig
        # an empty name would make `plan.table` look for the label in the paper
        rows[label] = Row((TRAININGS[row.method],), row.adaptation, printed or "printed nowhere")
    average = "mean" if len(protocol.columns) > 1 else ""
    return table(name, title, protocol, rows, printed_in, average)


ABLATIONS = figures.ablations(("running", "tsmobn:affine=False"))
ABLATED = TRAININGS["fedavg"]._replace(tests=(ABLATIONS,))
TABLES = (
    compared("digits", "Digits, each domain left out", ON_DIGITS, where("TsmoBN", "E.5")),
    compared("pacs", "PACS at 48x48, from scratch", ON_PACS, where("FedIG-A", 5, dataset="PACS")),
    table(
        *("ablations", "Digits, MNIST left out: FedAvg's models tested as in TsmoBN's Fig. 3"),
        ON_DIGITS._replace(columns=left_out({"MNIST": "mnist"})),
        {
            served: Row((ABLATED,), served, test=ABLATIONS.name)
            for served in ABLATIONS.changes["adaptations"]
        },
    ),
)
FIGURES = tuple(figures.bar_figure(f"{one.name}-bars", one.title, one) for one in TABLES[:2])
SWEEP = Sweep("unseen", "TsmoBN and FedIG-A: unseen clients, small", TABLES, FIGURES)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
