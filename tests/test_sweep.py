"""Sweeps: listed, run and reported, on fabricated runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "launch" / "sweeps"))

import fedbn  # noqa: E402
import report  # noqa: E402
import sweep  # noqa: E402

from fedjax_bn.run.config import assign, base  # noqa: E402
from fedjax_bn.run.report.published import published  # noqa: E402

DIGITS = ("mnist", "svhn", "usps", "synth_digits", "mnist_m")


def fabricate(workdir, name, accuracy, rounds=300, unseen=None) -> None:
    """A finished run with these accuracies of its clients."""
    folder = workdir / name
    folder.mkdir(parents=True)
    internal = dict(accuracy) | {"mean": float(np.mean(list(accuracy.values())))}
    scores = {"internal": internal, "unseen": unseen or {}}
    summary = {"method": "m", "seed": 0, "rounds": rounds, "accuracy": scores, "last_round": scores}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [{"round": r, "loss": dict.fromkeys(accuracy, 1 / r)} for r in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def give(*arguments: str) -> int:
    return sweep.main(fedbn.SWEEP, list(arguments))


def test_runs_have_names_of_their_own_and_config_files_that_exist():
    names = [run.name for run in fedbn.RUNS]
    assert len(names) == len(set(names))
    missing = {run.config for run in fedbn.RUNS if not (ROOT / run.config).is_file()}
    assert not missing


def test_every_change_is_a_valid_key_and_value():
    config = base()
    for run in fedbn.RUNS:
        for key, value in run.changes.items():
            assign(config, key, sweep._text(value))


def test_every_number_of_fedbns_tables_has_its_cell():
    placed = [
        cell.published[0]
        for table in fedbn.tables()
        for row in table.rows.values()
        for cell in row
        if cell.published
    ]
    assert sorted(placed) == sorted(cell.mean for cell in published(paper="FedBN"))


def test_every_run_serves_a_table_or_a_figure_and_every_part_has_runs():
    parts = [*fedbn.tables(), *fedbn.all_figures()]
    needed = {name for part in parts for name in sweep.runs_of(part)}
    assert needed == {run.name for run in fedbn.RUNS}
    assert all(sweep.runs_of(part) for part in parts)
    for table in fedbn.tables():
        for row in table.rows.values():
            assert len(row) == len(table.columns)
            assert all(cell.runs for cell in row)


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


def test_only_takes_the_names_of_tables_and_figures(capsys):
    give("list", "--workdir", "w", "--only", "table11")
    assert len(capsys.readouterr().out.splitlines()) == 20
    give("list", "--workdir", "w", "--only", "fig9")
    assert len(capsys.readouterr().out.splitlines()) == 10


@pytest.mark.parametrize(
    "wrong", [("--data.digit=x",), ("--data.digits",), ("--only", "nothing"), ("--onl", "x")]
)
def test_a_wrong_argument_ends_with_a_sentence(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        give("list", "--workdir", "w", *wrong)
    assert stop.value.code
    assert "digit" in capsys.readouterr().err + str(stop.value.code) or wrong[0].startswith("--onl")


@pytest.fixture
def calls(monkeypatch):
    """Commands are noted instead of run; those of fedprox fail."""
    made = []

    def run(command):
        made.append(command)
        return subprocess.CompletedProcess(
            command, 2 if "--config.method=fedprox" in command else 0
        )

    monkeypatch.setattr(subprocess, "run", run)
    return made


def test_run_executes_what_is_not_finished_and_goes_on_after_a_failure(tmp_path, calls, capsys):
    fabricate(tmp_path, "abide/fedbn/3", {"NYU": 1.0})
    status = give("run", "--workdir", str(tmp_path), "--only", "abide/*/3", "--data.abide=x")
    assert status == 1
    folders = [command[-1].removeprefix(f"{tmp_path}/") for command in calls]
    assert folders == ["abide/singleset/3", "abide/fedavg/3", "abide/fedprox/3"]
    assert "failed: abide/fedprox/3" in capsys.readouterr().err


def test_run_says_which_data_it_waits_for(tmp_path, calls, capsys):
    assert give("run", "--workdir", str(tmp_path), "--only", "abide/*,synthetic/fedbn/0") == 0
    assert len(calls) == 1
    assert "20 runs wait for --data.abide=PATH" in capsys.readouterr().err


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
    assert f"6 of {len(fedbn.RUNS)} runs have finished" in (reported / "report.md").read_text()


def test_report_names_missing_runs_and_other_numbers_of_rounds(reported):
    table = section(reported, "Table 11")
    assert "Missing: digits/E1/singleset/{0,1,2,3,4}, digits/E1/fedavg/{1,2,3,4}," in table
    assert "digits/E1/fedbn/{2,3,4}" in table
    assert "Rounds of the finished runs: 20, 300." in table


def test_an_unseen_domain_is_reported_with_the_tables_adaptation(reported):
    assert "measured, 1 of 1 runs | 92.00 | - |" in section(reported, "Table 17")


def test_several_clients_of_a_domain_count_as_their_mean():
    summary = {"accuracy": {"internal": {"usps/0": 50.0, "usps/1": 70.0}, "unseen": {}}}
    assert report.accuracy(summary, "usps", "running") == 60
    assert report.accuracy(summary, "mnist", "running") is None


def test_figures_are_png_images_and_empty_ones_are_left_out(reported):
    from PIL import Image

    drawn = {path.stem for path in (reported / "figures").iterdir()}
    assert drawn == {"fig3", "fig4a", "fig4b", "fig4c", "fig5", "fig9"}
    for path in (reported / "figures").iterdir():
        with Image.open(path) as image:
            assert image.format == "PNG"


def test_a_report_on_nothing_names_every_run(tmp_path):
    give("report", "--workdir", str(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert f"0 of {len(fedbn.RUNS)} runs" in text
    assert all(f"{run.name.rpartition('/')[0]}/{{0" in text for run in fedbn.RUNS)
    assert not (tmp_path / "figures").exists()


def test_the_script_lists_from_any_folder(tmp_path):
    script = str(ROOT / "launch" / "sweeps" / "fedbn.py")
    arguments = [sys.executable, script, "list", "--workdir", "w", "--only", "fig9"]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 10
