"""Which runs a report takes for one variant, how it calls them, and what papers print beside."""

import re

import optax
import pytest

from fedjax_bn import sharing
from fedjax_bn.data.sets.cifar10_c import INTERNAL
from fedjax_bn.methods import learning
from fedjax_bn.models import SmallCNN
from fedjax_bn.report.published import beside, cells, published
from fedjax_bn.report.results import tables_of
from fedjax_bn.report.runs import find_runs, variants_of
from fedjax_bn.run.experiment.method import own_rules
from finished_folders import counted, finished
from method_table import METHODS
from pages import page_of


def variants(folder):
    return variants_of(find_runs([folder])[0])


def printed(folder, table, method, column, adaptation=""):
    """Paper and table -> the number beside a cell of finished runs."""
    made = {one.name: one for one in tables_of(variants(folder)[0])}[table]
    (row,) = (r for r in made.rows if (r.method, r.adaptation) == (method, adaptation))
    return {one.source: one.mean for one in beside(made, row, column)}


def test_a_rule_that_is_named_is_the_methods_own_where_that_is_the_same(tmp_path):
    for name, keys in (("said", {"weigh": "by_size"}), ("silent", {})):
        finished(tmp_path, "fedprox", len(name), {"ant": 1.0}, name=name, **keys)
    finished(tmp_path, "fedbn", 0, {"ant": 1.0}, share="all_but_batch_norm")
    finished(tmp_path, "fedbn", 1, {"ant": 1.0})
    finished(tmp_path, "harmofl", 0, {"ant": 1.0}, weigh="uniform", name="h0")
    finished(tmp_path, "harmofl", 1, {"ant": 1.0}, name="h1")
    found, _ = variants(tmp_path)
    assert [(one.label, len(one.runs)) for one in found] == [
        *(("fedbn", 2), ("harmofl", 2), ("fedprox", 2))
    ]


def test_a_methods_own_weighing_is_no_difference_of_the_runs(tmp_path):
    for method in ("fedavg", "fedcd", "harmofl"):
        finished(tmp_path / "own", method, 0, {"ant": 1.0})
    assert not any("differ in more" in text for text in page_of(tmp_path / "own").paragraphs)
    finished(tmp_path / "given", "fedavg", 0, {"ant": 1.0}, weigh="uniform")
    finished(tmp_path / "given", "fedprox", 0, {"ant": 1.0})
    (one,) = (t for t in page_of(tmp_path / "given").paragraphs if "differ in more" in t)
    assert one.endswith("weigh is uniform (fedavg), by_size (fedprox).")


def test_own_rules_are_those_with_which_methods_build_their_federation(monkeypatch):
    given = {}

    def kept(client, *, share=sharing.everything, weigh=None, **options):
        given["share"], given["weigh"] = share, weigh
        return real(client, share=share, weigh=weigh, **options)

    real = learning.federate
    monkeypatch.setattr(learning, "federate", kept)
    model = SmallCNN(widths=(2, 2, 2), num_classes=2)
    norm_free = SmallCNN(widths=(2, 2, 2), num_classes=2, norm="none")
    for name in METHODS:
        more = {"spectra": 8} if name == "feddg" else {}
        METHODS[name](norm_free if name == "fedwon" else model, optax.sgd(0.1), **more)
        own = own_rules(name)
        assert own["weigh"] in str(given["weigh"] or "by_size"), name
        if given["share"] in vars(sharing).values():
            assert given["share"] is getattr(sharing, own["share"]), name


def table_of(**where):
    return {(cell.method, cell.column): cell.mean for cell in published(**where)}


def test_outside_two_papers_print_numbers_and_the_run_differs_from_each(tmp_path):
    never = ("initial:affine=False", "tsmobn:affine=False")  # updated, UniFed's FedBN
    unseen = {"frost": dict.fromkeys(("running", "tsmobn", "batch", *never), 60.0)}
    keys = {"data__domains": list(INTERNAL), "patience": 10}
    for method in ("fedbn", "fedavg"):
        finished(tmp_path / "runs", method, 0, {"fog": 1.0}, unseen, "cifar10_c", **keys)
    found = {
        (method, text): printed(tmp_path / "runs", "unseen", method, "frost", text)
        for method in ("fedbn", "fedavg")
        for text in unseen["frost"]
    }
    tsmobn = table_of(paper="TsmoBN", table="1")
    unifed = table_of(paper="UniFed", table="3")
    assert found["fedavg", "running"] == {
        "TsmoBN, Table 1": tsmobn["FedAvg", "frost"],
        "UniFed, Table 3": unifed["FedAvg", "frost"],
    }
    assert found["fedbn", "running"] == {"TsmoBN, Table 1": tsmobn["FedBN", "frost"]}
    ours = "FedBN+client-specific BN"
    for row, adaptation in zip(("FedBN", ours), never, strict=True):
        assert found["fedbn", adaptation] == {"UniFed, Table 3": unifed[row, "frost"]}
        assert found["fedavg", adaptation] == {}
    assert found["fedbn", "batch"] == {}
    said = [t for t in page_of(tmp_path / "runs").paragraphs if t.startswith("Beside")]
    inside, first, other = said
    assert "Table 2" in inside
    assert "target=frost (empty there); no brightness, contrast" in inside
    assert "TsmoBN, Table 1" in first
    assert "UniFed, Table 3" in other
    assert all("pretrained=empty (weights of ImageNet there)" in text for text in said)


@pytest.mark.parametrize(
    ("train", "fraction", "table", "differs"),
    [
        (743, 1.0, "Table 11", "nothing that its config states"),  # a file of 743 images a domain
        (74, 0.1, "Table 14 (data fraction 1%)", "nothing that its config states"),
        (743, 0.6, "Table 11", "nothing that its config states"),
        (1000, 1.0, "Table 11", "training samples of a client: svhn 1000 (743 there)"),
    ],
)
def test_a_paper_stands_beside_a_run_by_its_training_samples_whatever_their_share_is_called(
    tmp_path, train, fraction, table, differs
):
    keys = {"rounds": 300, "eval_every": 10, "weigh": "uniform", "data__fraction": fraction}
    place = finished(tmp_path, "fedbn", 0, {"svhn": 1.0}, None, "digits", **keys)
    counted(place, {"svhn": 10}, {}, train)
    (made,) = tables_of(variants(tmp_path)[0])
    (said,) = beside(made, made.rows[0], "svhn")
    others = "no mnist, mnist_m, synth_digits, usps here"
    assert said.source == f"FedBN, {table}"
    assert said.differs == (others if differs.startswith("nothing") else f"{differs}; {others}")


@pytest.mark.parametrize(
    ("method", "table", "title"),
    [
        ("fedig:mixing=constant:u=1.0", "1", "FedIG, Instance: u = 1.0"),
        ("fedig:lambda_2=0.0", "2", "FedIG, CACL"),
        ("fediga:mixing=uniform:low=0.5:high=1.0", "6", "FedIG-A, u ~ U(0.5, 1.0)"),
    ],
)
def test_variants_of_fedig_have_the_numbers_of_their_rows(tmp_path, method, table, title):
    end = "zero_shot_adapter" if method.startswith("fediga") else "running"
    for target in ("photo", "art_painting", "cartoon", "sketch"):
        unseen = {target: {end: 60.0}}
        more = {"target": target, "name": target}
        finished(tmp_path, method, 0, {"x": 1.0}, unseen, "pacs", **more)
    found = {one.name: one for one in tables_of(variants(tmp_path)[0])}["unseen"]
    (row,) = found.rows
    (said,) = beside(found, row, "mean")
    assert (said.source, said.mean) == (
        f"FedIG-A, Table {table}",
        table_of(paper="FedIG-A", table=table, dataset="PACS")[title, "Avg"],
    )
    assert not re.findall(r"fedig:\w+", said.differs)


def test_a_method_with_a_rule_that_no_paper_has_gets_no_number(tmp_path):
    finished(tmp_path, "fedavg", 0, {"svhn": 1.0}, None, "digits", weigh="risk_extrapolation")
    assert printed(tmp_path, "internal", "fedavg", "svhn") == {}


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
