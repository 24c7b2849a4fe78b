"""The papers' numbers as data."""

import csv

import pytest

from fedjax_bn.run.report.published import cells, published


def test_there_are_2037_numbers_of_five_papers():
    assert len(cells()) == 2037
    assert {cell.paper for cell in cells()} == {"FedBN", "FedIG-A", "TsmoBN", "UniFed", "FedCD"}
    assert all(0 < cell.mean <= 100 for cell in cells())
    assert all(cell.std is None or 0 <= cell.std < 20 for cell in cells())


def test_numbers_are_those_of_the_papers(shared):
    with open(shared / "paper_tables" / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(cells())
    for row, cell in zip(rows, cells(), strict=True):
        assert float(row["mean"]) == cell.mean
        assert (float(row["std"]) if row["std"] else None) == cell.std
        names = ("paper", "table", "dataset", "setting", "method", "metric")
        assert tuple(row[name] for name in names) == tuple(getattr(cell, name) for name in names)
        if (cell.paper, cell.table) != ("FedBN", "16"):
            assert row["column"] == cell.column


def test_cells_are_found_by_their_fields():
    found = published(paper="FedBN", table="11", method="FedBN")
    assert {cell.column: (cell.mean, cell.std) for cell in found} == {
        "SVHN": (71.04, 0.31),
        "USPS": (96.97, 0.32),
        "SynthDigits": (83.19, 0.42),
        "MNIST-M": (78.33, 0.66),
        "MNIST": (96.57, 0.13),
    }


def test_columns_of_fedbns_table_16_are_those_its_numbers_belong_to():
    found = published(paper="FedBN", table="16", method="FedBN")
    accuracy = {cell.column: cell.mean for cell in found}
    assert accuracy["MNIST"] > accuracy["USPS"] > accuracy["MNIST-M"] > accuracy["SVHN"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"papers": "FedBN"}, "'papers' is no field of a cell"),
        ({"paper": "FedBM"}, "no published paper is 'FedBM'; there are FedBN, FedCD"),
    ],
)
def test_an_unknown_field_or_value_is_an_error(where, message):
    with pytest.raises(ValueError, match=message):
        published(**where)
