"""Which samples the scores of a report are of, and over which clients its differences are."""

import csv
import json

import numpy as np
import pytest
from scipy import stats

import runs
from fedjax_bn.report.page import write_comparison
from fedjax_bn.training.records import by_client
from fedjax_bn.training.workdir import read_json
from finished_folders import counted, finished
from pages import Page

FEDAVG = {"ant": (60, 61, 64), "bee": (81, 80, 82)}
FEDBN = {"ant": (70, 72, 71), "bee": (90, 92, 94)}


def written(folder, **options):
    out = folder / "page.html"
    write_comparison([folder / "runs"], out, **options)
    return Page(out.read_text()), out.read_text()


def compared(folder, **more):
    """The page on three seeds of two methods that differ in every seed and client."""
    for seed in range(3):
        for method, rows in (("fedavg", FEDAVG), ("fedbn", FEDBN)):
            scores = {name: row[seed] for name, row in rows.items()}
            unseen = {"dog": {"running": scores["ant"]}}
            finished(folder / "runs", method, seed, scores, unseen, **more)
    return written(folder)


def test_samples_that_chose_the_round_show_no_difference_that_is_real(tmp_path):
    page, text = compared(tmp_path, tested_on="validation")
    inside, outside = page.paragraphs[:2]
    assert "on validation samples" in inside
    assert "real" not in inside
    assert "chose the round" in inside
    assert outside.endswith("the difference is real.")  # these samples chose nothing
    first, second = page.tables[:2]
    assert first[0][0] == "internal, validation"
    assert not any(mark in row[2] for row in first for mark in "▲▼")
    assert second[0][0] == "unseen"
    assert any("▲" in row[2] for row in second)
    assert "Validation scores of internal clients" in text
    assert "Test scores of unseen domains" in text
    assert "Validation accuracy in percent, internal" in (tmp_path / "page.md").read_text()
    rows = list(csv.DictReader((tmp_path / "page.csv").read_text().splitlines()))
    parts = {(row["table"], row["tested_on"]) for row in rows}
    assert parts == {("internal", "validation"), ("unseen", "test")}


def test_samples_that_chose_nothing_show_it_as_before(tmp_path):
    page, text = compared(tmp_path)
    assert [said.endswith("the difference is real.") for said in page.paragraphs[:2]] == [True] * 2
    assert page.tables[0][0][0] == "internal"
    assert "▲" in page.tables[0][2][2]
    assert "alidation" not in " ".join(page.paragraphs)
    assert "Test scores of internal clients" in text


def test_a_run_with_a_test_part_is_not_ranked_beside_one_without(tmp_path):
    finished(tmp_path / "runs", "fedavg", 0, {"ant": 60.0})
    finished(tmp_path / "runs", "fedbn", 0, {"ant": 90.0}, tested_on="validation")
    page, _ = written(tmp_path)
    assert [row[0] for row in page.tables[0][1:]] == ["fedavg (test)", "fedbn (validation)"]
    assert "none is the best" in page.paragraphs[0]
    assert not any("*" in text for row in page.tables[0] for text in row)


@pytest.mark.parametrize("part", ["test", "validation"])
def test_every_sentence_and_table_of_a_run_says_which_samples_are_scored(
    tmp_path, monkeypatch, capsys, part
):
    data = runs.DATA._replace(domains=runs.DATA.domains[:3])
    if part == "validation":
        untested = (domain._replace(test=domain.validation) for domain in data.domains)
        data = data._replace(domains=tuple(untested))
    runs.install(monkeypatch, data)
    monkeypatch.setattr("fedjax_bn.report.plots.methods", heads := _Labels("methods"))
    folder = tmp_path / "runs" / "run"
    options = {"target": "", "rounds": 2, "baselines": "", "predictions": "csv"}
    changes = [f"--config.{key}={value}" for key, value in options.items()]
    config = tmp_path / "config.py"
    config.write_text("from runs import config\ndef get_config(changes=''):\n    return config()\n")
    assert runs.command("--config", str(config), *changes, "--workdir", str(folder)) == 0
    assert heads.parts == [part]
    assert read_json(folder / "summary.json")["tested_on"] == {"internal": part}
    printed = capsys.readouterr().out
    assert ("validation accuracy %  " in printed) == (part == "validation")
    text = (folder / "report.html").read_text()
    page = Page(text)
    said = " ".join(
        (*page.paragraphs, *(cell for table in page.tables for row in table for cell in row))
    )
    words = (f"{part} accuracy", f"n: {part} samples", f"Measures of {part} samples")
    assert all(word in said for word in words)
    assert f"{part.capitalize()} scores of internal clients" in text
    assert f", {sum(len(domain.test.images) for domain in data.domains)} {part} samples" in said
    if part == "validation":
        assert not any(word in text for word in ("est accuracy", "est samples", "is real"))
        assert "test: samples" not in said
        assert "internal clients (validation samples)" in said
    answers = csv.DictReader(
        (folder / "answers" / "internal-predictions.csv").read_text().splitlines()
    )
    assert {row["part"] for row in answers} == {part}


class _Labels:
    """Stands for a plot, and remembers the part that its summaries state."""

    def __init__(self, name):
        self.name, self.parts = name, []

    def __call__(self, summaries):
        self.parts += [summary["tested_on"]["internal"] for summary in summaries]
        return b""


FIVE = {"ant": 90.0, "bee": 80.0, "cow": 70.0, "dog": 60.0, "elk": 95.0}
FOUR = {"bee": 75.0, "cow": 70.0, "dog": 40.0, "fox": 20.0}
COMMON = ("bee", "cow", "dog")


def difference(page):
    """What stands in the column of differences of the second row, and its sentence."""
    return page.tables[0][2][2], page.paragraphs[0]


def test_a_difference_is_over_the_clients_that_both_runs_have(tmp_path):
    for method, scores in (("fedavg", FOUR), ("fedbn", FIVE)):
        counted(finished(tmp_path / "runs", method, 0, scores), dict.fromkeys(scores, 40), {})
    shown, said = difference(written(tmp_path)[0])
    shares = [np.array([scores[name] for name in COMMON]) / 100 for scores in (FIVE, FOUR)]
    limits = []  # of each mean: Wilson's limits by client, combined by their squared distances
    for share in shares:
        counts = np.round(40 * share).astype(int).tolist()
        ends = [stats.binomtest(n, 40).proportion_ci(method="wilson") for n in counts]
        away = np.abs(np.array([[*end] for end in ends]) - share[:, None])
        limits.append(np.sqrt((away**2).sum(0)) / len(share))
    gap = shares[0].mean() - shares[1].mean()
    low = gap - np.hypot(limits[0][0], limits[1][1])
    high = gap + np.hypot(limits[0][1], limits[1][0])
    assert shown.split(" | ")[:2] == [
        f"{100 * gap:+.1f}",
        f"{100 * low:+.1f} to {100 * high:+.1f}",
    ]
    assert shown.endswith("3 common")
    assert "none is the best" in said
    (row,) = (
        row
        for row in csv.DictReader((tmp_path / "page.csv").read_text().splitlines())
        if (row["variant"], row["column"]) == ("fedbn", "mean")
    )
    assert (float(row["difference"]), row["common"]) == (pytest.approx(100 * gap), "3")


def test_over_seeds_too_the_difference_is_over_common_clients(tmp_path):
    random, gaps = np.random.default_rng(0), []
    for seed in range(3):
        both = []
        for method, names in (("fedavg", FOUR), ("fedbn", FIVE)):
            scores = {name: float(random.uniform(40, 90)) for name in names}
            finished(tmp_path / "runs", method, seed, scores)
            both.append(np.mean([scores[name] for name in COMMON]))
        gaps.append(both[1] - both[0])
    low, high = stats.t.interval(0.95, 2, np.mean(gaps), stats.sem(gaps))
    shown, _ = difference(written(tmp_path)[0])
    assert f"{np.mean(gaps):+.1f} | {low:+.1f} to {high:+.1f} | 3 common" in shown


def test_without_a_common_client_there_is_no_difference(tmp_path):
    finished(tmp_path / "runs", "fedavg", 0, {"ant": 60.0, "bee": 50.0})
    finished(tmp_path / "runs", "fedbn", 0, {"cow": 90.0, "dog": 80.0})
    shown, _ = difference(written(tmp_path)[0])
    assert shown == ""


@pytest.mark.parametrize("same", [True, False])
def test_means_over_many_clients_are_compared_if_the_clients_are_the_same(tmp_path, same):
    for method, count in (("fedavg", 200), ("fedbn", 200 if same else 150)):
        names = [f"toy/{k}" for k in range(count)]
        scores = by_client(names, np.full(count, 50.0 if method == "fedavg" else 60.0), 100)
        place = finished(tmp_path / "runs", method, 0, scores)
        about = read_json(place / "config.json") | {"form": {"clients": names}}
        (place / "config.json").write_text(json.dumps(about))
    shown, _ = difference(written(tmp_path)[0])
    assert shown == ("+10.0" if same else "")


def test_the_size_of_the_masks_is_stated(tmp_path):
    sizes = {"fedavg": [64, 48, 3], "fedbn": [32, 32, 3]}
    for method, shape in sizes.items():
        place = finished(tmp_path / "runs", method, 0, {"ant": 70.0})
        summary = read_json(place / "summary.json") | {"score": "Dice"}
        (place / "summary.json").write_text(json.dumps(summary))
        about = read_json(place / "config.json") | {"form": {"shape": shape}}
        (place / "config.json").write_text(json.dumps(about))
    said = " ".join(written(tmp_path)[0].paragraphs)
    assert "Dice is taken at 64 x 48 pixels (fedavg) and 32 x 32 pixels (fedbn)" in said
