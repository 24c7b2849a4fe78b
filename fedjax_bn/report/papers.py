"""What papers print beside a cell of a report, and in what a run differs from their protocol."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from fedjax_bn.report.data_facts import other_samples
from fedjax_bn.report.protocols import PROTOCOLS, UNSTATED, WEIGHTS, Protocol
from fedjax_bn.report.published import Cell, published
from fedjax_bn.report.results import Row, Table
from fedjax_bn.report.scores import MEAN
from fedjax_bn.report.variants import APART, spell
from fedjax_bn.run.config.file import read
from fedjax_bn.run.config.keys import flatten
from fedjax_bn.run.experiment.method import own_rules

# What rows of a paper's table differ in, or what no number depends on by much.
_OF_ROWS = frozenset(("share", "weigh", "data.perturb", "eval_every", "patience"))
_PLAIN = frozenset(("by_size", "uniform"))  # papers call a method the same with either
# What the digits' empty keys mean for the originals, of which the papers' numbers are.
_OF_ORIGINALS = {"data.fraction": 0.1, "data.truncate": True}
_METHODS = {
    "copa": "COPA",
    "csac": "CSAC",
    "csd": "CSD",
    "fedadam": "FedAdam",
    "fedadg": "FedADG",
    "fedavg": "FedAvg",
    "fedbn": "FedBN",
    "fedcd": "FedCD-SCI + REA",
    "feddc": "FedDC",
    "feddg": "FedDG",
    "fedig": "FedIG",
    "fediga": "FedIG",
    "fednova": "FedNova",
    "fedprox": "FedProx",
    "fedsam": "FedSAM",
    "fedsr": "FedSR",
    "harmofl": "HarmoFL",
    "jigen": "JiGen",
    "l2d": "L2D",
    "mixstyle": "Mixstyle",
    "moon": "MOON",
    "perfedavg": "PerFedAvg",
    "randconv": "RandConv",
    "rsc": "RSC",
    "scaffold": "Scaffold",
    "selfreg": "SelfReg",
    "sfa": "SFA",
    "singleset": "SingleSet",
    "snr": "SNR",
}
# (method, key, its word) -> a row that is a method with one other rule. Of any method that keeps
# its clients' batch norm it is "FedBN + METHOD".
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
# Other values of these are in no paper's table: they are told as differences.
_OPTIONS = ("data.partition", "fedig.lambda_1", "fedig.lambda_2", "fedig.mixing")


class Printed(NamedTuple):
    """A published number that stands beside a cell.

    Attributes:
      paper: such as FedBN.
      table: its table, and the setting where it has several.
      averaged: whether it is our mean of numbers that the paper prints without one.
      mean: percent.
      std: standard deviation over runs in percent; None where the paper prints none.
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
    """The published numbers of a cell; none where no paper has the data set, row or column.

    Of a paper's tables the one stands there whose protocol is nearest to the run's. Where a paper
    prints no mean, that of its numbers stands beside the mean over the same clients.

    Args:
      table: of the report.
      row: of that table.
      column: client or domain, or the mean of all domains left out.
    """
    found = []
    for protocol in _sources(table, row):
        cells = _cells_of(protocol, row)
        if column in cells:
            one = cells[column]
            averaged, number = False, (one.mean, one.std)
        elif column == MEAN and cells and {*cells, MEAN} == {*table.columns}:
            averaged = True
            number = (float(np.mean([cell.mean for cell in cells.values()])), None)
        else:
            continue
        differs = "; ".join((*_differences(protocol, row), *_other_clients(protocol, table)))
        told = differs or "nothing that its config states"
        found.append(Printed(protocol.paper, protocol.name, averaged, *number, told))
    return tuple(found)


def _sources(table: Table, row: Row) -> Iterator[Protocol]:
    """Of each paper, and each set of its columns, the table that is nearest by its protocol."""
    groups: dict[tuple, list[Protocol]] = {}
    for one in PROTOCOLS:
        here = (one.table, one.dataset, one.metric) == (table.name, table.dataset, table.score)
        if here and _cells_of(one, row):
            groups.setdefault((one.paper, *one.columns), []).append(one)
    for group in groups.values():
        yield min(group, key=lambda one: len(_differences(one, row)))


def _cells_of(protocol: Protocol, row: Row) -> dict[str, Cell]:
    """Column of a report -> what the paper prints of a row."""
    name, end = _name_of(row), protocol.adapted.get(row.adaptation)
    if name is None or end is None:
        return {}
    title = protocol.renamed.get(name, name) + end
    printed = _printed(tuple(protocol.where.items()))
    return {
        column: printed[title, heading]
        for column, heading in protocol.columns.items()
        if (title, heading) in printed
    }


def _name_of(row: Row) -> str | None:
    """What papers call a method with a run's rules; None where no paper has such a row."""
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
    """(key, word) of rules that are not the method's own."""
    own, config = own_rules(row.method), row.config
    word = {key: str(config[key]).partition(":")[0] for key in ("share", "weigh", "data.perturb")}
    if word["share"] != own["share"]:
        yield "share", word["share"]
    if word["weigh"] != own["weigh"] and not {word["weigh"], own["weigh"]} <= _PLAIN:
        yield "weigh", word["weigh"]
    if word["data.perturb"]:
        yield "data.perturb", word["data.perturb"]
    if str(config["data.augment"]).startswith("randaug"):
        yield "data.augment", "randaug"
    for key in _OPTIONS:
        if (row.method, key, str(config.get(key))) in _CHANGED:
            yield key, str(config[key])


def _differences(protocol: Protocol, row: Row) -> list[str]:
    """The keys and the training samples in which a run differs from a protocol, with both values.

    A file of weights that the user has counts only where one of the two starts without.
    """
    config, planned = row.config, _planned(protocol.config, protocol.start)
    keys = config.keys() & planned.keys() - APART - _OF_ROWS - {"pretrained"}
    keys -= {key for key, _ in _other_rules(row)}
    if protocol.samples and any(row.data):  # the numbers are known that these make
        keys -= {"data.fraction", "data.truncate"}
    if protocol.dataset in ("digits", "digits_morpho"):
        same = _OF_ORIGINALS.items()
        keys -= {key for key, own in same if planned[key] is None and config[key] == own}
    said = [
        f"{key}={spell(config[key])} ({spell(planned[key])} there)"
        for key in sorted(keys)
        if config[key] != planned[key]
    ]
    if protocol.start != UNSTATED and bool(config["pretrained"]) != bool(protocol.start):
        start = protocol.start or "random weights"
        said.append(f"pretrained={spell(config['pretrained'])} ({start} there)")
    if protocol.target is not None and config["target"] != protocol.target:
        said.append(f"target={spell(config['target'])} ({spell(protocol.target)} there)")
    counts = {d: n for data in row.data for d, n in other_samples(data, protocol.samples).items()}
    if counts:
        each = ", ".join(f"{d} {n} ({protocol.samples[d]} there)" for d, n in counts.items())
        said.append(f"training samples of a client: {each}")
    return said


def _other_clients(protocol: Protocol, table: Table) -> Iterator[str]:
    """Which clients train here and not there, and which there and not here."""
    if protocol.table != "internal":
        return
    here, there = {*table.columns} - {MEAN}, {*protocol.columns} - {MEAN}
    for missing, where in ((here - there, "there"), (there - here, "here")):
        if missing:
            yield f"no {', '.join(sorted(missing))} {where}"


@cache
def _planned(config: str, start: str) -> dict[str, object]:
    """The keys of a packaged config, as JSON has them, with what a start from weights changes."""
    changes = [("pretrained", start), ("fedig.cafl", "sum")] if start == WEIGHTS else []
    flat = flatten(read(config, changes))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat}


@cache
def _printed(where: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], Cell]:
    """(method, column) -> the number, of a published table."""
    return {(cell.method, cell.column): cell for cell in published(**dict(where))}
