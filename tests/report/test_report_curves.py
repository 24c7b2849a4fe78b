"""Curves of a report, which samples its scores are of, and over which clients it differs."""

import csv
import json
import re

import numpy as np
import pytest
from scipy import stats

import runs
from fedjax_bn.training.records import by_client
from fedjax_bn.training.workdir import read_json
from finished_folders import counted, finished
from pages import CHROMIUM, Page, curves_of, in_browser, page_of

MEASURES = {"balanced_accuracy": 55.0, "auc": 0.75, "loss": 1.25, "ece": 9.5}
HEADS = ["accuracy %", "balanced accuracy %", "AUC", "cross entropy", "calibration error %"]
METHODS = (
    *("fedavg", "fedbn", "fedprox", "scaffold", "fednova", "fedadam", "moon", "feddc", "silobn"),
    *("singleset", "fedavgm", "fedyogi", "fedsam", "fixbn"),
)


def with_measures(place):
    """Writes measures of the client and of the unseen domain into the records."""
    records = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["measures"] = {k: {"ant": v * record["round"]} for k, v in MEASURES.items()}
        record["measures"]["auc"]["mean"] = None  # as of a client with one class alone
        record["unseen_measures"] = {
            "dog": {"running": MEASURES, "batch": MEASURES | {"auc": None}}
        }
    text = "".join(json.dumps(record) + "\n" for record in records)
    (place / "metrics.jsonl").write_text(text)


def section(text, title):
    """What stands in the section of that heading."""
    return text.split(f"<h3>{title}</h3>")[1].split("</section>")[0]


def panel(text, head):
    """(name, values) of the curves in a panel."""
    part = text.split(f'data-title="{head}"')[1].split('class="panel"')[0]
    return [(name, values) for name, _, values in curves_of(part)]


def test_every_measure_has_its_own_panel_of_curves(tmp_path):
    unseen = {"dog": {"running": 30.0, "batch": 40.0}}
    with_measures(finished(tmp_path, "fedbn", 0, {"ant": 60.0}, unseen))
    text = page_of(tmp_path).text
    inside, outside = (
        section(text, f"Test scores of {whom}") for whom in ("internal clients", "unseen domains")
    )
    for part in (inside, outside):
        assert re.findall(r'class="panel" data-title="([^"]*)"', part) == HEADS
    assert panel(inside, "AUC") == [("fedbn", "0.75 1.5")]  # of the client; the mean is not known
    assert panel(outside, "AUC") == [("fedbn [running]", "0.75 0.75")]
    names = [name for name, _ in panel(outside, "cross entropy")]
    assert names == ["fedbn [running]", "fedbn [batch]"]


def test_measures_stand_with_their_counts_and_one_class_has_none(tmp_path):
    place = finished(tmp_path, "fedbn", 0, {"ant": 60.0, "bee": 70.0})
    path = place / "summary.json"
    inside = {"auc": {"ant": 0.75, "bee": None, "mean": 0.75}}
    inside |= {"auc_interval": {"ant": [0.5, 1.0], "bee": None}}
    inside |= {"counts": {"ant": [30, 12], "bee": [9, 0]}}
    summary = json.loads(path.read_text()) | {"measures": {"internal": inside, "unseen": {}}}
    path.write_text(json.dumps(summary))
    text = page_of(tmp_path).text.split('<p class="soft">AUC, internal')[1].split("</table>")[0]
    mean, ant, bee = re.findall(r"<td>(?!fedbn)(.*?)</td>", text)
    assert mean == "0.750<small>1 of 2</small>"
    assert ant == "0.750<small>30/12</small><small>0.500/1.000</small>"
    assert bee == "-<small>9/0</small>"


def test_of_many_variants_the_best_and_the_baseline_are_in_colour(tmp_path):
    """The later methods are the better ones, and the baseline is the worst."""
    for rank, method in enumerate(METHODS):
        finished(tmp_path, method, 0, {"ant": 20.0 + 3 * rank})
    many = page_of(tmp_path)
    inside = section(many.text, "Test scores of internal clients")
    coloured = re.findall(r'aria-pressed="true" data-name="([^"]*)"', inside)
    assert {*coloured} == {*METHODS[:-8:-1], "fedavg"}
    grey = re.findall(r'aria-pressed="false" data-name="([^"]*)"', inside)
    assert {*coloured, *grey} == {*METHODS}
    drawn = re.findall(r'<g class="series( off)?">.*?data-name="([^"]*)"', inside)
    assert {name for off, name in drawn if off} == {*grey}
    assert [row[0] for row in many.tables[0][1:]] == [*METHODS[::-1]]  # the best first


def test_the_best_is_named_with_those_that_differ_by_chance(tmp_path):
    scores = {"fedavg": (50, 52, 51), "fedbn": (80, 82, 84), "fedprox": (79, 84, 82)}
    for method, row in scores.items():
        for seed, value in enumerate(row):
            finished(tmp_path, method, seed, {"ant": value})
    verdict = page_of(tmp_path).paragraphs[0]
    assert "fedbn has 82.0 %" in verdict
    assert verdict.endswith("the difference is real. Not distinguishable from it: fedprox.")


CLICKS = """
document.querySelectorAll("thead th button")[1].click();
const svg = document.querySelector("figure.chart svg"), box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 20, clientY: box.top + 9}));
document.querySelectorAll(".choice button")[2].click();
document.querySelector('.key button[data-name="fedbn"]').click();
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to run the page's script")
def test_a_reader_sorts_columns_reads_curves_chooses_a_measure_and_turns_a_line_off(tmp_path):
    for method, share in (("fedavg", 60.0), ("fedbn", 70.0)):
        with_measures(finished(tmp_path, method, 0, {"ant": share}))
    shown = in_browser(page_of(tmp_path).text, CLICKS, tmp_path)
    assert [row[0] for row in Page(shown).tables[0][1:]] == ["fedbn", "fedavg"]
    assert "round 2: fedavg 60, fedbn 70" in shown
    inside = section(shown, "Test scores of internal clients")
    panels = re.findall(r'<div class="panel" data-title="([^"]*)"( hidden="")?>', inside)
    assert [head for head, hidden in panels if not hidden] == ["AUC"]
    drawn = re.findall(r'<g class="series( off)?">.*?data-name="([^"]*)"', inside)
    assert {name for off, name in drawn if off} == {"fedbn"}


FEDAVG = {"ant": (60, 61, 64), "bee": (81, 80, 82)}
FEDBN = {"ant": (70, 72, 71), "bee": (90, 92, 94)}


@pytest.mark.parametrize("part", ["test", "validation"])
def test_samples_that_chose_the_round_show_no_difference_that_is_real(tmp_path, part):
    for seed in range(3):
        for method, rows in (("fedavg", FEDAVG), ("fedbn", FEDBN)):
            scores = {name: row[seed] for name, row in rows.items()}
            unseen = {"dog": {"running": scores["ant"]}}
            finished(tmp_path, method, seed, scores, unseen, tested_on=part)
    page = page_of(tmp_path)
    inside, outside = page.paragraphs[:2]
    assert ("real" in inside, "chose the round" in inside) == (part == "test", part != "test")
    assert outside.endswith("the difference is real.")  # these samples chose nothing
    first, second = page.tables[:2]
    assert (first[0][0] == "internal, validation") == (part == "validation")
    assert any("▲" in row[2] for row in first) == (part == "test")
    assert second[0][0] == "unseen"
    assert any("▲" in row[2] for row in second)
    assert f"{part.capitalize()} scores of internal clients" in page.text
    assert "Test scores of unseen domains" in page.text
    rows = csv.DictReader((tmp_path / "page.csv").read_text().splitlines())
    parts = {(row["table"], row["tested_on"]) for row in rows}
    assert parts == {("internal", part), ("unseen", "test")}


def test_a_run_with_a_test_part_is_not_ranked_beside_one_without(tmp_path):
    finished(tmp_path, "fedavg", 0, {"ant": 60.0})
    finished(tmp_path, "fedbn", 0, {"ant": 90.0}, tested_on="validation")
    page = page_of(tmp_path)
    assert [row[0] for row in page.tables[0][1:]] == ["fedavg (test)", "fedbn (validation)"]
    assert "none is the best" in page.paragraphs[0]
    assert not any("*" in text for row in page.tables[0] for text in row)


def test_every_sentence_and_table_of_a_run_says_which_samples_are_scored(
    tmp_path, monkeypatch, capsys
):
    data = runs.DATA.domains[:3]
    untested = tuple(domain._replace(test=domain.validation) for domain in data)
    runs.install(monkeypatch, runs.DATA._replace(domains=untested))
    folder = tmp_path / "runs" / "run"
    options = {"target": "", "rounds": 2, "baselines": "", "predictions": "csv"}
    changes = [f"--config.{key}={value}" for key, value in options.items()]
    config = tmp_path / "config.py"
    config.write_text("from runs import config\ndef get_config(changes=''):\n    return config()\n")
    assert runs.command("--config", str(config), *changes, "--workdir", str(folder)) == 0
    assert read_json(folder / "summary.json")["tested_on"] == {"internal": "validation"}
    assert "validation accuracy %  " in capsys.readouterr().out
    page = Page((folder / "report.html").read_text())
    text = " ".join((*page.paragraphs, *(c for table in page.tables for row in table for c in row)))
    assert "n: validation samples" in text
    assert "Measures of validation samples" in text
    assert "Validation scores of internal clients" in page.text
    assert f", {sum(len(domain.test.images) for domain in untested)} validation samples" in text
    assert not any(word in page.text for word in ("est accuracy", "est samples", "is real"))
    assert "test: samples" not in text
    answers = (folder / "answers" / "internal-predictions.csv").read_text().splitlines()
    assert {row["part"] for row in csv.DictReader(answers)} == {"validation"}


FIVE = {"ant": 90.0, "bee": 80.0, "cow": 70.0, "dog": 60.0, "elk": 95.0}
FOUR = {"bee": 75.0, "cow": 70.0, "dog": 40.0, "fox": 20.0}
COMMON = ("bee", "cow", "dog")


def test_a_difference_is_over_the_clients_that_both_runs_have(tmp_path):
    for method, scores in (("fedavg", FOUR), ("fedbn", FIVE)):
        counted(finished(tmp_path, method, 0, scores), dict.fromkeys(scores, 40), {})
    page = page_of(tmp_path)
    shares = [np.array([scores[name] for name in COMMON]) / 100 for scores in (FIVE, FOUR)]
    limits = []  # of each mean: Wilson's limits by client, combined by their squared distances
    for share in shares:
        counts = np.round(40 * share).astype(int).tolist()
        ends = [stats.binomtest(n, 40).proportion_ci(method="wilson") for n in counts]
        away = np.abs(np.array([[*end] for end in ends]) - share[:, None])
        limits.append(np.sqrt((away**2).sum(0)) / len(share))
    gap = 100 * (shares[0].mean() - shares[1].mean())
    low = gap - 100 * np.hypot(limits[0][0], limits[1][1])
    high = gap + 100 * np.hypot(limits[0][1], limits[1][0])
    shown = page.tables[0][2][2].split(" | ")
    assert shown == [f"{gap:+.1f}", f"{low:+.1f} to {high:+.1f}", "3 common"]
    assert "none is the best" in page.paragraphs[0]
    rows = csv.DictReader((tmp_path / "page.csv").read_text().splitlines())
    (row,) = (row for row in rows if (row["variant"], row["column"]) == ("fedbn", "mean"))
    assert (float(row["difference"]), row["common"]) == (pytest.approx(gap), "3")


@pytest.mark.parametrize("same", [True, False])
def test_means_over_many_clients_are_compared_if_the_clients_are_the_same(tmp_path, same):
    for method, count in (("fedavg", 200), ("fedbn", 200 if same else 150)):
        names = [f"toy/{k}" for k in range(count)]
        scores = by_client(names, np.full(count, 50.0 if method == "fedavg" else 60.0), 100)
        place = finished(tmp_path, method, 0, scores)
        about = read_json(place / "config.json") | {"form": {"clients": names}}
        (place / "config.json").write_text(json.dumps(about))
    assert page_of(tmp_path).tables[0][2][2] == ("+10.0" if same else "")


def test_the_size_of_the_masks_is_stated(tmp_path):
    for method, shape in {"fedavg": [64, 48, 3], "fedbn": [32, 32, 3]}.items():
        place = finished(tmp_path, method, 0, {"ant": 70.0})
        summary = read_json(place / "summary.json") | {"score": "Dice"}
        (place / "summary.json").write_text(json.dumps(summary))
        about = read_json(place / "config.json") | {"form": {"shape": shape}}
        (place / "config.json").write_text(json.dumps(about))
    notes = " ".join(page_of(tmp_path).paragraphs)
    assert "64 x 48 pixels (fedavg) and 32 x 32 pixels (fedbn)" in notes
