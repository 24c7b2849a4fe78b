"""What papers print beside a cell of a report, and in what a run differs from their protocol."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from fedjax_bn.report.data import other_samples
from fedjax_bn.report.finished_runs import APART, spell
from fedjax_bn.report.published import (
    PAPER_TABLES,
    UNSTATED,
    WEIGHTS,
    Cell,
    PaperTable,
    published,
)
from fedjax_bn.report.results import MEAN, Row, Table
from fedjax_bn.run.config.file import read
from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.experiment.method import own_rules

# What rows of a paper's table differ in, or what no number depends on by much.
_OF_ROWS = frozenset(("share", "weigh", "data.perturb", "eval_every", "patience"))
_ALIKE = frozenset(("by_size", "uniform"))  # papers call a method the same with either
# What the digits' empty keys mean for the originals, whose numbers the papers print.
_OF_ORIGINALS = {"data.fraction": 0.1, "data.truncate": True}
_METHODS = {
    name.lower(): name
    for name in (
        *("COPA", "CSAC", "CSD", "FedADG", "FedAdam", "FedAvg", "FedBN", "FedDC", "FedDG", "FedIG"),
        *("FedNova", "FedProx", "FedSAM", "FedSR", "HarmoFL", "JiGen", "L2D", "MOON", "Mixstyle"),
        *("PerFedAvg", "RSC", "RandConv", "SFA", "SNR", "Scaffold", "SelfReg", "SingleSet"),
    )
} | {"fedcd": "FedCD-SCI + REA", "fediga": "FedIG"}
# (method, key, its word) -> a row that is a method with one other rule. A method that keeps its
# clients' batch norm and is not here is called "FedBN + METHOD".
_CHANGED = {
    ("fedavg", "share", "all_but_batch_norm"): "FedBN",
    ("fedbn", "share", "everything"): "FedAvg",
    ("fedavg", "weigh", "generalization_adjustment"): "FedDG-GA",
    ("fedcd", "weigh", "by_size"): "FedCD-SCI",
    ("fedavg", "data.perturb", "amplitude_mix"): "AM",
    ("fedavg", "data.perturb", "randconv"): "RandConv",
    ("fedavg", "data.augment", "randaug"): "RandAug",
    ("fedavg", "data.partition", "pooled"): "Centralized",
    ("fedig", "fedig.lambda_1", "0.0"): "FedIG, CAFL",
    ("fedig", "fedig.lambda_2", "0.0"): "FedIG, CACL",
    ("fedig", "fedig.mixing", "constant:u=0.0"): "FedIG, Global: u = 0.0",
    ("fedig", "fedig.mixing", "constant:u=1.0"): "FedIG, Instance: u = 1.0",
    ("fedig", "fedig.mixing", "constant:u=0.5"): "FedIG, Global & instance: u = 0.5",
    **{
        ("fediga", "fedig.mixing", f"uniform:low={low}:high={high}"): f"u ~ U({low}, {high})"
        for low, high in (("0.0", "0.5"), ("0.5", "1.0"), ("-0.1", "1.1"))
    },
}
# Other values of these have no row in a paper's table, and count as differences.
_OPTIONS = ("data.partition", "fedig.lambda_1", "fedig.lambda_2", "fedig.mixing")


class Printed(NamedTuple):
    """A published number that stands beside a cell.

    Attributes:
      paper: such as FedBN.
      table: its table, and the setting if it has several.
      averaged: whether it is our mean of numbers that the paper prints without one.
      mean: percent.
      std: standard deviation over runs in percent; None if the paper prints none.
      differs: in what the run differs from the paper's protocol.
    """

    paper: str
    table: str
    averaged: bool
    mean: float
    std: float | None
    differs: str

    @property
    def source(self) -> str:
        """Where it is printed."""
        return f"mean of {self.table}" if self.averaged else self.table


def beside(table: Table, row: Row, column: str) -> tuple[Printed, ...]:
    """Returns the published numbers of a cell; none if no paper has the data set, row or column.

    A paper's number is from that of its tables whose protocol is nearest to the run's. If a paper
    prints no mean, that of its numbers stands beside the mean over the same clients.

    Args:
      table: of the report.
      row: of that table.
      column: client or domain, or the mean of all domains left out.
    """
    groups: dict[tuple, list[PaperTable]] = {}
    for one in PAPER_TABLES:
        here = (one.table, one.dataset, one.metric) == (table.name, table.dataset, table.score)
        if here and _cells_of(one, row):
            groups.setdefault((one.paper, *one.columns), []).append(one)
    found = []
    for group in groups.values():
        nearest = min(group, key=lambda one: len(_differences(one, row)))
        cells = _cells_of(nearest, row)
        averaged = column == MEAN and MEAN not in cells and {*cells, MEAN} == {*table.columns}
        if averaged:
            mean, std = float(np.mean([cell.mean for cell in cells.values()])), None
        elif column in cells:
            mean, std = cells[column].mean, cells[column].std
        else:
            continue
        differs = "; ".join((*_differences(nearest, row), *_other_clients(nearest, table)))
        differs = differs or "nothing that its config states"
        found.append(Printed(nearest.paper, nearest.name, averaged, mean, std, differs))
    return tuple(found)


def _cells_of(paper: PaperTable, row: Row) -> dict[str, Cell]:
    """Column of a report -> what the paper prints in a row."""
    name, end = _name_of(row), paper.adapted.get(row.adaptation)
    if name is None or end is None:
        return {}
    title = paper.renamed.get(name, name) + end
    printed = _printed(tuple(paper.where.items()))
    return {
        column: printed[title, heading]
        for column, heading in paper.columns.items()
        if (title, heading) in printed
    }


def _name_of(row: Row) -> str | None:
    """What papers call a method with a run's rules; None if no paper has such a row."""
    name = _METHODS.get(row.method)
    if name is None or not (changes := list(_other_rules(row))):
        return name
    if len(changes) > 1:
        return None
    change = (row.method, *changes[0])
    if change not in _CHANGED and change[1:] == ("share", "all_but_batch_norm"):
        return f"FedBN + {name}"
    return _CHANGED.get(change)


def _other_rules(row: Row) -> Iterator[tuple[str, str]]:
    """(key, word) of the rules that are not the method's own."""
    own, config = own_rules(row.method), row.config
    word = {key: str(config[key]).partition(":")[0] for key in ("share", "weigh", "data.perturb")}
    if word["share"] != own["share"]:
        yield "share", word["share"]
    if word["weigh"] != own["weigh"] and not {word["weigh"], own["weigh"]} <= _ALIKE:
        yield "weigh", word["weigh"]
    if word["data.perturb"]:
        yield "data.perturb", word["data.perturb"]
    if str(config["data.augment"]).startswith("randaug"):
        yield "data.augment", "randaug"
    for key in _OPTIONS:
        if (row.method, key, str(config.get(key))) in _CHANGED:
            yield key, str(config[key])


def _differences(paper: PaperTable, row: Row) -> list[str]:
    """The keys and the training samples in which a run differs from a protocol, with both values.

    A file of weights that the user has counts only if one of the two starts without.
    """
    config, planned = row.config, _planned(paper.config, paper.changes, paper.start)
    keys = config.keys() & planned.keys() - APART - _OF_ROWS - {"pretrained"}
    keys -= {key for key, _ in _other_rules(row)}
    if paper.samples and any(row.data):  # the numbers of samples are known, which these make
        keys -= {"data.fraction", "data.truncate"}
    if paper.config == "digits":
        same = _OF_ORIGINALS.items()
        keys -= {key for key, own in same if planned[key] is None and config[key] == own}
    found = [
        f"{key}={spell(config[key])} ({spell(planned[key])} there)"
        for key in sorted(keys)
        if config[key] != planned[key]
    ]
    if paper.start != UNSTATED and bool(config["pretrained"]) != bool(paper.start):
        start = paper.start or "random weights"
        found.append(f"pretrained={spell(config['pretrained'])} ({start} there)")
    if paper.target is not None and config["target"] != paper.target:
        found.append(f"target={spell(config['target'])} ({spell(paper.target)} there)")
    counts = {d: n for data in row.data for d, n in other_samples(data, paper.samples).items()}
    if counts:
        each = ", ".join(f"{d} {n} ({paper.samples[d]} there)" for d, n in counts.items())
        found.append(f"training samples of a client: {each}")
    return found


def _other_clients(paper: PaperTable, table: Table) -> Iterator[str]:
    """Which clients train here and not there, and which there and not here."""
    if paper.table == "internal":
        here, there = {*table.columns} - {MEAN}, {*paper.columns} - {MEAN}
        for missing, where in ((here - there, "there"), (there - here, "here")):
            if missing:
                yield f"no {', '.join(sorted(missing))} {where}"


@cache
def _planned(config: str, changes: tuple[tuple[str, str], ...], start: str) -> dict[str, object]:
    """The keys of a packaged config, as JSON has them, with what a start from weights changes."""
    given = [("pretrained", start), ("fedig.cafl", "sum")] if start == WEIGHTS else []
    flat = flatten(read(config, [*changes, *given]))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat}


@cache
def _printed(where: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], Cell]:
    """(method, column) -> the number, of a published table."""
    return {(cell.method, cell.column): cell for cell in published(**dict(where))}
