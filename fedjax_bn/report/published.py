"""The numbers that the papers print, as data: `paper_results.csv`, one cell of a table a row."""

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

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
