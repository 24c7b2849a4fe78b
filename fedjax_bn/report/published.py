"""Reads the papers' published numbers, and finds those that a report shows beside its cells.

`paper_results.csv` has a line for each cell of a table, `paper_protocols.json` the configuration
and the test of each row, which `launch/sweeps/coverage.py --protocols` writes from the sweeps.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.report.results import MEAN, Row, Table
from fedjax_bn.report.runs import APART, other_samples, packaged, spell
from fedjax_bn.run.experiment.method import name_of, option_values, own_rules

PROTOCOLS = "paper_protocols.json"
UNSTATED = "unstated"  # a protocol's `start` if the paper does not state the initial weights
# Keys in which the rows of a paper's table differ, or on which numbers hardly depend.
_OF_ROWS = frozenset(("share", "weigh", "data.perturb", "eval_every", "patience", "pretrained"))
# Values of the digits' empty keys for the original data sets, which the papers used.
_OF_ORIGINALS = {"data.fraction": 0.1, "data.truncate": True}
# FedBN's Table 16 prints its headings in another order than its numbers, which evidently follow the
# authors' order of clients: printed heading -> data set of the numbers.
_TABLE_16 = {
    **{"SVHN": "MNIST", "USPS": "SVHN", "SynthDigits": "USPS", "MNIST-M": "SynthDigits"},
    "MNIST": "MNIST-M",
}


class PublishedNumber(NamedTuple):
    """One published number."""

    paper: str  # FedBN, FedIG-A, TsmoBN, UniFed or FedCD
    table: str  # such as "11" or "E.4"
    dataset: str  # such as "Digits-Five"
    setting: str  # such as "10% data, E=1, B=32"; may be empty
    method: str  # the row, such as "FedAvg"
    column: str  # its heading, such as "SVHN"
    mean: float  # percent
    std: float | None  # over runs, percent; None if the paper prints none
    metric: str  # accuracy_percent or mAP50_percent


@cache
def cells() -> tuple[PublishedNumber, ...]:
    """Returns all 2,037 published numbers, in the papers' order.

    In FedBN's Table 16 each number has the column to which it evidently belongs, not the printed
    one (by which SVHN would reach 99.6 %). Nothing else is corrected: TsmoBN's 99.98 for
    FedBN+TsmoBN on MNIST is likely a misprint, and FedIG-A's Table 5 repeats averages of Tables 7
    and 8.
    """
    table = files("fedjax_bn.report").joinpath("paper_results.csv").read_text(encoding="utf-8")
    numbers = []
    for row in csv.DictReader(table.splitlines()):
        std = float(row["std"]) if row["std"] else None
        number = PublishedNumber(**row | {"mean": float(row["mean"]), "std": std})
        if (number.paper, number.table) == ("FedBN", "16"):
            number = number._replace(column=_TABLE_16[number.column])
        numbers.append(number)
    return tuple(numbers)


def published(**fields: str) -> tuple[PublishedNumber, ...]:
    """Returns numbers by fields, such as table="11"; a value that no number has is a ValueError."""
    for field, value in fields.items():
        valid = sorted({str(getattr(number, field)) for number in cells()})
        if value not in valid:
            raise ValueError(f"no published {field} is {value!r}; there are {', '.join(valid)}")
    return tuple(n for n in cells() if all(getattr(n, f) == v for f, v in fields.items()))


class _Protocol(NamedTuple):
    """A published table, or one setting of it, with the configuration of its runs."""

    where: Sequence[str]  # paper, table, dataset and setting of its numbers
    name: str  # such as "FedBN, Table 11", with the setting if the table has several
    kind: str  # internal or unseen: the report's table beside which it is shown
    metric: str  # accuracy or mAP50
    config: str  # the packaged config
    dataset: str  # the config's data.name, after the changes
    start: str  # the initial weights: "" for random ones, or UNSTATED
    samples: Mapping[str, int]  # domain -> training samples of a client, if the paper states them
    columns: Mapping[str, str]  # our domain -> the paper's heading
    rows: Mapping[str, Mapping[str, Any]]  # row title -> "adaptation", and "changes" of its runs
    changes: Mapping[str, Any]  # changes of the config that all rows share
    target: str | None  # the domains left out; None if several are left out in turn


# (protocol, our domain -> number, all keys of the configuration) of a row of a published table
_Training = tuple[_Protocol, Mapping[str, PublishedNumber], Mapping[str, Any]]


class _Printed(NamedTuple):
    """A published number that is shown beside a cell."""

    paper: str
    table: str  # with the setting if the table has several
    source: str  # the table, or "mean of" the table if we averaged its numbers
    mean: float  # percent
    std: float | None  # over runs in percent; None if the paper prints none
    differs: str  # the differences of the run from the paper's protocol, as text


def beside(table: Table, row: Row, column: str) -> list[_Printed]:
    """Returns the published numbers of a cell, at most one for each paper.

    A number is from a row with the run's rules, in the table whose protocol has the fewest
    differences from the run, or in the largest of several such tables. If a paper prints no mean,
    the mean of its numbers is shown beside the mean over the same clients.
    """
    nearest: dict[str, tuple[tuple[int, int], _Printed]] = {}
    trainings = _trainings(table.name, table.dataset, table.score)
    rules = _rules(row.method, row.config) if trainings else ()
    for protocol, numbers, planned in trainings.get((row.adaptation, rules), ()):
        if column in numbers:
            mean, std, source = numbers[column].mean, numbers[column].std, protocol.name
        elif column == MEAN and {*numbers, MEAN} == {*table.columns}:
            mean, std = float(np.mean([number.mean for number in numbers.values()])), None
            source = f"mean of {protocol.name}"
        else:
            continue
        differs = list(_differences(protocol, planned, row))
        # of equally near tables take the largest: ablations repeat rows of larger tables
        rank, paper = (len(differs), -len(protocol.rows)), protocol.where[0]
        if paper not in nearest or rank < nearest[paper][0]:
            if protocol.kind == "internal":
                of_run, of_paper = {*table.columns} - {MEAN}, {*protocol.columns} - {MEAN}
                for missing, place in ((of_run - of_paper, "there"), (of_paper - of_run, "here")):
                    differs += [f"no {', '.join(sorted(missing))} {place}"] if missing else []
            differences = "; ".join(differs) or "nothing that its config states"
            nearest[paper] = rank, _Printed(paper, protocol.name, source, mean, std, differences)
    return [printed for _, printed in nearest.values()]


@cache  # called for each cell of a page
def _trainings(kind: str, dataset: str, metric: str) -> dict[tuple, list[_Training]]:
    """Returns (adaptation, rules) -> rows of the papers' tables, and alternatives of a row."""
    protocols = files("fedjax_bn.report").joinpath(PROTOCOLS).read_text(encoding="utf-8")
    trainings: dict[tuple, list[_Training]] = {}
    for protocol in (_Protocol(**fields) for fields in json.loads(protocols)):
        if (protocol.kind, protocol.dataset, protocol.metric) != (kind, dataset, metric):
            continue
        of_table = [number for number in cells() if [*number[:4]] == protocol.where]
        for title, row in protocol.rows.items():
            printed = {number.column: number for number in of_table if number.method == title}
            numbers = {d: printed[head] for d, head in protocol.columns.items() if head in printed}
            for changes in row["changes"]:
                planned = packaged(protocol.config) | protocol.changes | changes
                key = row["adaptation"], _rules(planned["method"], planned)
                trainings.setdefault(key, []).append((protocol, numbers, planned))
    return trainings


def _rules(method: str, config: Mapping[str, Any]) -> tuple:
    """Returns what distinguishes rows of papers: method, sharing, weighing, and use of the data."""
    # Methods that train alike get the same name: FedBN is FedAvg that keeps batch norm, and FedIG-A
    # is FedIG with another test. Papers use one name for uniform weights and weights by size.
    words = {k: str(config[k]).partition(":")[0] for k in ("share", "weigh", "data.perturb")}
    rules = own_rules(method) | {key: word for key, word in words.items() if word}
    method = name_of(method)
    if method == "randconv":
        rules["data.perturb"] = "randconv"
    name = {"fedbn": "fedavg", "fediga": "fedig", "randconv": "fedavg"}.get(method, method)
    weigh = rules.get("weigh", "").replace("uniform", "by_size")
    augmented = str(config["data.augment"]).startswith("randaug")
    pooled = config["data.partition"] == "pooled"
    return name, rules.get("share"), weigh, rules.get("data.perturb"), augmented, pooled


def _differences(protocol: _Protocol, planned: Mapping[str, Any], row: Row) -> Iterator[str]:
    """Yields the differences of a run from a protocol, with both values."""
    # Of `pretrained` only counts whether there is a file, because users have their own paths.
    config = row.config
    keys = config.keys() & planned.keys() - APART - _OF_ROWS
    if protocol.samples and any(row.data):  # the resulting numbers of samples are compared below
        keys -= _OF_ORIGINALS.keys()
    for key in sorted(keys):
        value = config[key]
        # the digits' reader chooses the value of an empty key by the form of the data
        if value is None and protocol.config == "digits":
            value = _OF_ORIGINALS.get(key)
        if value != planned[key]:
            yield f"{key}={spell(config[key])} ({spell(planned[key])} there)"
    for key, value in option_values(planned["method"]).items():
        option = f"{row.method}:{key}"
        if option in config and spell(config[option]) != spell(value):
            yield f"{option}={spell(config[option])} ({spell(value)} there)"
    if protocol.start != UNSTATED and bool(config["pretrained"]) != bool(protocol.start):
        start = protocol.start or "random weights"
        yield f"pretrained={spell(config['pretrained'])} ({start} there)"
    if protocol.target is not None and config["target"] != protocol.target:
        yield f"target={spell(config['target'])} ({spell(protocol.target)} there)"
    samples = protocol.samples
    counts = {d: n for data in row.data for d, n in other_samples(data, samples).items()}
    if counts:
        counts_text = ", ".join(f"{d} {n} ({samples[d]} there)" for d, n in counts.items())
        yield f"training samples of a client: {counts_text}"
