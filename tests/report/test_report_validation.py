"""Which samples the scores of a report are of, and over which clients its differences are."""

import csv
import json

import numpy as np
import pytest
from scipy import stats

import runs
from fedjax_bn.training.records import by_client
from fedjax_bn.training.workdir import read_json
from finished_folders import counted, finished
from pages import Page, page_of

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
