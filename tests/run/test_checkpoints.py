"""Checkpoints and other files of a run: which are kept, damaged, or of several processes."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import runs
from federations import assert_close
from fedjax_bn.arguments.errors import CheckpointError, UserError, WorkdirError
from fedjax_bn.run import train
from fedjax_bn.run.files import finished_run
from fedjax_bn.sharing import path_names
from fedjax_bn.training import checkpoint, population, workdir
from trained import TRAINED, WAYS


@pytest.mark.parametrize(("latest", "selected"), [(6, 4), (6, 6)])
def test_a_finished_run_keeps_its_last_round_and_the_selected_one(tmp_path, latest, selected):
    names = [f"latest/{latest}", "latest/4", f"selected/{selected}"]
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
    checkpoint.delete_earlier(tmp_path)
    assert runs.steps(tmp_path) == [6] * (latest != selected)
    assert runs.steps(tmp_path, "selected") == [selected]


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_a_bit_flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [half, with_a_bit_flipped, None])
def test_a_damaged_checkpoint_is_named_and_nothing_is_compiled_or_changed(
    tmp_path, monkeypatch, capfd, damage
):
    straight = runs.finished(tmp_path / "straight")
    runs.install(monkeypatch)
    (straight / "summary.json").unlink()
    newest = straight / "checkpoints" / "selected" / "6"  # its last round too
    if damage:
        arrays = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        arrays.write_bytes(damage(arrays.read_bytes()))
    else:
        (newest / checkpoint.CHECKSUMS).unlink()
    before = runs.files(straight)
    monkeypatch.setattr(train, "open_rounds", lambda *_: pytest.fail("compiled"))
    with pytest.raises(CheckpointError, match="delete that checkpoint") as error:
        runs.run(straight)
    assert str(newest) in str(error.value)
    assert "\n" not in str(error.value)
    assert runs.files(straight) == before
    assert "Traceback" not in capfd.readouterr().err


FROZEN = {"method": "fedbn", "frozen": "dense1,norm1"}


def test_frozen_leaves_stay_as_they_start_and_are_saved_once(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    folder = tmp_path / "run"
    runs.run(folder, rounds=1, **FROZEN)
    start = train.prepare(runs.config(**FROZEN))[2]()
    jax.tree.map(np.testing.assert_array_equal, runs.saved(folder, start).frozen, start.frozen)
    tree = checkpoint.all_arrays(folder / "checkpoints" / "selected" / "1")
    leaves = [
        (path_names(path)[0], leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if "dense1" in str(path)
    ]
    assert sorted(leaves) == [("frozen", (6, 16)), ("frozen", (16,))]

    other = jax.eval_shape(train.prepare(runs.config(method="fedbn", frozen="head"))[2])
    with pytest.raises(CheckpointError, match=r"frozen/.*norm1"):
        runs.saved(folder, other)
    with pytest.raises(WorkdirError, match=r"frozen \('dense1,norm1'"):
        runs.run(folder, rounds=1, method="fedbn", frozen="head")


@pytest.fixture
def folder(tmp_path):
    return runs.finished(tmp_path / "run")


def read_all(folder) -> None:
    """Reads a workdir as a run that continues and an evaluation do."""
    finished_run.read_about(folder)
    workdir.read_json(folder / "summary.json", workdir.SUMMARY)
    workdir.read_lines(folder / "metrics.jsonl", 6)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_damaged_or_missing_file_is_named_whole(folder, name, missing):
    content = half((folder / name).read_bytes())
    (folder / name).unlink()
    if not missing:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=str(folder if missing else folder / name)):
        read_all(folder)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("config.json", {"form": None}, "has no 'form'"),
        ("summary.json", {"rounds": None}, "has no 'rounds'"),
        ("config.json", {"versions": {"fedjax_bn": "0.1.7"}}, r"0\.1\.7"),
    ],
)
def test_what_a_file_lacks_and_another_version_are_named(folder, name, change, match):
    content = json.loads((folder / name).read_text()) | change
    content = {key: value for key, value in content.items() if value is not None}
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=match):
        read_all(folder)


def test_torn_lines_after_the_checkpoint_are_dropped_and_missing_ones_refused(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], lines[4][:20]]))
    assert workdir.rounds_recorded(path) == 4
    assert [record["round"] for record in workdir.read_lines(path, 4)] == [1, 2, 3, 4]
    for left, missing in ((lines[:4], 5), (lines[:1] + lines[2:], 2), ([], 1)):
        path.write_bytes(b"".join(left))
        with pytest.raises(UserError, match=f"round {missing} of the 5"):
            workdir.read_lines(path, 5)


@pytest.fixture
def both(monkeypatch):
    """Starts two processes with a device each, and ends what is left of them."""
    runs.install(monkeypatch)
    started = []

    def begin(folder, rounds, way="all"):
        with socket.create_server(("localhost", 0)) as server:
            address = f"localhost:{server.getsockname()[1]}"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (runs.ROOT, runs.ROOT / "tests" / "support"))),
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
        }
        command = [sys.executable, "-m", "trained", "--distributed", str(folder), str(rounds), way]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        for number in "01":
            environment["JAX_PROCESS_ID"] = number
            started.append(subprocess.Popen(command, env=environment, **pipes))
        return started

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def assert_same_records(folder):
    keys = ("loss", "weights", "accuracy", "validation", "unseen")
    records = [
        [{key: record.get(key) for key in keys} for record in runs.lines(folder / name)]
        for name in ("two", "one")
    ]
    assert_close(*records, rtol=1e-4)


def assert_ended(pair):
    said = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    assert "in 2 processes" in said[0][0]
    assert "clients" not in said[1][0]


# What both learn of the first, its error, and whether any was asked to stop.
SAID = [{"a": ["0", "ü" * 999]}, "WorkdirError: " + "é" * 300, [False, True], None]


@pytest.mark.slow
def test_two_processes_train_test_and_save_what_one_does(tmp_path, both):
    """Each with its own clients' samples and rows; what the first has written is read here."""
    pair = both(tmp_path / "two", 2)
    runs.run(tmp_path / "one", **TRAINED)
    assert_ended(pair)

    for kind in ("latest", "selected"):
        assert runs.steps(tmp_path / "two", kind) == runs.steps(tmp_path / "one", kind)
    like = jax.eval_shape(train.prepare(runs.config(**TRAINED))[2])
    states = [runs.saved(tmp_path / name, like) for name in ("two", "one")]
    assert_close(*states, rtol=1e-4, atol=1e-5)  # float32: sums in another order
    assert_same_records(tmp_path)

    for name in ("said0", "said1"):
        *said, differs, needless = json.loads((tmp_path / name).read_text())
        assert said == SAID
        assert differs.startswith("ConfigError: the data of")
        assert needless == []


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "all"])
def test_two_processes_train_cohorts_as_one_does_and_one_goes_on(tmp_path, both, way):
    """Each process has the rows of all clients on its host."""
    changes = TRAINED | WAYS[way] | {"rounds": 3}
    pair = both(tmp_path / "two", 3, way)
    runs.run(tmp_path / "one", **changes)
    assert_ended(pair)
    assert_same_records(tmp_path)
    profiles = [*(tmp_path / "two").rglob("*.xplane.pb")]
    assert len(profiles) == ("profile" in changes)  # of the first process
    models = [models_in(tmp_path / name, changes) for name in ("two", "one")]
    assert_close(*models, rtol=1e-4, atol=1e-5)

    for name in ("two", "one"):
        runs.run(tmp_path / name, **changes | {"rounds": 4})
    assert_same_records(tmp_path)


def models_in(folder, changes):
    """All that clients have of their own in the newest checkpoint."""
    experiment, _, begin = train.prepare(runs.config(**changes))
    state = runs.saved(folder, population.start_population(experiment, begin)())
    if isinstance(state, population.PopulationState):
        return state.rows
    return state.personal, state.memory
