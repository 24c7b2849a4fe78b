"""Names are any text: files stay in their folders, no two share one, no page or plot reads them."""

import csv
import io
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fedjax_bn.arguments.text import cell, file_name, shown
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.report import blocks, page
from fedjax_bn.report.comparison import text_files
from fedjax_bn.report.results import Cell, Interval, Row, Table
from fedjax_bn.tasks.figures import on_plot, png
from fedjax_bn.training import plots
from fedjax_bn.training.callbacks.tensorboard import scalars_of
from fedjax_bn.training.evaluation.answers import Answers, predictions_of
from pages import Page

ODD = (
    *("../../evil", "..", ".", "", "/etc/passwd", "a\\b", "C:evil", "~root", "$HOME", "a$b$c"),
    *("con", "NUL.txt", "com1 .x", "trailing.", "trailing ", " leading", "-rf", "_hidden"),
    *("a\nb", "a\0b", "\x1b[31mred", "\udcff\udcfe", "\u202egpj.exe", "%2E", "%", "100%"),
    *("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "&amp;", "`#*_[x](y)"),
    *("猫", "café", "😀", "\ufffe", "x" * 300, "x" * 299 + "y", "é" * 90, r"\alpha", "$\\frac{"),
)
ANY = st.one_of(
    st.characters(), st.characters(categories=("Cs",)), st.sampled_from("./\\%$_ \n<>&")
)
TEXTS = st.one_of(st.sampled_from(ODD), st.text(ANY, max_size=150))


@settings(max_examples=300)
@given(TEXTS, TEXTS)
@example("x" * 300, "x" * 299 + "y")
@example("%2E", ".")
@example("", "%")
@example("a\udcc3\udca9", "aé")
def test_a_file_name_is_one_ordinary_part_of_a_path_and_of_one_text(first, second):
    name = file_name(first)
    assert 0 < len(name) <= 100
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set('/\\:*?"<>|$~`') - set("~" if "%~" in name else "")
    assert not {name[0], name[-1]} & {".", " "}
    assert name.split(".")[0].rstrip().lower() not in ("con", "prn", "aux", "nul", "com1", "lpt9")
    assert (name == file_name(second)) == (first == second)
    assert (shown(first) == shown(second)) == (first == second)


@pytest.mark.parametrize("name", ["mnist", "art_painting", "Real World", "a=1,b=(2)"])
def test_ordinary_names_stay_as_they_are(name):
    assert file_name(name) == shown(name) == on_plot(name) == name


@given(TEXTS)
def test_a_page_shows_a_name_and_nothing_else(text):
    """In an element, in a title and in an attribute."""
    parts = [blocks.block("heading", text), blocks.picture(text, b"")]
    reader = Page(blocks.write_page(text, parts).partition("<body>")[2])
    assert reader.tags == ["h1", "h3", "img", "script"]
    assert [value for _, value in reader.attributes[:2]] == [shown(text)] * 2
    assert reader.said.count(shown(text)) >= 2


@pytest.mark.filterwarnings("ignore:Glyph")  # which the font lacks
def test_a_plot_shows_a_name_and_no_formula():
    """Warnings are errors here, such as of hidden legend entries."""
    figure = Figure(figsize=(9, 9))
    axes = figure.subplots()
    labels = [on_plot(text) for text in ODD]
    for label in labels:
        axes.plot([0, 1], label=label)
    axes.legend(fontsize=4)
    assert [entry.get_text() for entry in axes.get_legend().get_texts()] == labels
    assert png(figure)
    dataset = domains("$a$/0", "猫", "_hidden", "\udcff", "\ta\n", count=4)
    assert plots.draw_class_counts(dataset)
    assert plots.samples(list(dataset.domains[:4]), count=2)


def domains(*names: str, count: int = 8) -> Dataset:
    rng = np.random.default_rng(0)
    made = []
    for name in names:
        images = rng.integers(0, 256, (count, 4, 4, 3), np.uint8)
        split = Split(images, np.arange(count, dtype=np.int32) % 2)
        made.append(Domain(name, split, None, split))
    return Dataset("odd", 2, tuple(made), (0.5,), (0.5,), classes=("$a$b", "_c"))


def test_every_tag_of_tensorboard_is_a_column_of_its_own():
    names = [*ODD, "a b", "a_b"]
    tags = [tag for tag, _ in scalars_of({"round": 1, "loss": dict.fromkeys(names, 1.0)})]
    assert len(set(tags)) == len(tags) == len(set(names))
    assert all(tag.encode().decode() == tag for tag in tags)


def test_a_report_of_odd_names_is_a_page_with_our_tags_only(tmp_path):
    names = [name for name in ODD[::4] if name] + ["\udcff", "<script>alert(1)</script>", "$a$"]
    by_client = dict.fromkeys(names, 1.0)
    record = {"round": 1, "loss": by_client, "weights": by_client, "seconds": 1.0}
    record["accuracy"] = by_client | {"mean": 1.0}
    accuracy = {"internal": dict.fromkeys(names, 60.0) | {"mean": 60.0}}
    accuracy["unseen"] = {name: {"running": 50.0} for name in names}
    summary = {"method": "fedbn", "dataset": "<odd>", "seed": 0, "rounds": 1, "selected_round": 1}
    summary |= {"seconds_per_round": 1.0, "samples_per_second": 1.0, "compile_seconds": 1.0}
    summary |= {"traffic": {}, "accuracy": accuracy, "last_round": accuracy}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "config.json").write_text(json.dumps({"config": {}, "data": "", "notes": names}))
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / 'unseen-"><script>planted<script>.png').write_bytes(b"planted")
    page.write_report(tmp_path)
    reader = Page((tmp_path / "report.html").read_text())
    assert reader.tags.count("script") == 1
    assert not {"iframe", "object", "embed", "link", "a", "form", "input"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert "planted" not in reader.said


def _of_answers(name):
    answers = Answers(np.array([[-1.0, 1.0]]), np.array([0]))
    split = Split(np.zeros((1, 2)), np.array([0]), names=np.array([name]))
    return predictions_of({(name, name): (answers, split, "test")}, "csv")


def _of_report(name):
    value = Interval(-2.0, -3.0, -1.0)
    row = Row("fedbn", name, name, {name: Cell(value, 1, 2, value)}, {"target": ""})
    table = Table("internal", name, "accuracy", [name], [row], name, ())
    return text_files({name: [table]})[".csv"]


@pytest.mark.parametrize("write", [_of_answers, _of_report])
@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", " =1", "\uff1d1"])
def test_no_cell_of_a_csv_is_a_formula_and_numbers_stay_numbers(write, name):
    (_, row) = csv.reader(io.StringIO(write(name)))
    assert row.count(f"'{shown(name)}") >= 2
    for text in row:
        assert not text.startswith(("=", "+", "@", "\t", "\r"))
        assert text[:1] != "-" or float(text) < 0
    assert cell("plain-name=1") == "plain-name=1"
