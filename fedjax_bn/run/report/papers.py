"""What papers print beside a cell of a report, and in what a run differs from their protocol."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from fedjax_bn.data.corruptions import INTERNAL
from fedjax_bn.run.config import flatten
from fedjax_bn.run.config_file import read
from fedjax_bn.run.configured_method import resolved
from fedjax_bn.run.report.finished_runs import APART, Run, relevant, spell
from fedjax_bn.run.report.published import Cell, published
from fedjax_bn.run.report.results import Row
from fedjax_bn.run.report.scores import MEAN, RUNNING


class _Protocol(NamedTuple):
    """A published table whose protocol a packaged config states.

    Attributes:
      table: "internal" or "unseen", the table of a report that it stands beside.
      dataset: here.
      config: the packaged config.
      where: fields of its cells.
      columns: domain here -> heading there.
      adapted: adaptation here -> what it adds to the name of a method there; others have no row.
    """

    table: str
    dataset: str
    config: str
    where: Mapping[str, str]
    columns: Mapping[str, str]
    adapted: Mapping[str, str]


_METHODS = {
    "copa": "COPA",
    "csac": "CSAC",
    "csd": "CSD",
    "fedadam": "FedAdam",
    "fedadg": "FedADG",
    "fedavg": "FedAvg",
    "fedbn": "FedBN",
    "fedcd": "FedCD-SCI + REA",
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
    "randconv": "RandConv",
    "rsc": "RSC",
    "scaffold": "Scaffold",
    "selfreg": "SelfReg",
    "sfa": "SFA",
    "singleset": "SingleSet",
    "snr": "SNR",
}
_PACS = {"photo": "P", "art_painting": "A", "cartoon": "C", "sketch": "S", MEAN: "Avg"}
_CORRUPTIONS = (
    *("gaussian", "shot", "impulse", "defocus", "glass", "motion", "zoom", "snow", "frost", "fog"),
    *("bright", "contrast", "elastic", "pixelate", "jpeg"),
)
_PLAIN = {"": "", RUNNING: ""}
_ADAPTER = _PLAIN | {"zero_shot_adapter": "-A"}
_TSMOBN = _PLAIN | {"tsmobn": "+TsmoBN"}


def _of(paper: str, table: str, dataset: str) -> dict[str, str]:
    return {"paper": paper, "table": table, "dataset": dataset}


PROTOCOLS = (
    _Protocol(
        *("internal", "digits", "digits", _of("FedBN", "11", "Digits-Five")),
        {
            **{"svhn": "SVHN", "usps": "USPS", "synth_digits": "SynthDigits", "mnist": "MNIST"},
            "mnist_m": "MNIST-M",
        },
        _PLAIN,
    ),
    _Protocol(
        *("internal", "office_caltech10", "office_caltech10"),
        _of("FedBN", "1", "Office-Caltech10"),
        {"amazon": "A", "caltech": "C", "dslr": "D", "webcam": "W"},
        _PLAIN,
    ),
    _Protocol(
        *("internal", "domainnet", "domainnet", _of("FedBN", "1", "DomainNet")),
        {
            **{"clipart": "C", "infograph": "I", "painting": "P", "quickdraw": "Q", "real": "R"},
            "sketch": "S",
        },
        _PLAIN,
    ),
    _Protocol(
        *("internal", "abide", "abide", _of("FedBN", "1", "ABIDE")),
        {"NYU": "NYU", "USM": "USM", "UM_1": "UM", "UCLA_1": "UCLA"},
        _PLAIN,
    ),
    _Protocol("unseen", "pacs", "pacs", _of("FedIG-A", "5", "PACS"), _PACS, _ADAPTER),
    _Protocol("unseen", "pacs", "pacs:protocol=fedcd", _of("FedCD", "1", "PACS"), _PACS, _PLAIN),
    _Protocol(
        *("unseen", "vlcs", "vlcs", _of("FedIG-A", "7", "VLCS")),
        {"VOC2007": "V", "LabelMe": "L", "Caltech101": "C", "SUN09": "S", MEAN: "Avg"},
        _ADAPTER,
    ),
    _Protocol(
        *("unseen", "officehome", "officehome", _of("FedIG-A", "8", "OfficeHome")),
        {"Art": "A", "Clipart": "C", "Product": "P", "Real World": "R", MEAN: "Avg"},
        _ADAPTER,
    ),
    _Protocol(
        *("unseen", "digits_dg", "digits_dg", _of("TsmoBN", "E.5", "Digits-DG")),
        {"svhn": "SVHN", "mnist_m": "MNIST-M", "mnist": "MNIST", "syn": "SYN"},
        _TSMOBN,
    ),
    _Protocol(
        *("unseen", "camelyon17", "camelyon17", _of("TsmoBN", "E.7", "Camelyon17")),
        {"center1": "hospital4", "center2": "hospital5"},
        _TSMOBN,
    ),
    _Protocol(
        *("unseen", "cifar10_c", "cifar10_c", _of("TsmoBN", "1", "CIFAR-10-C (severity 1)")),
        dict(zip(INTERNAL, _CORRUPTIONS, strict=True)),
        _TSMOBN,
    ),
)


def beside(dataset: str, table: str, row: Row, column: str) -> tuple[Cell, ...]:
    """The published numbers of a cell; none where no paper has the data set, row or column.

    Args:
      dataset: the run's.
      table: internal or unseen.
      row: of the report's table; its method is its runs'.
      column: client or domain, or the mean of all domains left out.
    """
    found = []
    for protocol in PROTOCOLS:
        printed = _printed(protocol.where).get((_row(protocol, row), protocol.columns.get(column)))
        if (protocol.table, protocol.dataset) == (table, dataset) and printed:
            found.append(printed)
    return tuple(found)


def _row(protocol: _Protocol, row: Row) -> str | None:
    """The name of a row in the published table."""
    name, end = _METHODS.get(row.method), protocol.adapted.get(row.adaptation)
    if name is None or end is None or (end == "-A" and row.method != "fediga"):
        return None
    return name + end


def differences(run: Run) -> Iterator[tuple[str, str]]:
    """(a paper's table, in what a run differs from its protocol), for those beside its cells.

    A key of the paper's that names a file that the user has, such as weights, counts only where it
    is empty in one of them.
    """
    for protocol in PROTOCOLS:
        if protocol.dataset == run.summary["dataset"] and _METHODS.get(run.summary["method"]):
            planned, mine = _planned(protocol.config), relevant(run)
            said = [
                f"{key}={spell(mine[key])} ({spell(planned[key])} there)"
                for key in sorted(mine.keys() & planned.keys() - APART - _OF_ROWS)
                if mine[key] != planned[key]
            ]
            name = f"{protocol.where['paper']}, Table {protocol.where['table']}"
            yield name, "; ".join(said) or "nothing that its config states"


_OF_ROWS = frozenset(("share", "weigh", "eval_every", "patience"))  # a row's own


@cache
def _planned(config: str) -> dict[str, object]:
    """The keys of a packaged config, as JSON has them."""
    flat = flatten(resolved(read(config, ())))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat}


@cache
def _cells(where: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], Cell]:
    return {(cell.method, cell.column): cell for cell in published(**dict(where))}


def _printed(where: Mapping[str, str]) -> dict[tuple[str, str], Cell]:
    """(method, column) -> the number, of a published table."""
    return _cells(tuple(where.items()))
