"""Sweeps: listed, run and reported, on fabricated runs."""

import json
from pathlib import Path

import execute
import fedbn
import figures
import numpy as np
import plan
import pytest
import report
import sweep
import unseen

import runs
from fedjax_bn.run.config import flatten
from fedjax_bn.training import workdir

DIGITS = ("mnist", "svhn", "usps", "synth_digits", "mnist_m")
RUNS = fedbn.SWEEP.runs


def fabricate(place, name, accuracy, rounds=300, unseen=None, validation=None, **config) -> None:
    """A finished run with these accuracies of its clients, made with these changes."""
    folder = place / name
    folder.mkdir(parents=True)
    internal = dict(accuracy) | {"mean": float(np.mean(list(accuracy.values())))}
    scores = {"internal": internal, "unseen": unseen or {}}
    summary = {"method": "m", "seed": 0, "rounds": rounds, "accuracy": scores, "last_round": scores}
    (folder / "summary.json").write_text(json.dumps(summary | {"selected_round": 2}))
    losses = {r: dict.fromkeys(accuracy, 1 / r) for r in range(1, 5)}
    lines = [{"round": r, "loss": loss, "train_loss": loss} for r, loss in losses.items()]
    if validation is not None:
        lines[1]["validation"] = {"mean": validation}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config:
        flat = {key.replace("__", "."): value for key, value in config.items()}
        (folder / "config.json").write_text(json.dumps({"config": flat}))


def give(*arguments: str) -> int:
    return sweep.main(fedbn.SWEEP, list(arguments))


def test_list_prints_commands_with_the_given_path_and_changes(capsys):
    only = "digits/E4/fedbn/*,synthetic/fedavg/0"
    arguments = ("list", "--workdir", "runs/x", "--only", only)
    assert give(*arguments, "--data.digits=d.npz", "--config.rounds=7") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("python -m fedjax_bn.main --config ")
    for part in ("digits.py", "--config.method=fedbn", "--config.local_epochs=4"):
        assert part in first
    assert "--config.data.path=d.npz --config.rounds=7 --workdir runs/x/digits/E4/fedbn/0" in first
    assert "data.path" not in second
    assert give(*arguments) == 0
    assert "--config.data.path=PATH_OF_digits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("only", "count"),
    [("Table 11", 20), ("table11", 20), ("table 1", 60), ("Fig. 9", 10), ("fig4", 51)],
)
def test_only_takes_tables_and_figures_as_the_paper_numbers_them(only, count, capsys):
    give("list", "--only", only)
    assert len(capsys.readouterr().out.splitlines()) == count


def test_a_folder_holds_the_data_sets_by_their_names(tmp_path, capsys):
    (tmp_path / "digits.npz").touch()
    (tmp_path / "office").mkdir()
    give("list", "--only", "*/fedbn/0", "--data", str(tmp_path), "--data.abide=else")
    printed = capsys.readouterr().out
    assert f"--config.data.path={tmp_path}/digits.npz " in printed
    assert f"--config.data.path={tmp_path}/office " in printed
    assert "--config.data.path=else " in printed
    assert "--config.data.path=PATH_OF_domainnet " in printed


@pytest.fixture
def calls(monkeypatch):
    """Commands are noted instead of run; those of fedprox fail."""
    made = []

    def call(processes, command, **options):
        made.append(command)
        return 2 if "--config.method=fedprox" in command else 0

    monkeypatch.setattr(execute.Processes, "call", call)
    return made


def test_run_executes_what_is_not_finished_and_continues_after_a_failure(tmp_path, calls, capsys):
    fabricate(tmp_path, "abide/fedbn/3", {"NYU": 1.0})
    status = give(
        "run", "--workdir", str(tmp_path), "--only", "abide/[sf]*[a-z]/3", "--data.abide=x"
    )
    assert status == 1
    folders = [command[-1].removeprefix(f"{tmp_path}/") for command in calls]
    assert folders == ["abide/singleset/3", "abide/fedavg/3", "abide/fedprox/3"]
    said = capsys.readouterr()
    assert "abide/fedprox/3 failed with status 2" in said.err
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[:3] == [["done", "2"], ["finished", "before", "1"], ["failed", "1"]]
    assert lines[3][0] == "abide/fedprox/{3}"


def test_a_test_follows_its_training_once(tmp_path, calls):
    only = ("--workdir", str(tmp_path), "--only", "join/svhn/fedbn/0", "--data.digits=x")
    give(*only)
    assert [Path(command[1]).name for command in calls] == ["-m", "joining.py"]
    fabricate(tmp_path, "join/svhn/fedbn/0", {"usps": 90.0})
    give(*only)
    assert [Path(command[1]).name for command in calls[2:]] == ["joining.py"]
    (tmp_path / "join/svhn/fedbn/0/evaluations").mkdir()
    (tmp_path / "join/svhn/fedbn/0/evaluations/joined.json").write_text("{}")
    give(*only)
    assert len(calls) == 3


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The report on six finished runs."""
    tmp_path = tmp_path_factory.mktemp("sweep")
    for seed, svhn in enumerate((70.0, 72.0)):
        accuracy = dict.fromkeys(DIGITS, 90.0) | {"svhn": svhn}
        fabricate(tmp_path, f"digits/E1/fedbn/{seed}", accuracy)
    fabricate(tmp_path, "digits/E1/fedavg/0", dict.fromkeys(DIGITS, 60.0), rounds=20)
    several = {f"{d}/{k}": 50.0 + 10 * k for d in DIGITS for k in range(3)}
    fabricate(tmp_path, "digits/clients3/fedbn/0", several)
    unseen = {"morpho_global": {"running": 10.0, fedbn.OWN_STATISTICS: 92.0}}
    fabricate(tmp_path, "morpho/fedbn/0", dict.fromkeys(DIGITS, 95.0), unseen=unseen)
    fabricate(tmp_path, "synthetic/fedbn/0", {"identity": 100.0, "correlated": 99.0})
    assert give("report", "--workdir", str(tmp_path)) == 0
    return tmp_path


def section(folder: Path, title: str) -> str:
    text = (folder / "report.md").read_text()
    (found,) = [part for part in text.split("\n## ") if part.startswith(title)]
    return found


def test_report_has_mean_and_std_over_seeds_beside_the_published_numbers(reported):
    table = section(reported, "Table 11")
    assert "| FedBN | measured, 2 of 5 runs | 71.00 (1.41) | 90.00 (0.00) |" in table
    assert "|  | published | 71.04 (0.31) | 96.97 (0.32) |" in table
    assert "| FedAvg | measured, 1 of 5 runs | 60.00 |" in table
    assert "| SingleSet | measured, 0 of 5 runs | - | - |" in table
    assert "fonts" not in table
    assert (reported / "report.md").read_text().startswith("# FedBN")
    assert f"6 of {len(RUNS)} runs have finished" in (reported / "report.md").read_text()
    drawn = {path.stem for path in (reported / "figures").iterdir()}
    assert drawn == {"fig3", "fig4a", "fig4b", "fig4c", "fig5", "fig7-E1", "fig9"}


def test_a_number_says_in_what_its_runs_differ_from_the_plan(tmp_path):
    accuracy = dict.fromkeys(DIGITS, 50.0)
    planned = {"model": "DigitCNN", "batch_size": 32, "rounds": 300, "data__path": "x"}
    fabricate(tmp_path, "digits/E1/fedbn/0", accuracy, **planned)
    other = planned | {"model": "SmallCNN", "batch_size": 7}
    fabricate(tmp_path, "digits/E1/fedavg/0", accuracy, **other)
    shown = plan.Figure("fig", "Fig. X: loss", fedbn.METHODS_TABLE.runs, lambda workdir: None)
    report.write_report(plan.Sweep("s", "S", (fedbn.METHODS_TABLE,), (shown,)), tmp_path)
    table = section(tmp_path, "Table 11")
    assert "| FedAvg | measured, 1 of 5 runs | 50.00 [1,2] |" in table
    assert "| FedBN | measured, 1 of 5 runs | 50.00 | 50.00 |" in table
    said = "[1] batch_size is 7 (planned: 32); [2] model is SmallCNN (planned: DigitCNN)."
    assert f"Differs from the plan: {said}" in table
    assert said in section(tmp_path, "Fig. X")


def test_curves_of_runs_of_unequal_length_are_means_of_those_that_have_the_round(tmp_path):
    records = [[{"loss": {"a": 4.0}}, {"loss": {"a": 2.0}}], [{"loss": {"a": 2.0}}]]
    mean = figures.mean_over(records, ("loss", "a"))
    np.testing.assert_array_equal(mean, [3.0, 2.0])
    fabricate(tmp_path, "x/0", {"a": 1.0, "b": 2.0})
    for keys in (("loss", "a"), ("loss",)):
        assert figures.curves(tmp_path, {"panel": {"line": (("x/0", "absent"), keys)}}, "y")
        assert figures.curves(tmp_path, {"panel": {"line": (("absent",), keys)}}, "y") is None


def test_of_several_trainings_the_one_with_the_best_validation_counts_by_target(tmp_path):
    trainings = [plan.Training(name, {"method": "fedavg"}) for name in ("one", "two")]
    columns = plan.left_out({"A": "a", "B": "b"})
    protocol = plan.Protocol("p", "configs/digits.py", columns, 1, {}, {})
    table = plan.table("t", "T", protocol, {"best": plan.Row(tuple(trainings))}, average="mean")
    for target, name, validation, score in (
        *(("a", "one", 80.0, 10.0), ("a", "two", 70.0, 99.0)),
        *(("b", "one", 60.0, 99.0), ("b", "two", 61.0, 30.0)),
    ):
        measured = {"unseen": {target: {"running": score}}, "validation": validation}
        fabricate(tmp_path, f"p/{target}/{name}/0", {"c": 1.0}, **measured)
    done = {run.name: report.read_results(tmp_path, run) for run in table.runs}
    assert [report.measured(cell, done)[0] for cell in table.rows["best"]] == [10, 30, 20]
    assert "best: by validation p/a/one, p/b/two." in report.notes(table, done, {})


def test_a_report_marks_runs_that_trained_on_other_numbers_of_samples(tmp_path):
    changes = {"data.fraction": 1.0, "data.truncate": True}
    planned = plan.configuration("configs/digits.py", changes)
    for method, counts in {"fedavg": [7437, 7438, 14], "fedbn": [7438, 743, 743]}.items():
        config = dict(flatten(planned)) | {"method": method}
        fabricate(tmp_path, f"digits/data100/{method}/0", dict.fromkeys(DIGITS, 50.0))
        folder = tmp_path / f"digits/data100/{method}/0"
        (folder / "config.json").write_text(json.dumps({"config": config}))
        clients = dict(zip(("mnist", "svhn", "other"), counts, strict=True))
        facts = {name: {"train": {"samples": count}} for name, count in clients.items()}
        (folder / "data.json").write_text(json.dumps({"clients": facts}))
    (averaged,) = (run for run in RUNS if run.name == "digits/data100/fedavg/0")
    assert report.differences(tmp_path, averaged) == ()
    give("report", "--workdir", str(tmp_path))
    text = (tmp_path / "report.md").read_text()
    said = "[1] training samples of a client: svhn 743 (planned: 7438)"
    assert f"Differs from the plan: {said}." in text
    assert "50.00 [1]" in text


def test_the_mean_over_targets_is_taken_by_seed_and_only_of_whole_seeds(tmp_path):
    chosen = [
        run
        for run in unseen.SWEEP.runs
        if "/fedavg/" in run.name and run.name.startswith("digits/")
    ]
    random = np.random.default_rng(0)
    values = {run.name: float(random.uniform(20, 80)) for run in chosen}
    missing = chosen[0].name  # one target of seed 0
    for run in chosen:
        if run.name != missing:
            row = {"running": values[run.name], "tsmobn": 0.0}
            fabricate(tmp_path, run.name, {"a": 50.0}, unseen={run.changes["target"]: row})
    report.write_report(unseen.SWEEP, tmp_path)
    done = {r.name: report.read_results(tmp_path, r) for r in chosen if r.name != missing}
    cell = unseen.TABLES[0].rows["FedAvg"][-1]
    means = [
        np.mean([value for name, value in values.items() if name.endswith(f"/{seed}")])
        for seed in (1, 2)
    ]
    ours = report.measured(cell, done)
    assert ours == pytest.approx((np.mean(means), np.std(means, ddof=1)))
    assert (tmp_path / "figures" / "digits-bars.png").exists()


@pytest.mark.slow
def test_a_fabricated_run_has_the_form_of_a_finished_one(tmp_path):
    """So that a report reads of a finished run what it reads here."""
    fabricate(tmp_path, "made", {"ant": 1.0}, unseen={"dog": {"running": 1.0}}, validation=1.0)
    places = tmp_path / "made", runs.finished(tmp_path / "real")
    assert_part_of(*(workdir.read_json(place / "summary.json") for place in places))
    made, found = (runs.lines(place)[1] for place in places)
    del made["train_loss"]  # only with eval_train_loss
    assert_part_of(made, found)


def assert_part_of(made, found):
    """Every key of one is a key of the other; both hold numbers, texts or more keys there."""
    for key, value in made.items():
        if isinstance(value, dict):
            assert_part_of(value, found[key])
        assert isinstance(found[key], float | int) == isinstance(value, float | int), key
