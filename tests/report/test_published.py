"""The papers' numbers as data."""

import re

import pytest

from fedjax_bn.report.published import cells, published

FILES = {
    "FedBN": "fedbn",
    "FedIG-A": "fedig",
    "TsmoBN": "tsmobn",
    "UniFed": "unifed",
    "FedCD": "fedcd",
}


def rows_as_printed() -> dict[tuple[str, ...], list]:
    """Paper and row of a table -> its cells, from left to right."""
    rows = {}
    for cell in cells():
        where = (cell.dataset, cell.setting)
        if (cell.paper, cell.table) == ("FedBN", "1"):  # three datasets beside one another
            where = ()
        if (cell.paper, cell.table) == ("FedBN", "14"):  # shares of the data beside one another
            where = (cell.column,)
        rows.setdefault((cell.paper, cell.table, *where, cell.method), []).append(cell)
    return rows


def stands_in(text: list[float], row: list) -> bool:
    """Whether the means of a row follow one another in a text, and its deviations are among them.

    Between two means may be a deviation, which some tables print in the next line.
    """
    means = [cell.mean for cell in row]
    stds = {cell.std for cell in row} - {None}
    for start in (i for i, number in enumerate(text) if number == means[0]):
        rest = iter(text[start : start + 2 * len(means) + 6])
        if all(mean in rest for mean in means) and stds <= set(text[start : start + 4 * len(row)]):
            return True
    return False


def test_every_row_of_numbers_stands_in_the_text_of_its_paper(shared):
    """The papers' own text is read; the table of numbers beside it is where ours come from."""
    texts = {
        paper: [float(number) for number in re.findall(r"\d+\.\d+", file.read_text())]
        for paper, file in (
            (paper, shared / "papers" / f"{name}.txt") for paper, name in FILES.items()
        )
    }
    rows = rows_as_printed()
    assert sum(map(len, rows.values())) == 2037
    assert [where for where, row in rows.items() if not stands_in(texts[where[0]], row)] == []


def test_an_unknown_value_is_an_error():
    with pytest.raises(ValueError, match=r"'FedBM'.*FedBN, FedCD"):
        published(paper="FedBM")
