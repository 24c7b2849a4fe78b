"""The numbers that the papers print, `paper_results.csv`, and the domains of their columns."""

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fedjax_bn.data.corruptions import INTERNAL

_CORRUPTIONS = (
    *("gaussian", "shot", "impulse", "defocus", "glass", "motion", "zoom", "snow", "frost", "fog"),
    *("bright", "contrast", "elastic", "pixelate", "jpeg"),
)
_SCENES = ("ClearHighway", "RainyHighway", "CityStreet", "Residential")
# data set here -> heading in the papers' tables -> domain here
DOMAINS = {
    "digits": {
        **{"SVHN": "svhn", "USPS": "usps", "SynthDigits": "synth_digits", "MNIST-M": "mnist_m"},
        "MNIST": "mnist",
    },
    "digits_morpho": {"Morpho-global": "morpho_global", "Morpho-local": "morpho_local"},
    "office_caltech10": {"A": "amazon", "C": "caltech", "D": "dslr", "W": "webcam"},
    "domainnet": {
        **{"C": "clipart", "I": "infograph", "P": "painting", "Q": "quickdraw", "R": "real"},
        "S": "sketch",
    },
    "abide": {"NYU": "NYU", "USM": "USM", "UM": "UM_1", "UCLA": "UCLA_1"},
    "pacs": {"P": "photo", "A": "art_painting", "C": "cartoon", "S": "sketch"},
    "vlcs": {"V": "VOC2007", "L": "LabelMe", "C": "Caltech101", "S": "SUN09"},
    "officehome": {"A": "Art", "C": "Clipart", "P": "Product", "R": "Real World"},
    "digits_dg": {"SVHN": "svhn", "MNIST-M": "mnist_m", "MNIST": "mnist", "SYN": "syn"},
    "camelyon17": {"hospital4": "center1", "hospital5": "center2"},  # the two that train nobody
    "cifar10_c": dict(zip(_CORRUPTIONS, INTERNAL, strict=True)),
    "driving": {"Cityscapes": "cityscapes", "Mapillary": "vistas", "BDD100K": "bdd100k"},
    "bdd100k": dict(zip(_SCENES, _SCENES, strict=True)),
}
LETTERS = dict(zip("ABCDEFGHIJKLMNO", INTERNAL, strict=True))  # headings of UniFed's Table 2
# FedBN's Table 16 prints its columns in another order than its numbers have, evidently its authors'
# order of clients:
# printed heading -> dataset that the numbers belong to.
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
    """All 2,037 published numbers, in the papers' order.

    The columns of FedBN's Table 16 are those that its numbers evidently belong to, not the printed
    (SVHN would be 99.6 %). Nothing else is corrected: FedBN+TsmoBN on MNIST in TsmoBN (99.98) is
    likely a misprint, and FedIG-A's Table 5 repeats averages of Tables 7 and 8.
    """
    text = files("fedjax_bn.report").joinpath("paper_results.csv").read_text(encoding="utf-8")
    return tuple(_cell(row) for row in csv.DictReader(text.splitlines()))


def _cell(row: dict[str, str]) -> Cell:
    cell = Cell(
        **row | {"mean": float(row["mean"]), "std": float(row["std"]) if row["std"] else None}
    )
    if (cell.paper, cell.table) == ("FedBN", "16"):
        return cell._replace(column=_TABLE_16[cell.column])
    return cell


def published(**where: str) -> tuple[Cell, ...]:
    """The cells whose fields have the given values: published(paper="FedBN", table="11").

    Raises:
      ValueError: a name is no field of `Cell`, or a value occurs in no cell.
    """
    for field, value in where.items():
        if field not in Cell._fields:
            raise ValueError(f"{field!r} is no field of a cell; fields are {Cell._fields}")
        valid = {getattr(cell, field) for cell in cells()}
        if value not in valid:
            known = ", ".join(sorted(map(str, valid)))
            raise ValueError(f"no published {field} is {value!r}; there are {known}")
    return tuple(cell for cell in cells() if all(getattr(cell, f) == v for f, v in where.items()))
