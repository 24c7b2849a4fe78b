"""What papers print, and beside which cell of a report it is shown.

`paper_results.csv` has the numbers, a row for each cell of a table. `paper_protocols.json` has the
configuration and the test of each row; `launch/sweeps/coverage.py --protocols` writes it from the
sweeps, which state how every table is made.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.report.finished_runs import APART, as_json, other_samples, spell
from fedjax_bn.report.results import MEAN, Row, Table
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.method import own_rules

PROTOCOLS = "paper_protocols.json"
UNSTATED = "unstated"  # what a paper starts from
# What rows of a paper's table differ in, or what no number depends on by much.
_OF_ROWS = frozenset(("share", "weigh", "data.perturb", "eval_every", "patience", "pretrained"))
# What the digits' empty keys mean for the originals, whose numbers the papers print.
_OF_ORIGINALS = {"data.fraction": 0.1, "data.truncate": True}
# FedBN's Table 16 prints its columns in another order than its numbers have, evidently its authors'
# order of clients: printed heading -> data set of the numbers.
_TABLE_16 = {
    **{"SVHN": "MNIST", "USPS": "SVHN", "SynthDigits": "USPS", "MNIST-M": "SynthDigits"},
    "MNIST": "MNIST-M",
}


class Cell(NamedTuple):
    """One published number.

    Attributes:
      paper: FedBN, FedIG-A, TsmoBN, UniFed or FedCD.
      table: its number in the paper, such as "11" or "E.4".
      dataset: such as "Digits-Five".
      setting: how, such as "10% data, E=1, B=32"; may be empty.
      method: a row, such as "FedAvg".
      column: such as "SVHN".
      mean: in percent.
      std: standard deviation over runs in percent; None where the paper prints none.
      metric: accuracy_percent or mAP50_percent.
    """

    paper: str
    table: str
    dataset: str
    setting: str
    method: str
    column: str
    mean: float
    std: float | None
    metric: str


@cache
def cells() -> tuple[Cell, ...]:
    """Returns all 2,037 published numbers, in the papers' order.

    The columns of FedBN's Table 16 are those to which its numbers evidently belong, not the printed
    ones (SVHN would be 99.6 %). Nothing else is corrected: FedBN+TsmoBN on MNIST in TsmoBN (99.98)
    is likely a misprint, and FedIG-A's Table 5 repeats averages of Tables 7 and 8.
    """
    text = files("fedjax_bn.report").joinpath("paper_results.csv").read_text(encoding="utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        std = float(row["std"]) if row["std"] else None
        cell = Cell(**row | {"mean": float(row["mean"]), "std": std})
        if (cell.paper, cell.table) == ("FedBN", "16"):
            cell = cell._replace(column=_TABLE_16[cell.column])
        found.append(cell)
    return tuple(found)


def published(**where: str) -> tuple[Cell, ...]:
    """Returns the cells whose fields have given values: published(paper="FedBN", table="11").

    Raises:
      ValueError: `Cell` lacks a field, or no cell has a value.
    """
    for field, value in where.items():
        if field not in Cell._fields:
            raise ValueError(f"{field!r} is not a field of a cell; fields are {Cell._fields}")
        valid = {getattr(cell, field) for cell in cells()}
        if value not in valid:
            known = ", ".join(sorted(map(str, valid)))
            raise ValueError(f"no published {field} is {value!r}; there are {known}")
    return tuple(cell for cell in cells() if all(getattr(cell, f) == v for f, v in where.items()))


class _Protocol(NamedTuple):
    """A published table, or one setting of a table, with the configuration that states how."""

    where: Sequence[str]  # paper, table, dataset and setting of its cells
    name: str  # such as "FedBN, Table 11", with the setting if the table has several
    kind: str  # internal or unseen, the table of a report beside which it is shown
    metric: str  # accuracy or mAP50
    config: str  # the packaged config
    dataset: str  # its data.name, with the changes
    start: str  # what training starts from: empty for random weights, or UNSTATED
    samples: Mapping[str, int]  # domain -> training samples of a client, where they are stated
    columns: Mapping[str, str]  # domain here -> heading there
    rows: Mapping[str, Mapping[str, Any]]  # title -> its test, and its changes by alternative
    changes: Mapping[str, Any]  # of the config, which all rows make
    target: str | None  # the domains left out; None if each is in turn


class _Training(NamedTuple):
    """What makes a row of a published table: its test, its rules, all keys of its configuration."""

    protocol: _Protocol
    title: str
    adaptation: str
    rules: tuple
    planned: Mapping[str, Any]


class _Printed(NamedTuple):
    """A published number that is shown beside a cell."""

    paper: str
    table: str  # with the setting if the table has several
    source: str  # the table, or that it is our mean of numbers that the paper prints without one
    mean: float  # percent
    std: float | None  # over runs in percent; None if the paper prints none
    differs: str  # in what the run differs from the paper's protocol


def beside(table: Table, row: Row, column: str) -> list[_Printed]:
    """Returns the published numbers of a cell, at most one a paper.

    A number is from the row that has the run's rules, in the table whose protocol is nearest to the
    run; if several are equally near, in the largest. If a paper prints no mean, the mean of its
    numbers is beside the mean over the same clients.

    Args:
      table: of the report.
      row: of that table.
      column: client or domain, or the mean of all domains left out.
    """
    found: dict[str, tuple[tuple[int, int], _Printed]] = {}
    trainings = _trainings(table.name, table.dataset, table.score)
    rules = _rules(row.method, row.config) if trainings else ()
    for one in trainings:
        if (one.adaptation, one.rules) != (row.adaptation, rules):
            continue
        protocol = one.protocol
        cells = _printed(tuple(protocol.where), one.title)
        cells = {here: cells[there] for here, there in protocol.columns.items() if there in cells}
        if column in cells:
            mean, std, source = cells[column].mean, cells[column].std, protocol.name
        elif column == MEAN and {*cells, MEAN} == {*table.columns}:
            mean, std = float(np.mean([cell.mean for cell in cells.values()])), None
            source = f"mean of {protocol.name}"
        else:
            continue
        differs = list(_differences(one, row))
        # tables that repeat a row of another one, such as ablations, are smaller
        rank = (len(differs), -len(protocol.rows))
        paper = protocol.where[0]
        if paper not in found or rank < found[paper][0]:
            if protocol.kind == "internal":
                here, there = {*table.columns} - {MEAN}, {*protocol.columns} - {MEAN}
                for missing, where in ((here - there, "there"), (there - here, "here")):
                    differs += [f"no {', '.join(sorted(missing))} {where}"] * bool(missing)
            said = "; ".join(differs) or "nothing that its config states"
            found[paper] = rank, _Printed(paper, protocol.name, source, mean, std, said)
    return [printed for _, printed in found.values()]


@cache  # a page asks for each cell, and reading a config file takes 50 ms
def _trainings(kind: str, dataset: str, metric: str) -> list[_Training]:
    """The rows of the papers' tables on a data set; several of one row are its alternatives."""
    text = files("fedjax_bn.report").joinpath(PROTOCOLS).read_text(encoding="utf-8")
    found = []
    for one in (_Protocol(**fields) for fields in json.loads(text)):
        if (one.kind, one.dataset, one.metric) == (kind, dataset, metric):
            for title, row in one.rows.items():
                for changes in row["changes"]:
                    planned = _config(one.config) | one.changes | changes
                    rules = _rules(planned["method"], planned)
                    found.append(_Training(one, title, row["adaptation"], rules, planned))
    return found


@cache
def _config(name: str) -> dict[str, Any]:
    return as_json(read(name))


@cache
def _printed(where: tuple[str, ...], method: str) -> dict[str, Cell]:
    """Heading -> the number, in a row of a published table."""
    return {c.column: c for c in cells() if (*c[:4], c.method) == (*where, method)}


def _rules(method: str, config: Mapping[str, Any]) -> tuple:
    """What distinguishes the rows of papers: a method's name, its rules, what is done to the data.

    Two names of one row have the same rules: FedBN is FedAvg that keeps batch norm, FedIG-A is
    FedIG with another test, and papers call a method the same if clients weigh alike or by size.
    """
    words = {k: str(config[k]).partition(":")[0] for k in ("share", "weigh", "data.perturb")}
    own = own_rules(method) | {key: word for key, word in words.items() if word}
    if method == "randconv":
        own["data.perturb"] = "randconv"
    name = {"fedbn": "fedavg", "fediga": "fedig", "randconv": "fedavg"}.get(method, method)
    weigh = own.get("weigh", "").replace("uniform", "by_size")
    augmented = str(config["data.augment"]).startswith("randaug")
    pooled = config["data.partition"] == "pooled"
    return name, own.get("share"), weigh, own.get("data.perturb"), augmented, pooled


def _differences(one: _Training, row: Row) -> Iterator[str]:
    """The keys and the training samples in which a run differs from a protocol, with both values.

    A file of weights that the user has counts only if one of the two starts without.
    """
    config, planned, protocol = row.config, one.planned, one.protocol
    keys = config.keys() & planned.keys() - APART - _OF_ROWS
    if protocol.samples and any(row.data):  # known numbers of samples, which these make
        keys -= _OF_ORIGINALS.keys()
    for key in sorted(keys):
        value = config[key]
        # the digits' reader decides by the form of the data
        if value is None and protocol.config == "digits":
            value = _OF_ORIGINALS.get(key)
        if value != planned[key]:
            yield f"{key}={spell(config[key])} ({spell(planned[key])} there)"
    if protocol.start != UNSTATED and bool(config["pretrained"]) != bool(protocol.start):
        start = protocol.start or "random weights"
        yield f"pretrained={spell(config['pretrained'])} ({start} there)"
    if protocol.target is not None and config["target"] != protocol.target:
        yield f"target={spell(config['target'])} ({spell(protocol.target)} there)"
    samples = protocol.samples
    counts = {d: n for data in row.data for d, n in other_samples(data, samples).items()}
    if counts:
        each = ", ".join(f"{d} {n} ({samples[d]} there)" for d, n in counts.items())
        yield f"training samples of a client: {each}"
