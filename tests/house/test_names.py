"""Names are any text: files stay in their folders, no two share one, no page or plot reads them."""

import csv
import html
import html.parser
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fedjax_bn.arguments.text import cell, file_name, shown
from fedjax_bn.data.division.partition import fingerprint, share_out_domains
from fedjax_bn.data.domain import Dataset, Domain, Split
from fedjax_bn.report import blocks, page
from fedjax_bn.report.comparison import text_files
from fedjax_bn.report.intervals import Interval
from fedjax_bn.report.results import Cell, Row, Table
from fedjax_bn.tasks.figures import in_lines, on_plot, png
from fedjax_bn.training import data_plots
from fedjax_bn.training import score_tables as tables
from fedjax_bn.training.callbacks.tensorboard import scalars_of
from fedjax_bn.training.evaluation.answers import Answers, Kept, predictions_of

ODD = (
    *(
        "../../evil",
        "..",
        ".",
        "",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "C:evil",
        "~root",
        "$HOME",
        "a$b$c",
    ),
    *("con", "NUL.txt", "com1 .x", "lpt9", "trailing.", "trailing ", " leading", "-rf", "_hidden"),
    *("a\nb", "a\0b", "\x1b[31mred", "\udcff\udcfe", "\u202egpj.exe", "%2E", "%", "%~", "100%"),
    *("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "&amp;", "`#*_[x](y)"),
    *("猫", "café", "😀", "\ufffe", "x" * 300, "x" * 299 + "y", "é" * 90, r"\alpha", "$\\frac{"),
)
SURROGATES = st.characters(categories=("Cs",))
TEXTS = st.one_of(
    st.sampled_from(ODD),
    st.text(
        st.one_of(st.characters(), SURROGATES, st.sampled_from("./\\%$_ \n<>&\"'~")), max_size=150
    ),
)


@settings(max_examples=400)
@given(TEXTS)
def test_a_file_name_is_one_ordinary_part_of_a_path(text):
    name = file_name(text)
    assert 0 < len(name) <= 100
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set('/\\:*?"<>|$~`') - set("~" if "%~" in name else "")
    assert not {name[0], name[-1]} & {".", " "}
    assert name.split(".")[0].rstrip().lower() not in ("con", "prn", "aux", "nul", "com1", "lpt9")
    place = Path("/runs/one") / name
    assert place.parts == ("/", "runs", "one", name)


@settings(max_examples=400)
@given(TEXTS, TEXTS)
@example("x" * 300, "x" * 299 + "y")
@example("%2E", ".")
@example("", "%")
@example("a\udcc3\udca9", "aé")
def test_two_texts_have_two_file_names_and_are_shown_differently(one, other):
    assert (file_name(one) == file_name(other)) == (one == other)
    assert (shown(one) == shown(other)) == (one == other)


def test_a_text_shorter_than_the_limit_can_be_read_back_from_its_file_name():
    from urllib.parse import unquote_to_bytes

    for text in ODD:
        if text and len(file_name(text)) < 100:
            found = unquote_to_bytes(file_name(text)).decode("utf-8", "surrogatepass")
            assert found == text


@pytest.mark.parametrize(
    "name",
    [
        *("mnist", "art_painting", "Real World", "UCLA_1", "center0", "gaussian_noise", "LabelMe"),
        *("cifar10_c-fog-32-0a1b", "tsmobn", "images-224-12.5", "a=1,b=(2)"),
    ],
)
def test_ordinary_names_stay_as_they_are(name):
    assert file_name(name) == shown(name) == on_plot(name) == name


class _Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@given(TEXTS)
def test_a_page_shows_a_name_and_nothing_else(text):
    """In an element, in a title and in an attribute."""
    reader = _Reader()
    picture = blocks.Picture(text, b"")
    reader.feed(blocks.write_page(text, [blocks.Heading(text), picture]).partition("<body>")[2])
    reader.close()
    assert reader.tags == ["h1", "h3", "img", "script"]
    assert [value for _, value in reader.attributes[:2]] == [shown(text)] * 2
    assert reader.text.count(shown(text)) >= 2
    assert reader.text.encode()


@pytest.mark.filterwarnings("ignore:Glyph")  # which the font lacks
def test_a_plot_shows_a_name_and_no_formula():
    """Warnings are errors here, such as of hidden legend entries."""
    figure = Figure(figsize=(9, 9))
    axes = figure.subplots()
    labels = [on_plot(text) for text in ODD]
    for label in labels:
        axes.plot([0, 1], label=label)
    axes.set_title(labels[0])
    axes.legend(fontsize=4)
    assert [one.get_text() for one in axes.get_legend().get_texts()] == labels
    assert png(figure)


def test_a_long_name_is_cut_in_the_middle_in_a_plot():
    """So that names that begin alike differ."""
    assert on_plot("x" * 40) == "x" * 40
    assert on_plot("a" * 20 + "b" * 21) == "a" * 18 + "..." + "b" * 19


def test_all_of_a_long_name_is_in_the_picture_of_samples(monkeypatch):
    name = "Beth Israel Deaconess Medical Center, Boston, Massachusetts $2"
    assert in_lines(name).replace("\n", " ") == on_plot(name, 99)
    assert in_lines("x" * 255).split("\n") == ["x" * 30] * 8 + ["x" * 15]
    monkeypatch.setattr(data_plots, "png", lambda figure: figure)
    figure = data_plots.samples(domains(name, "y" * 200, "a").domains)
    figure.draw_without_rendering()
    boxes = [axes.yaxis.label.get_window_extent() for axes in figure.axes]
    for box, axes in zip(boxes, figure.axes, strict=True):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= axes.bbox.x0
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
    assert all(upper.y0 >= lower.y1 for upper, lower in itertools.pairwise(boxes))


def domains(*names: str, count: int = 8) -> Dataset:
    rng = np.random.default_rng(0)
    made = []
    for name in names:
        images = rng.integers(0, 256, (count, 4, 4, 3), np.uint8)
        split = Split(images, np.arange(count, dtype=np.int32) % 2)
        made.append(Domain(name, split, None, split))
    return Dataset("odd", 2, tuple(made), (0.5,), (0.5,), classes=("$a$b", "_c"))


def test_clients_of_two_domains_never_have_one_name():
    bigger = domains("a", count=20).domains
    dataset = domains("a/0", "b")._replace(domains=(*bigger, *domains("a/0", "b").domains))
    with pytest.raises(ValueError, match="'a/0'"):
        share_out_domains(dataset, num_clients=4)


def test_a_split_of_names_that_are_no_text_has_a_fingerprint():
    dataset = domains("a")
    (domain,) = dataset.domains
    named = [
        domain._replace(train=domain.train._replace(names=np.array([name] * 8)))
        for name in ("\udcff.jpg", "\udcfe.jpg")
    ]
    first, second = (fingerprint(dataset._replace(domains=(one,))) for one in named)
    assert first != second


def test_every_tag_of_tensorboard_is_a_column_of_its_own():
    names = [*ODD, "a b", "a_b"]
    record = {"round": 1, "loss": dict.fromkeys(names, 1.0)}
    tags = [tag for tag, _ in scalars_of(record)]
    assert len(set(tags)) == len(tags) == len(set(names))
    assert all(tag.encode().decode() == tag for tag in tags)


def summary_of(names, method="fedbn"):
    unseen = {name: {"running": 50.0} for name in names}
    internal = dict.fromkeys(names, 60.0) | {"mean": 60.0}
    about = {"seed": 0, "rounds": 1, "selected_round": 1, "seconds_per_round": 1.0}
    about |= {"samples_per_second": 1.0, "compile_seconds": 1.0, "traffic": {}}
    accuracy = {"internal": internal, "unseen": unseen}
    about |= {"accuracy": accuracy, "last_round": accuracy}
    return {"method": method, "dataset": "<odd>"} | about


def test_a_client_and_an_unseen_domain_have_columns_of_their_own():
    summary = summary_of(["a", "a [running]"])
    assert len(tables.columns(summary)) == 5


def test_a_report_of_odd_names_is_a_page_with_our_tags_only(tmp_path):
    names = [name for name in ODD[::4] if name] + ["\udcff", "<script>alert(1)</script>", "$a$"]
    by_client = dict.fromkeys(names, 1.0)
    record = {
        "round": 1,
        "loss": by_client,
        "weights": by_client,
        "seconds": 1.0,
        "accuracy": by_client | {"mean": 1.0},
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps(summary_of(names)))
    (tmp_path / "config.json").write_text(json.dumps({"config": {}, "data": "", "notes": names}))
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / 'unseen-"><script>planted<script>.png').write_bytes(b"planted")
    page.write_report(tmp_path)
    reader = _Reader()
    reader.feed((tmp_path / "report.html").read_text())
    page_tags = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "script"}
    text_tags = {"pre", "img", "small", "strong", "span", "ul", "li", "details", "summary", "div"}
    table_tags = {"table", "thead", "tbody", "tr", "th", "td", "button"}
    drawn = {"figure", "figcaption", "svg", "path", "line", "text", "polyline", "polygon", "circle"}
    assert set(reader.tags) <= page_tags | text_tags | table_tags | drawn
    assert reader.tags.count("script") == 1
    assert "planted" not in reader.text


@pytest.mark.filterwarnings("ignore:Glyph")
def test_plots_of_data_with_odd_names_are_drawn(tmp_path):
    some = ["$a$/0", "$a$/1", "猫", "_hidden", "\udcff", "\ta\n"]
    dataset = domains(*some, count=4)
    assert data_plots.class_counts(dataset)
    assert data_plots.samples(list(dataset.domains[:4]), count=2)


FORMULAS = (
    "=1+1",
    "+1",
    "-1",
    "@SUM(1)",
    "\t=1",
    "\r=1",
    " =1",
    "\n=1",
    "\uff1d1",
    '=HYPERLINK("x")',
)


def _of_answers(name):
    answers = Answers(np.array([[-1.0, 1.0]]), np.array([0]))
    split = Split(np.zeros((1, 2)), np.array([0]), names=np.array([name]))
    return predictions_of({(name, name): Kept(answers, split)}, "csv")


def _of_report(name):
    value = Interval(-2.0, -3.0, -1.0)
    row = Row("fedbn", name, name, {name: Cell(value, 1, 2, value)}, {"target": ""})
    table = Table("internal", name, "accuracy", [name], [row], name, ())
    return text_files({name: [table]})[".csv"]


@pytest.mark.parametrize("write", [_of_answers, _of_report])
@pytest.mark.parametrize("name", FORMULAS)
def test_no_cell_of_a_csv_is_a_formula_and_numbers_stay_numbers(write, name):
    (_, row) = csv.reader(io.StringIO(write(name)))
    texts = [one for one in row if one == f"'{shown(name)}"]
    assert len(texts) >= 2
    for one in row:
        if one not in texts:
            assert not one.startswith(("=", "+", "@", "\t", "\r"))
            assert one[:1] != "-" or float(one) < 0
    assert cell("plain-name=1") == "plain-name=1"
