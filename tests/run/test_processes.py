"""Several real processes train as one."""

import json
import os
import socket
import subprocess
import sys

import jax
import pytest

import runs
from federations import assert_close
from fedjax_bn.run import train
from fedjax_bn.training import population
from trained import TRAINED, WAYS


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
