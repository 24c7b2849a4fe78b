"""The papers' tables: the numbers that they print, and the configurations that state how.

The numbers are in `paper_results.csv`, a row for each cell of a table. `launch/sweeps` makes the
runs of the same tables, with the names and settings below.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Any, NamedTuple

from fedjax_bn.data.corruptions import EXTRA, INTERNAL
from fedjax_bn.report.results import MEAN, RUNNING

WEIGHTS = "weights of ImageNet"
UNSTATED = "unstated"
_CORRUPTIONS = (
    *("gaussian", "shot", "impulse", "defocus", "glass", "motion", "zoom", "snow", "frost", "fog"),
    *("bright", "contrast", "elastic", "pixelate", "jpeg"),
)
# data set here -> heading of a paper's tables -> domain here
DOMAINS: dict[str, dict[str, str]] = {
    "digits": {
        **{"SVHN": "svhn", "USPS": "usps", "SynthDigits": "synth_digits", "MNIST-M": "mnist_m"},
        "MNIST": "mnist",
    },
    "digits_morpho": {"Morpho-global": "morpho_global", "Morpho-local": "morpho_local"},
    "digits_dg": {"SVHN": "svhn", "MNIST-M": "mnist_m", "MNIST": "mnist", "SYN": "syn"},
    "office_caltech10": {"A": "amazon", "C": "caltech", "D": "dslr", "W": "webcam"},
    "domainnet": {
        **{"C": "clipart", "I": "infograph", "P": "painting", "Q": "quickdraw", "R": "real"},
        "S": "sketch",
    },
    "abide": {"NYU": "NYU", "USM": "USM", "UM": "UM_1", "UCLA": "UCLA_1"},
    "pacs": {"P": "photo", "A": "art_painting", "C": "cartoon", "S": "sketch"},
    "vlcs": {"V": "VOC2007", "L": "LabelMe", "C": "Caltech101", "S": "SUN09"},
    "officehome": {"A": "Art", "C": "Clipart", "P": "Product", "R": "Real World"},
    "camelyon17": {"hospital4": "center1", "hospital5": "center2"},
    "cifar10_c": dict(zip(_CORRUPTIONS, INTERNAL, strict=True)),
    "driving": {"Cityscapes": "cityscapes", "Mapillary": "vistas", "BDD100K": "bdd100k"},
    "bdd100k": {
        name: name for name in ("ClearHighway", "RainyHighway", "CityStreet", "Residential")
    },
}
LETTERS = dict(zip("ABCDEFGHIJKLMNO", INTERNAL, strict=True))  # of UniFed's Table 2
# Settings of FedBN's Tables 13 to 16.
BATCHES = {"10": 10, "50": 50, "full": 743}
PERCENTS = (100, 60, 40, 20, 10, 5, 1)
# Training images in Table 15; Table 16 has ten times as many.
_UNCUT = {"svhn": 7943, "usps": 743, "synth_digits": 39116, "mnist_m": 5600, "mnist": 5600}
# Training images of each client in the authors' code.
OF_EACH = {"office_caltech10": 62, "domainnet": 105}
UNIFED = ("FedAvg", "Scaffold", "FedProx", "FedAdam", "FedNova", "MOON", "FedDC", "PerFedAvg")
OWN_BN = "+client-specific BN"  # after a method's name in UniFed's tables
# Rows of UniFed's Table 3 whose global batch norms are not updated (section 4.1.3) -> adaptation.
NEVER_UPDATED = {"FedBN": "initial:affine=False", f"FedBN{OWN_BN}": "tsmobn:affine=False"}
# Rows of FedIG's Table 3c -> adaptation.
INFERENCE = {
    "FedIG + ensemble BNs": "ensemble",
    "FedIG + IABN": "iabn",
    "FedIG + MixNorm": "mixnorm",
    "FedIG + random alpha": "random_alpha",
    "FedIG + fixed alpha 0.5": "fixed_alpha",
}
# FedBN's Table 16 prints its columns in another order than its numbers have, evidently its authors'
# order of clients: printed heading -> data set of the numbers.
_TABLE_16 = {
    "SVHN": "MNIST",
    "USPS": "SVHN",
    "SynthDigits": "USPS",
    "MNIST-M": "SynthDigits",
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


class PaperTable(NamedTuple):
    """A published table, or one setting of a table, with the configuration that states how.

    Attributes:
      table: "internal" or "unseen", the table of a report beside which it stands.
      dataset: here.
      config: the packaged config.
      changes: of the config, (key, text).
      where: fields of its cells.
      columns: domain here -> heading there.
      adapted: adaptation here -> what it adds to the name of a row there; others have no row.
      renamed: names of rows there that are not those of most papers.
      start: what training starts from: empty for random weights, WEIGHTS, or UNSTATED.
      target: the domains left out there; None if each is in turn.
      samples: domain here -> training samples of each of its clients, if the paper or its authors'
        code gives the number.
    """

    table: str
    dataset: str
    config: str
    changes: tuple[tuple[str, str], ...]
    where: Mapping[str, str]
    columns: Mapping[str, str]
    adapted: Mapping[str, str]
    renamed: Mapping[str, str] = {}
    start: str = ""
    target: str | None = None
    samples: Mapping[str, int] = {}

    @property
    def paper(self) -> str:
        """Its paper."""
        return self.where["paper"]

    @property
    def name(self) -> str:
        """Paper, table, and the setting if the table has several."""
        setting = self.where.get("setting")
        return f"{self.paper}, Table {self.where['table']}" + (f" ({setting})" if setting else "")

    @property
    def metric(self) -> str:
        """What its percentages are, as a report's table calls it."""
        return "mAP50" if self.dataset in ("driving", "bdd100k") else "accuracy"


def epochs(count: int) -> dict[str, int]:
    """Returns the keys of FedBN's E local epochs: 300 epochs in all, the rounds rounded up."""
    return {"local_epochs": count, "rounds": math.ceil(300 / count)}


def unequal(percent: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns the keys and training samples of FedBN's Tables 15 (10 %) and 16 (100 %).

    All clients make the steps of the largest one, SynthDigits, in an epoch (E.6).
    """
    samples = {name: count * percent // 10 for name, count in _UNCUT.items()}
    steps = math.ceil(samples["synth_digits"] / 32)
    changes = {"data.truncate": False, "data.fraction": percent / 100, "local_steps": steps}
    return changes, samples


_PLAIN = {"": "", RUNNING: ""}
_ADAPTER = _PLAIN | {"zero_shot_adapter": "-A"}
_TSMOBN = _PLAIN | {"tsmobn": "+TsmoBN"}


def _table(
    paper: str,
    number: str,
    dataset: str,
    printed: str,
    setting: str = "",
    *,
    kind: str = "unseen",
    config: str = "",
    changes: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    average: bool = False,
    adapted: Mapping[str, str] = _PLAIN,
    method: str = "",
    **fields: Any,
) -> PaperTable:
    """A table whose cells have these fields; its columns are heading -> domain."""
    where = {"paper": paper, "table": number, "dataset": printed, "setting": setting}
    where = {key: text for key, text in (where | {"method": method}).items() if text}
    columns = DOMAINS[dataset] if columns is None else columns
    columns = {domain: heading for heading, domain in columns.items()}
    columns |= {MEAN: "Avg"} if average else {}
    texts = tuple((key, str(value)) for key, value in (changes or {}).items())
    return PaperTable(kind, dataset, config or dataset, texts, where, columns, adapted, **fields)


def _fedbn() -> Iterator[PaperTable]:
    """Tables 11, 13 to 16, 12, 17 and 1: in Table 17 FedBN has statistics of test batches."""
    everyone = DOMAINS["digits"].values()

    def digits(
        number: str, setting: str, samples: int | dict[str, int], changes: Mapping[str, Any]
    ) -> PaperTable:
        counts = samples if isinstance(samples, dict) else dict.fromkeys(everyone, samples)
        given = {"kind": "internal", "changes": changes, "target": "", "samples": counts}
        return _table("FedBN", number, "digits", "Digits-Five", setting, **given)

    yield digits("11", "", 743, {})
    for name, size in BATCHES.items():
        for count in (1, 4, 16):
            changes = {"batch_size": size, **epochs(count)}
            yield digits("13", f"B={name}, E={count}", 743, changes)
    for percent in PERCENTS:
        if percent != 10:  # whose numbers are in Table 11
            changes = {"data.fraction": percent / 100}
            yield digits("14", f"data fraction {percent}%", 7438 * percent // 100, changes)
    for number, percent in (("15", 10), ("16", 100)):
        changes, samples = unequal(percent)
        yield digits(number, f"unequal sizes, {percent}%", samples, changes)
    pooled = {"changes": {"data.partition": "pooled"}, "samples": {"pooled": 5 * 743}}
    yield _table("FedBN", "12", "digits", "Digits-Five", **pooled)
    target = ",".join(DOMAINS["digits_morpho"].values())
    morpho = {
        "config": "digits",
        "changes": {"data.name": "digits_morpho", "target": target},
        "target": target,
        "samples": dict.fromkeys(everyone, 743),
    }
    for method in ("FedBN", "FedAvg", "FedProx"):
        ends = {"batch:batch_size=1000": ""} if method == "FedBN" else _PLAIN
        given = {"method": method, "adapted": ends, **morpho}
        yield _table("FedBN", "17", "digits_morpho", "Morpho-MNIST", **given)
    for dataset, printed in (
        *(("office_caltech10", "Office-Caltech10"), ("domainnet", "DomainNet")),
        ("abide", "ABIDE"),
    ):
        count = OF_EACH.get(dataset)
        samples = dict.fromkeys(DOMAINS[dataset].values(), count) if count else {}
        yield _table("FedBN", "1", dataset, printed, kind="internal", target="", samples=samples)


def _fedig() -> Iterator[PaperTable]:
    """Tables 5, 3, 7, 8, 1, 2, 6 and 9 to 11; a report has no mean of Table 12."""
    of = partial(_table, "FedIG-A", start=WEIGHTS)
    inference = _PLAIN | {text: row.removeprefix("FedIG") for row, text in INFERENCE.items()}
    yield of("5", "pacs", "PACS", average=True, adapted=_ADAPTER)
    yield of("3", "pacs", "PACS", average=True, adapted=inference)
    yield of("7", "vlcs", "VLCS", average=True, adapted=_ADAPTER)
    yield of("8", "officehome", "OfficeHome", average=True, adapted=_ADAPTER)
    yield of("1", "pacs", "PACS", columns={}, average=True)
    yield of("2", "pacs", "PACS", columns={}, average=True)
    ranges = ("u ~ U(0.0, 0.5)", "u ~ U(0.5, 1.0)", "u ~ U(-0.1, 1.1)")
    uniform = {"FedIG": "FedIG-A, u ~ U(0, 1)"} | {name: f"FedIG-A, {name}" for name in ranges}
    given = {"average": True, "adapted": {"zero_shot_adapter": ""}, "renamed": uniform}
    yield of("6", "pacs", "PACS", **given)
    yield of("6", "vlcs", "VLCS", columns={}, **given)
    for number, alpha in (("9", 0), ("10", 0.5), ("11", 0.1)):
        setting = f"30 clients, {f'Dirichlet {alpha}' if alpha else 'iid labels'}"
        changes = {"data.partition": "dirichlet", "data.alpha": alpha} if alpha else {}
        given = {"config": "pacs_30_clients", "changes": changes, "adapted": _ADAPTER}
        yield of(number, "pacs", "PACS", setting, average=True, **given)


def _fedcd() -> Iterator[PaperTable]:
    """Tables 1 to 3, which name no weights to start from."""
    of = partial(_table, "FedCD", average=True, start=UNSTATED)
    yield of("1", "pacs", "PACS", config="pacs:protocol=fedcd")
    yield of("2", "driving", "driving (dataset generalization)")
    yield of("3", "bdd100k", "BDD100K (scene generalization)")


def _tsmobn() -> Iterator[PaperTable]:
    """Tables 1 and E.4 to E.13: the last three test four more corruptions."""
    of = partial(_table, "TsmoBN", adapted=_TSMOBN)
    for number in ("E.5", "E.8"):
        yield of(number, "digits_dg", "Digits-DG")
    for number in ("E.7", "E.10"):
        yield of(number, "camelyon17", "Camelyon17")
    yield of("E.4", "camelyon17", "Camelyon17", changes={"data.truncate": False})
    for number in ("1", "E.9"):
        yield of(number, "cifar10_c", "CIFAR-10-C (severity 1)", start=WEIGHTS)
    for kind in ("noise", "blur", "weather", "digital"):
        for number in ("E.11" if kind in ("noise", "blur") else "E.12", "E.13"):
            yield of(
                *(number, "cifar10_c", "CIFAR-10-C (severity 1), four extra corruptions"),
                f"trained with {kind} left out",
                changes={"data.corruptions": ""},
                columns={name: name for name in EXTRA},
                start=WEIGHTS,
                target=f"{kind},extra",
            )


def _unifed() -> Iterator[PaperTable]:
    """Tables 2 and 3: with and without batch norm of the client's own, inside and outside."""
    inside = {"target": "", "data.validation": 0.1, "data.test": 0.2, "patience": 0}
    kept = {"FedBN": f"FedAvg{OWN_BN}"} | {f"FedBN + {one}": f"{one}{OWN_BN}" for one in UNIFED}
    of = partial(_table, "UniFed", dataset="cifar10_c", printed="CIFAR-10-C", start=WEIGHTS)
    given = {"kind": "internal", "changes": inside, "columns": LETTERS, "target": ""}
    yield of("2", renamed=kept, **given)
    outside = partial(of, "3", changes={"patience": 0})
    served = _PLAIN | {"tsmobn": OWN_BN}
    yield outside(adapted=served, renamed={"FedBN": "its mean batch norm: no row"})
    for row, adaptation in NEVER_UPDATED.items():
        yield outside(method=row, adapted={adaptation: row.removeprefix("FedBN")})


# If several are as near to a run, the first one stands beside it.
PAPER_TABLES = (*_fedbn(), *_fedig(), *_fedcd(), *_tsmobn(), *_unifed())
