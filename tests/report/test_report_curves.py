"""Curves of a report over rounds: measures, many variants; who won among many."""

import json
import re

import pytest

from finished_folders import finished
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
