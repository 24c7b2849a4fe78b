"""Unseen clients on real images at a size that two CPU cores carry: TsmoBN, FedIG and FedIG-A.

    python launch/sweeps/unseen.py list|run|report --workdir DIR [--only GLOB] [--data.NAME=PATH]

NAME is digits or pacs: what its config file takes as data.path. Every domain of digits is left out
in turn, of PACS the sketches. FedIG is a run of FedIG-A tested without its adapter, since the
adapter does not touch the main network. Seeds share compiled programs where the environment has
JAX_COMPILATION_CACHE_DIR=FOLDER.

Differs from the papers: small networks from scratch, fewer rounds and small images. CAFL is the
mean over features, as in every run from random weights, where the sum lets features collapse.
Published numbers beside the digits are Digits-DG's (TsmoBN, Table E.5), beside PACS FedIG's Table
5, whose ResNet-18 starts from ImageNet's weights.
"""

import sys
from functools import partial
from typing import NamedTuple

import figures
from plan import Cell, Figure, Run, Sweep, Table, seeds
from sweep import main

from fedjax_bn.run.report.published import published


class Row(NamedTuple):
    """A row of a table: which method is tested how, and its names in the papers' tables."""

    method: str
    adaptation: str
    tsmobn: str = ""  # in TsmoBN's Table E.5
    fedig: str = ""  # in FedIG's Table 5


ROWS = {
    "FedAvg": Row("fedavg", "running", "FedAvg", "FedAvg"),
    "FedAvg + TsmoBN": Row("fedavg", "tsmobn", "FedAvg+TsmoBN"),
    "FedBN": Row("fedbn", "running", "FedBN", "FedBN"),
    "FedBN + TsmoBN": Row("fedbn", "tsmobn", "FedBN+TsmoBN"),
    "FedIG": Row("fediga", "running", "", "FedIG"),
    "FedIG + TsmoBN": Row("fediga", "tsmobn"),
    "FedIG-A": Row("fediga", "zero_shot_adapter", "", "FedIG-A"),
    "FedIG, alpha 0.5": Row("fediga", "fixed_alpha"),
    "FedIG, IABN": Row("fediga", "iabn"),
}
METHODS = ("fedavg", "fedbn", "fediga")
SEEDS = 3

# heading -> domain
DIGITS = {"MNIST": "mnist", "SVHN": "svhn", "USPS": "usps", "fonts": "fonts", "MNIST-M": "mnist_m"}
DIGITS_DG = ("MNIST", "SVHN", "MNIST-M")  # which of them Table E.5 has too
PACS = {"S": "sketch"}

DIGITS_KEYS = {
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


def adaptations(method: str) -> tuple[str, ...]:
    """How the unseen client of a method's run is served."""
    return tuple(row.adaptation for row in ROWS.values() if row.method == method)


def runs_of(data: str, config: str, targets: dict[str, str], keys: dict) -> list[Run]:
    """The runs of one dataset: a target, method and seed each."""
    runs = []
    for target in targets.values():
        for method in METHODS:
            changes = {"method": method, "target": target, "adaptations": adaptations(method)}
            runs += seeds(SEEDS, f"{data}/{target}/{method}", config, changes | keys, data)
    return runs


RUNS = (
    *runs_of("digits", "configs/digits.py", DIGITS, DIGITS_KEYS),
    *runs_of("pacs", "configs/pacs.py", PACS, PACS_KEYS),
)


def names(data: str, target: str, method: str) -> tuple[str, ...]:
    """The runs of a target and a method, one a seed."""
    return tuple(f"{data}/{target}/{method}/{seed}" for seed in range(SEEDS))


def table(data: str, title: str, targets: dict[str, str]) -> Table:
    """One row for each way to serve, a column a target and their mean by seed."""
    rows = {}
    for label, row in ROWS.items():
        cells = [
            Cell(names(data, t, row.method), t, printed(data, heading, row), row.adaptation)
            for heading, t in targets.items()
        ]
        every = tuple(n for t in targets.values() for n in names(data, t, row.method))
        rows[label] = (*cells, Cell(every, "unseen", None, row.adaptation))
    return Table(data, title, (*targets, "mean"), rows)


def printed(data: str, heading: str, row: Row) -> tuple[float, float | None] | None:
    """The published number, None where there is none."""
    if data == "digits":
        where = {"paper": "TsmoBN", "table": "E.5", "method": row.tsmobn}
    else:
        where = {"paper": "FedIG-A", "table": "5", "dataset": "PACS", "method": row.fedig}
    if not where["method"] or (data == "digits" and heading not in DIGITS_DG):
        return None
    (cell,) = published(**where, column=heading)
    return cell.mean, cell.std


def tables() -> list[Table]:
    """A table a dataset."""
    return [
        table("digits", "Digits, each domain left out", DIGITS),
        table("pacs", "PACS at 48x48, from scratch", PACS),
    ]


def all_figures() -> list[Figure]:
    """The tables' numbers as bars."""
    return [
        Figure(
            f"{one.name}-bars",
            one.title,
            tuple(run.name for run in RUNS if run.data == one.name),
            partial(figures.accuracy_bars, table=one),
        )
        for one in tables()
    ]


SWEEP = Sweep("TsmoBN (Jiang et al. 2021) and FedIG-A: unseen clients", RUNS, tables, all_figures)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
