"""What a report shows, read from its page and its tables."""

import csv
import html
import itertools
import json
import re

import numpy as np
import pytest
from scipy import stats

import runs
from fedjax_bn.arguments.errors import ConfigError, WorkdirError
from fedjax_bn.data.domain import Split
from fedjax_bn.report.page import write_comparison
from fedjax_bn.report.runs import find_runs
from fedjax_bn.run.config import flatten
from fedjax_bn.run.config.file import read, split_changes
from fedjax_bn.training.evaluation.answers import Answers, write_answers
from finished_folders import counted, finished
from pages import curves_of, page_of

FEDBN = {"ant": (70, 72, 71), "bee": (80, 82, 84)}
FEDAVG = {"ant": (60, 61, 64), "bee": (81, 80, 82)}
GAPS = np.mean([FEDBN["ant"], FEDBN["bee"]], 0) - np.mean([FEDAVG["ant"], FEDAVG["bee"]], 0)


def three_seeds(folder):
    """Six runs, three seeds of two methods, whose scores are FEDBN and FEDAVG."""
    for seed in range(3):
        for method, scores in (("fedavg", FEDAVG), ("fedbn", FEDBN)):
            finished(folder, method, seed, {name: row[seed] for name, row in scores.items()})
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page on six runs, and where its files are."""
    place = tmp_path_factory.mktemp("report")
    three_seeds(place)
    return page_of(place), place


def test_the_first_table_has_means_over_seeds_and_students_interval(report):
    table = report[0].tables[0]
    assert table[0] == ["internal", "mean", "vs fedavg", "ant", "bee", "seeds", "n"]
    means = np.mean([FEDBN["ant"], FEDBN["bee"]], axis=0)
    low, high = stats.t.interval(0.95, 2, means.mean(), stats.sem(means))
    score = f"{means.mean():.1f} ({means.std(ddof=1):.1f})"
    assert table[2][:2] == ["fedbn", f"*{score} | {low:.1f} to {high:.1f}"]
    assert table[2][-2:] == ["3", "?"]
    assert table[1][4].startswith("81.0 (1.0)")  # not bold: fedbn has 82.0 on bee
    assert table[2][4].startswith("*82.0 (2.0)")


def test_the_difference_to_the_baseline_is_paired_by_seed(report):
    low, high = stats.t.interval(0.95, 2, GAPS.mean(), stats.sem(GAPS))
    assert low > 0
    assert report[0].tables[0][2][2] == f"▲ {GAPS.mean():+.1f} | {low:+.1f} to {high:+.1f}"
    assert report[0].tables[0][1][2] == "baseline"
    verdict = report[0].paragraphs[0]
    assert f"fedbn has 76.5 % accuracy, the best here: {GAPS.mean():+.1f} points" in verdict
    assert "3 seeds" in verdict
    assert "real" in verdict


def test_scores_with_batch_statistics_stand_beside_and_a_difference_is_a_caution(tmp_path):
    for (seed, gain), method in itertools.product(enumerate((9, 11, 13)), ("fedavg", "fedbn")):
        place = finished(tmp_path, method, seed, {"ant": 60.0 + seed, "bee": 70.0}) / "summary.json"
        summary, more = json.loads(place.read_text()), gain - 11 * (method == "fedbn")
        scores = summary["accuracy"]["internal"].items()
        summary["batch_statistics"] = {name: score + more for name, score in scores}
        place.write_text(json.dumps(summary))
    page = page_of(tmp_path)
    (table,) = (table for table in page.tables if "batch" in table[0])
    low, high = stats.t.interval(0.95, 2, 11, stats.sem((9, 11, 13)))
    row = ["fedavg", "running", "mean", "65.5", "76.5", "+11.0", f"{low:+.1f}", f"{high:+.1f}"]
    assert table[1] == row
    assert [line[:3] for line in table[2:4]] == [["fedavg", "running", n] for n in ("ant", "bee")]
    cautions = [text for text in page.paragraphs if "statistics=precise" in text]
    assert [text.partition(":")[0] for text in cautions] == ["fedavg"]
    assert f"{low:+.1f} to {high:+.1f}" in cautions[0]


def test_markdown_csv_and_latex_have_the_numbers_of_the_page(report):
    place = report[1]
    rows = list(csv.DictReader((place / "page.csv").read_text().splitlines()))
    (row,) = (r for r in rows if (r["variant"], r["column"]) == ("fedbn", "mean"))
    np.testing.assert_allclose(float(row["score"]), 76.5)
    np.testing.assert_allclose(float(row["difference"]), GAPS.mean())
    assert (row["baseline"], row["seeds"], row["samples"]) == ("fedavg", "3", "")
    limits = f"{float(row['low']):.1f} to {float(row['high']):.1f}"
    score = f"76.5 ({float(row['deviation']):.1f})"
    assert f"| fedbn | **{score}** [{limits}] |" in (place / "page.md").read_text()
    latex = f"fedbn & \\textbf{{{score}}} {{\\scriptsize [{limits}]}} &"
    assert latex in (place / "page.tex").read_text()


def test_a_page_needs_nothing_else(report):
    page = report[0]
    references = [value for name, value in page.attributes if name in ("src", "href")]
    assert all(value.startswith("data:") for value in references)
    assert not re.search(r"@import|url\(|https?://", page.text)


def test_every_client_and_the_mean_have_a_curve_of_every_method_with_its_values(report):
    curves = curves_of(report[0].text)
    assert [name for name, _, _ in curves[:6]] == ["fedavg", "fedbn"] * 3
    means = [np.mean(list(scores.values())) for scores in (FEDAVG, FEDBN)]
    assert [y for _, _, y in curves[:2]] == [f"{m:.4g} {m:.4g}" for m in means]
    assert {x for _, x, _ in curves} == {"1 2"}


def test_within_one_seed_the_interval_is_wilsons_over_the_test_samples(tmp_path):
    for method, share in (("fedavg", 60.0), ("fedbn", 75.0)):
        place = finished(tmp_path, method, 0, {"ant": share}, {"dog": {"running": share}})
        counted(place, {"ant": 40}, {"dog": 80})
    page = page_of(tmp_path)
    for table, count in zip(page.tables[:2], (40, 80), strict=True):
        low, high = stats.binomtest(3 * count // 4, count).proportion_ci(method="wilson")
        assert table[2][1] == f"*75.0 | {100 * low:.1f} to {100 * high:.1f}"
        assert table[2][-2:] == ["1", str(count)]
    assert any("one seed" in text for text in page.paragraphs)
    assert any(table[0] == ["", "no", "yes"] for table in page.tables)


@pytest.mark.parametrize(
    ("samples", "changes", "equal"),
    [
        ((60, 40), {}, True),  # of 32: two batches each
        ((60, 70), {}, False),
        ((60, 70), {"local_steps": 5}, True),
        ((60, 60), {"client_epochs": [1, 2]}, False),
    ],
)
def test_the_page_says_where_fednova_can_only_be_fedavg(tmp_path, samples, changes, equal):
    for method in ("fedavg", "fednova"):
        place = finished(tmp_path, method, 0, {"ant": 60.0, "bee": 61.0}, **changes)
        counts = [{name: {"samples": n, "classes": [n]} for name in ("train", "validation", "test")}
                  for n in samples]  # fmt: skip
        facts = {"classes": ["0"], "clients": dict(zip(("ant", "bee"), counts, strict=True))}
        facts |= {"unseen": {}, "number": 2, "boxes": False, "masks": False}
        (place / "data.json").write_text(json.dumps(facts))
    assert any("equals FedAvg" in text for text in page_of(tmp_path).paragraphs) == equal


def test_models_that_answered_the_same_samples_are_compared_sample_by_sample(tmp_path):
    random = np.random.default_rng(0)
    label = random.integers(0, 2, 200)
    split = Split(random.integers(0, 255, (200, 2, 2, 1), np.uint8), label)
    right = {"fedavg": random.random(200) < 0.6}
    right["fedbn"] = right["fedavg"] | (random.random(200) < 0.1)
    for method, who in right.items():
        logits = np.float32(np.eye(2)[np.where(who, label, 1 - label)])
        place = finished(tmp_path, method, 0, {"ant": 100 * who.mean()})
        write_answers(place, {("ant", ""): (Answers(logits, label), split, "test")})
    gap = 100 * (right["fedbn"].astype(float) - right["fedavg"])
    reach = stats.norm.ppf(0.975) * gap.std() / np.sqrt(200)
    limits = f"{gap.mean() - reach:+.1f} to {gap.mean() + reach:+.1f}"
    assert page_of(tmp_path).tables[0][2][2] == f"▲ {gap.mean():+.1f} | {limits}"


def test_the_papers_number_stands_beside_a_cell_with_what_differs(tmp_path):
    keys = {"weigh": "uniform", "eval_every": 10, "data__path": "x"}
    finished(tmp_path, "fedbn", 0, {"svhn": 60.0, "fonts": 90.0}, None, "digits", **keys)
    page = page_of(tmp_path)
    head, row = page.tables[0]
    assert row[head.index("svhn")] == "60.0 | FedBN: 71.0"
    assert row[head.index("fonts")] == "90.0"
    (note,) = (text for text in page.paragraphs if text.startswith("Beside FedBN, Table 11"))
    assert note.endswith(
        "rounds=2 (300 there); no fonts there; no mnist, mnist_m, synth_digits, usps here."
    )
    assert "60.0 [FedBN: 71.0]" in (tmp_path / "page.md").read_text()


def test_the_command_that_is_shown_makes_the_run(tmp_path):
    finished(tmp_path, "fedprox:mu=0.5", 3, {"ant": 1.0}, None, "pacs", batch_size=16)
    text = page_of(tmp_path).text
    (command,) = re.findall(r"<pre>(.*?)\s*</pre>", text, re.DOTALL)
    _, _, name, *changes = html.unescape(command).split()
    made = dict(flatten(read(name, split_changes(changes)[0])))
    (run,), _ = find_runs([tmp_path])
    assert json.loads(json.dumps(made)) == run.config


def test_variants_of_a_method_are_told_by_the_keys_that_differ(tmp_path):
    for seed, mu in itertools.product((0, 1), (0.01, 0.1, 1.0)):
        finished(tmp_path, f"fedprox:mu={mu}", seed, {"ant": 50 + 10 * mu}, name=f"{seed}-{mu}")
    labels = [row[0] for row in page_of(tmp_path).tables[0][1:]]
    assert labels == [f"fedprox (fedprox:mu={mu})" for mu in (0.01, 0.1, 1.0)]


def test_what_is_unfinished_or_there_twice_is_left_out_in_a_sentence(tmp_path):
    finished(tmp_path, "fedavg", 0, {"ant": 1.0})
    finished(tmp_path, "fedavg", 0, {"ant": 2.0}, name="twice")
    (finished(tmp_path, "fedavg", 1, {"ant": 3.0}) / "summary.json").unlink()
    page = page_of(tmp_path)
    notes = " ".join(page.paragraphs)
    assert "fedavg-1 holds a run that has not finished" in notes
    assert "twice repeats" in notes
    assert page.tables[0][1][1] == "1.0"
    with pytest.raises(WorkdirError, match="fedavg-1"):
        write_comparison([tmp_path / "fedavg-1"], tmp_path / "page.html")


def test_targets_left_out_one_after_the_other_have_a_mean(tmp_path):
    for target, share in (("dog", 40.0), ("cow", 60.0)):
        finished(tmp_path, "fedbn", 0, {"ant": share}, {target: {"running": share}}, name=target)
    inside, outside = page_of(tmp_path).tables[:2]
    assert inside[0][:2] == ["internal", "mean"]
    assert {*inside[0]} >= {"mean without cow", "mean without dog"}
    assert inside[1][1] == "50.0"
    assert outside[0][:2] == ["unseen", "mean"]
    assert outside[1][:2] == ["fedbn [running]", "50.0"]


def test_an_unknown_baseline_is_named(report):
    with pytest.raises(ConfigError, match=r"'fedbm'.*'fedbn'"):
        page_of(report[1], "other", baseline="fedbm")


def test_the_command_writes_the_page_and_says_where(tmp_path, monkeypatch, capsys):
    finished(tmp_path / "runs", "fedbn", 0, {"ant": 2.0})
    monkeypatch.chdir(tmp_path)
    assert runs.command("report", "runs", "--baseline", "fedbn") == 0
    assert capsys.readouterr().out == ("written: report.html, report.md, report.tex, report.csv\n")
    for arguments in (("report", "nowhere"), ("report", "runs", "--out", "x.csv")):
        assert runs.command(*arguments) == 2
    assert "nowhere" in capsys.readouterr().err


def test_who_was_left_out_of_a_round_is_shown_with_the_reason_as_it_was_said(tmp_path):
    place = finished(tmp_path, "fedavg", 0, {"ant": 1.0})
    first, *others = runs.lines(place)
    records = [first | {"left_out": {"ward": "<b>$lied$"}}, *others]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    assert any("<b>$lied$" in row for table in page_of(tmp_path).tables for row in table)
