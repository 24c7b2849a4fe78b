"""Several real processes train as one."""

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


def start(folder, number, rounds, way, port, module, count=2):
    """One process of several, with one device."""
    paths = os.pathsep.join(map(str, (runs.ROOT, runs.ROOT / "tests" / "support", folder.parent)))
    environment = {
        "PYTHONPATH": paths,
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
    }
    return subprocess.Popen(
        [sys.executable, "-m", module, "--distributed", str(folder), str(rounds), way],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def both():
    """Starts two processes, and ends what is left of them."""
    started = []

    def begin(folder, rounds, way="all", module="trained"):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        started.extend(start(folder, number, rounds, way, port, module) for number in (0, 1))
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

    for kind in ("latest", "selected"):
        assert runs.steps(tmp_path / "two", kind) == runs.steps(tmp_path / "one", kind)
    like = jax.eval_shape(train.prepare(runs.config(**TRAINED))[2])
    states = [runs.saved(tmp_path / name, like) for name in ("two", "one")]
    assert_close(*states, rtol=1e-4, atol=1e-5)  # float32: sums in another order
    assert_same_records(tmp_path)
    assert len([*(tmp_path / "two").rglob("*.xplane.pb")]) == 1  # of the first process
    assert alone["accuracy"].keys() == {"internal", "unseen"}


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "all"])
def test_two_processes_train_cohorts_as_one_does_and_one_goes_on(tmp_path, both, way):
    """Each process has the rows of all clients on its host."""
    changes = TRAINED | WAYS[way] | {"rounds": 3}
    pair = both(tmp_path / "two", 3, way)
    runs.run(tmp_path / "one", **changes)
    assert_ended(pair)
    assert_same_records(tmp_path)
    models = [models_in(tmp_path / name, changes) for name in ("two", "one")]
    assert_close(*models, rtol=1e-4, atol=1e-5)

    for name in ("two", "one"):
        runs.run(tmp_path / name, **changes | {"rounds": 4})
    assert_same_records(tmp_path)


def models_in(folder, changes):
    """All that clients have of their own in the newest checkpoint."""
    config = runs.config(**changes)
    experiment, _, begin = train.prepare(config)
    state = runs.saved(folder, population.start_population(experiment, begin)())
    if isinstance(state, population.PopulationState):
        return state.rows
    return state.personal, state.memory


TALKS = """
import os, sys, time
from fedjax_bn.arguments import errors
from fedjax_bn.training.together import any_asked, by_first, join, require_same

def refuse():
    raise errors.WorkdirError("é" * 300)

def words(act, *given):
    try:
        return act(*given)
    except errors.UserError as error:
        return f"{type(error).__name__}: {error}"

if __name__ == "__main__":
    join(True, timeout=60)
    mine = os.environ["JAX_PROCESS_ID"]
    print([
        by_first(lambda: {"a": [mine, "ü" * 999]}) == {"a": ["0", "ü" * 999]},
        words(by_first, refuse) == "WorkdirError: " + "é" * 300,
        [any_asked(asked) for asked in (False, mine == "1")],
        require_same("the data", {"b": 1}),
        words(require_same, "the data", mine)[:61],
    ], file=open(sys.argv[-3] + mine, "w"))
"""


def test_two_processes_learn_what_the_first_does_its_errors_and_whether_they_agree(tmp_path, both):
    (tmp_path / "talks.py").write_text(TALKS)
    pair = both(tmp_path / "said", 0, module="talks")
    said = [process.communicate(timeout=100) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    differs = "ConfigError: the data of process 1 is not that of process 0: "[:61]
    for number in "01":
        right = [True, True, [False, True], None, differs]
        assert (tmp_path / f"said{number}").read_text() == f"{right}\n"
