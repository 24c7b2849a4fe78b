"""Several real processes: they train as one, and none is left waiting for one that is lost."""

import os
import signal
import socket
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

import runs
from federations import assert_close
from fedjax_bn.run.errors import WorkdirError
from fedjax_bn.run.processes import together as processes
from fedjax_bn.run.training import population, train
from trained import TRAINED, WAYS


def start(folder, number, rounds, way, port, count=2):
    """One process of several, with one device."""
    paths = os.pathsep.join((str(runs.ROOT), str(runs.ROOT / "tests")))
    environment = {
        "PYTHONPATH": paths,
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "trained", "--distributed", str(folder), str(rounds), way],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def both():
    """Starts two processes, and ends what is left of them."""
    started = []

    def begin(folder, rounds, way="all"):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        started.extend(start(folder, number, rounds, way, port) for number in (0, 1))
        return started

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


def assert_same_records(folder):
    two, one = (runs.lines(folder / name) for name in ("two", "one"))
    for ours, theirs in zip(two, one, strict=True):
        assert ours.keys() == theirs.keys()
        for key in {"loss", "weights", "accuracy", "validation", "unseen"} & ours.keys():
            assert_close(ours[key], theirs[key], rtol=1e-4)


def assert_ended(pair):
    said = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    assert "in 2 processes" in said[0][0]
    assert "clients" not in said[1][0]


def test_two_processes_train_test_and_save_what_one_does(tmp_path, both):
    """Each with its own clients' samples and rows; what the first has written is read here."""
    pair = both(tmp_path / "two", 2)
    alone = runs.run(tmp_path / "one", **TRAINED)
    assert_ended(pair)

    assert runs.steps(tmp_path / "two") == runs.steps(tmp_path / "one") == [1, 2]
    like = jax.eval_shape(train.prepare(runs.config(**TRAINED))[2])
    states = [runs.saved(tmp_path / name, like) for name in ("two", "one")]
    assert_close(*states, rtol=1e-4, atol=1e-6)
    assert_same_records(tmp_path)
    assert alone["accuracy"].keys() == {"internal", "unseen"}


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "all"])
def test_two_processes_train_cohorts_as_one_does_and_one_goes_on(tmp_path, both, way):
    """Of rows on the disk the first process writes what both read."""
    changes = TRAINED | WAYS[way] | {"rounds": 3}
    pair = both(tmp_path / "two", 3, way)
    runs.run(tmp_path / "one", **changes)
    assert_ended(pair)
    assert_same_records(tmp_path)
    models = [models_in(tmp_path / name, changes) for name in ("two", "one")]
    assert_close(*models, rtol=1e-4, atol=1e-6)

    for name in ("two", "one"):
        runs.run(tmp_path / name, **changes | {"rounds": 4})
    assert_same_records(tmp_path)


def models_in(folder, changes):
    """All that clients have of their own in the newest checkpoint, wherever it lies."""
    config = runs.config(**changes)
    state = runs.saved(folder, population.start_held(config, train.prepare(config)[2], folder, 4)())
    if isinstance(state, population.Held):
        return population.rows_of_clients(state, np.arange(4))
    return state.personal, state.memory


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "why"), [(1, "silent for 30 s"), (0, "it does not answer")])
def test_when_a_process_is_lost_the_other_ends_with_a_sentence_and_one_goes_on(
    tmp_path, both, lost, why
):
    """Process 0 too, though JAX aborts the others as soon as its service is gone."""
    folder = tmp_path / "run"
    pair = both(folder, 5000)
    runs.wait_for(pair[0], lambda: (folder / "checkpoints" / "latest" / "1").exists(), 900)
    pair[lost].send_signal(signal.SIGKILL)
    began = time.monotonic()
    errors = pair[1 - lost].communicate(timeout=100)[1]
    assert time.monotonic() - began < 60
    assert pair[1 - lost].returncode == 1
    assert f"fedjax_bn: process {lost} of 2 is lost, {why}; rounds 1 to " in errors
    assert errors.endswith("give the same command to go on\n")
    assert "Traceback" not in errors

    state, records = resumed(folder)
    assert int(state.round) == len(records) > 0


class Lost(Exception):
    pass


def test_a_process_that_is_lost_before_it_speaks_is_missed(monkeypatch):
    """What one process hears of three, of which the last never says that it is there."""
    said = {processes._named("there", number): "0" for number in range(2)}

    class Store:
        def key_value_set(self, key, text, allow_overwrite):
            said[key] = text
            said[processes._named("there", 1)] = text

        def key_value_dir_get(self, folder):
            return [item for item in said.items() if item[0].startswith(folder)]

    def lose(process, why):
        raise Lost(f"{process}, {why}")

    service = types.SimpleNamespace(process_id=0, num_processes=3, client=Store())
    monkeypatch.setattr(processes, "_service", lambda: service)
    monkeypatch.setattr(processes, "_lose", lose)
    monkeypatch.setattr(processes, "_EVERY", 0.01)
    monkeypatch.setattr(processes, "_SILENCE", 0.2)
    with pytest.raises(Lost, match="2, silent for 0 s"):
        processes._watch()


def test_what_a_transfer_raises_where_a_process_is_lost_is_not_taken_for_a_fault_of_this_one():
    """JAX raises it as ValueError, and a save names it a fault of the folder."""
    transfer = ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    save = WorkdirError("cannot save a checkpoint")
    save.__cause__ = transfer
    for error in (transfer, save, TimeoutError(), jax.errors.JaxRuntimeError("UNAVAILABLE")):
        assert processes._may_be_of_another(error)
    for error in (ValueError("NUMBER: 3"), WorkdirError("no room"), KeyError("UNKNOWN")):
        assert not processes._may_be_of_another(error)


def test_a_process_that_jax_aborts_can_still_say_why():
    program = """
import ctypes, threading, time
from fedjax_bn.run.processes.coordinator import abort_late
abort_late()
library = ctypes.CDLL(None)  # which is called without Python's lock, as JAX aborts
threading.Thread(target=lambda: (time.sleep(0.2), print("said", flush=True))).start()
library.abort()
"""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "said\n"
    assert time.monotonic() - began < 6
    process.kill()
    process.communicate()


def resumed(folder):
    """What one device goes on from."""
    _, _, begin = train.prepare(runs.config(**TRAINED | {"rounds": 5000}))
    return train.resume(folder, begin, lambda text: None)


@pytest.mark.slow
def test_a_stop_request_to_one_process_stops_both_after_the_same_round(tmp_path, both):
    pair = both(tmp_path, 5000)
    runs.wait_for(pair[0], lambda: len(runs.lines_written(tmp_path)) > 1, 900)
    pair[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=200)[1] for process in pair]
    assert all("stopped after round" in text for text in said), said
    rounds = {text.split("stopped after round ")[1].split()[0] for text in said}
    assert rounds == {str(len(runs.lines(tmp_path)))}


def test_one_process_alone_decides_and_does_all_by_itself():
    assert processes.first()
    assert processes.by_first(lambda: 3) == 3
    assert [processes.any_asked(asked) for asked in (True, False)] == [True, False]
    processes.require_same("the data", "x")
    processes.leave(3, "it must not end")
