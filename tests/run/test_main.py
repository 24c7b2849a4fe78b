"""The command and the files it leaves, also where a round is not finite."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import runs
from fedjax_bn import __version__, main
from fedjax_bn.arguments.errors import NotFiniteError
from fedjax_bn.run import train
from fedjax_bn.run.config import base, flatten
from fedjax_bn.training import workdir

METRICS = {"round", "loss", "weights", "seconds"}
EVALUATED = {"accuracy", "validation", "unseen", "measures", "measures_over", "unseen_measures"}
SUMMARY = {
    *("traffic", "measures", "measures_over"),
    *("method", "dataset", "seed", "rounds", "selected_round", "tested_on"),
    *("accuracy", "last_round"),
    *("seconds_per_round", "compile_seconds", "samples_per_second"),
}
CLIENTS = ["ant", "bee", "cow"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """A run with a baseline by the command: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("main")
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        printed = give(patch, folder / "run")
    return folder / "run", printed


def config():
    return runs.config(baselines=("fedavg",), adaptations=("running", "batch"), rounds=5)


def give(patch, folder) -> str:
    """Gives the command with this configuration; returns what it printed."""
    patch.setattr(main, "read", lambda source, changes: config())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert runs.command("--config", "tiny.py", "--workdir", str(folder)) == 0
    return printed.getvalue()


def test_config_json_has_the_resolved_configuration_versions_devices_and_a_hash(outcome):
    content = json.loads((outcome[0] / "config.json").read_text())
    about = {"config", "data", "form", "notes", "versions", "devices", "machine", "started_in"}
    assert set(content) == about
    assert set(content["config"]) == set(dict(flatten(base())))
    assert content["config"]["baselines"] == ["fedavg"]
    assert content["versions"]["jax"] == jax.__version__
    assert content["versions"]["fedjax_bn"] == __version__
    assert content["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert content["devices"] == [str(device) for device in jax.devices()]
    assert re.fullmatch("[0-9a-f]{64}", content["data"])


def test_metrics_jsonl_has_one_line_a_round_with_evaluation_when_due_and_at_last(outcome):
    lines = runs.lines(outcome[0])
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert set(line) == METRICS | (EVALUATED if line["round"] in (2, 4, 5) else set())
        assert list(line["loss"]) == list(line["weights"]) == CLIENTS
        np.testing.assert_allclose(sum(line["weights"].values()), 1, rtol=1e-6)
    assert list(lines[-1]["accuracy"]) == [*CLIENTS, "mean"]
    assert list(lines[-1]["unseen"]["dog"]) == ["running", "batch"]


def test_summary_json_has_exactly_the_keys_of_the_design(outcome):
    summary, lines = workdir.read_json(outcome[0] / "summary.json"), runs.lines(outcome[0])
    assert set(summary) == SUMMARY
    facts = [summary[key] for key in ("method", "dataset", "seed", "rounds")]
    assert facts == ["fedbn", "tiny", 2, 5]
    for key, line in (("accuracy", lines[summary["selected_round"] - 1]), ("last_round", lines[4])):
        assert summary[key] == {"internal": line["accuracy"], "unseen": line["unseen"]}
        internal = dict(summary[key]["internal"])
        mean = internal.pop("mean")
        np.testing.assert_allclose(mean, np.mean(list(internal.values())))
    evaluated = {x["round"]: x["validation"]["mean"] for x in lines if "validation" in x}
    assert evaluated[summary["selected_round"]] == max(evaluated.values())
    seconds = np.median([line["seconds"] for line in lines])
    np.testing.assert_allclose(summary["seconds_per_round"], seconds)
    np.testing.assert_allclose(summary["samples_per_second"], (22 + 18 + 11) / seconds)
    # FedBN on an MLP: all but the batch norms travel, and a few numbers.
    sent = summary["traffic"]
    assert 0 < sent["down"] < sent["up"] < sent["down"] + 32


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_checkpoints_are_read_by_plain_orbax(outcome):
    kind = "latest" if runs.steps(outcome[0]) else "selected"
    folder = outcome[0] / "checkpoints" / kind
    with ocp.training.Checkpointer(folder) as manager:
        assert manager.latest.step == 5
        state = manager.load(checkpointable_name="default")
    assert int(state["round"]) == 5
    assert state["personal"]["params"]["norm1"]["scale"].shape == (3, 16)
    assert state["shared"]["params"]["dense1"]["kernel"].shape == (6, 16)
    assert state["shared"]["params"]["norm1"]["scale"] is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_every_round_once_after_a_run_went_on(tmp_path):
    folder = runs.unfinished(tmp_path / "again", config())
    shutil.rmtree(folder / "checkpoints" / "latest" / "5")
    for file in (folder / "events").iterdir():
        file.write_bytes(file.read_bytes()[:-30])
    runs.train.run(config(), folder, say=lambda text: None)
    seen = runs.scalars(folder)
    assert seen == runs.expected_scalars(folder)
    assert [step for step, _ in seen["loss/ant"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in seen["unseen/dog/batch"]] == [2, 4, 5]


def test_a_baseline_has_a_workdir_of_its_own_and_differs_in_the_method_only(outcome):
    own = outcome[0] / "baselines" / "fedavg"
    assert workdir.read_json(own / "summary.json")["method"] == "fedavg"
    assert len(runs.lines(own)) == 5
    one, two = (workdir.read_json(f / "config.json") for f in (outcome[0], own))
    differ = {key for key in one["config"] if one["config"][key] != two["config"][key]}
    assert differ == {"method", "baselines"}
    assert one["data"] == two["data"]


def test_the_finished_command_says_so_and_changes_nothing(outcome, monkeypatch):
    before = runs.files(outcome[0])
    printed = give(monkeypatch, outcome[0])
    assert printed.count("holds a finished run") == 2
    table = printed[printed.index("accuracy %") :].splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["fedbn", "fedavg"]
    assert runs.files(outcome[0]) == before


def test_nothing_is_compiled_after_the_first_evaluation(tmp_path, monkeypatch):
    at_round, real = {}, workdir.append_line

    def append(path, record):
        real(path, record)
        at_round[record["round"]] = len(compiled)

    monkeypatch.setattr(workdir, "append_line", append)
    with runs.compilations() as compiled:
        runs.run(tmp_path / "run", rounds=8, seed=5)
    assert at_round[2] > 0
    assert at_round[2] == at_round[8]


def test_a_path_on_the_command_line_may_begin_with_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in ("--config=a --workdir=", "serve --workdir=x --export=", "report "):
        options, _ = main.parse(["main", *f"{words}~/x/y".split()])
        assert f"{tmp_path}/x/y" in str(options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_output_without_room_ends_the_command_with_a_sentence():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "fedjax_bn", "list", "keys"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1


# Clients' updates above 1.2, finite, times an eta that is finite too.
OVERFLOW = {"method": "fedavgm:eta=3e38", "optimizer__learning_rate": 100.0, "rounds": 2}
HUGE = {"optimizer__learning_rate": 1e30}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (HUGE, "ant, bee, cow "),
        pytest.param(HUGE | {"on_nonfinite": "drop"}, "ant, bee, cow ", marks=pytest.mark.slow),
        (OVERFLOW, "the server's step"),
    ],
)
def test_a_round_that_nobody_can_use_is_an_error_that_names_it(tmp_path, changes, named):
    with pytest.raises(NotFiniteError, match=f"^round 1: .*{named}"):
        runs.run(tmp_path / "run", **changes)
    assert runs.lines(tmp_path / "run") == []


def test_with_drop_a_step_of_the_server_that_is_not_finite_is_left_out(tmp_path):
    changes = OVERFLOW | {"on_nonfinite": "drop"}
    runs.run(tmp_path, **changes)
    lines = runs.lines(tmp_path)
    assert [line["server_finite"] for line in lines] == [False, False]
    assert "not_finite" not in lines[0]
    start = train.prepare(runs.config(**changes))[2]()
    parts = [(state.shared, state.server) for state in (start, runs.saved(tmp_path, start))]
    jax.tree.map(np.testing.assert_array_equal, *parts)


def test_with_drop_the_others_go_on_without_the_client_that_is_not_finite(tmp_path, monkeypatch):
    monkeypatch.undo()
    data = runs.dataset()
    data.domains[1].train.images[:] *= np.float32(1e30)
    runs.install(monkeypatch, data)
    runs.run(tmp_path, on_nonfinite="drop", rounds=2)
    for line in runs.lines(tmp_path):
        assert line["not_finite"] == ["bee"]
        assert line["weights"]["bee"] == 0
        np.testing.assert_allclose(line["weights"]["ant"], 22 / 33, rtol=1e-6)
        assert line["loss"]["cow"] < 2
