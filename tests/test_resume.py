"""A run that is killed, stopped or damaged, and the same command given again."""

import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import runs

from fedjax_bn import checkpoint, logs, main, train, workdir
from fedjax_bn.config import read
from fedjax_bn.errors import CheckpointError, InterruptedRun, WorkdirError
from fedjax_bn.summary import select_round


class Killed(BaseException):
    """Stands for kill -9 inside this process: nothing catches it."""


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


@pytest.fixture
def straight(tmp_path) -> Path:
    """A tiny run that nobody stopped."""
    runs.run(tmp_path / "straight")
    return tmp_path / "straight"


def assert_same_end(folder: Path, straight: Path, config) -> None:
    """Same bits of all checkpointed leaves, same records, same summary but for the clock."""
    like = jax.eval_shape(train.prepare(config)[2])
    one, two = runs.lines(folder), runs.lines(straight)
    assert [record["round"] for record in one] == list(range(1, config.rounds + 1))
    assert list(map(runs.without_times, one)) == list(map(runs.without_times, two))
    for kind in ("latest", "selected"):
        newest = runs.steps(folder, kind)[-1]
        assert newest == runs.steps(straight, kind)[-1]
        leaves = [jax.tree.leaves(runs.saved(f, like, kind, newest)) for f in (folder, straight)]
        jax.tree.map(np.testing.assert_array_equal, *leaves)
    summaries = [workdir.read_json(f / "summary.json") for f in (folder, straight)]
    assert runs.without_times(summaries[0]) == runs.without_times(summaries[1])
    assert runs.steps(folder, "selected") == [summaries[0]["selected_round"]]


def moments(folder: Path) -> list:
    """When to stop a run of 12 rounds: (name, signal, condition), in the order of a run's life."""
    latest = folder / "checkpoints" / "latest"
    return [
        ("compiling", signal.SIGKILL, lambda: (folder / "config.json").exists()),
        ("in round 2 or 3", signal.SIGINT, lambda: len(runs.lines_written(folder)) >= 1),
        ("writing a checkpoint", signal.SIGKILL, lambda: any(latest.glob("*tmp*"))),
        ("finishing", signal.SIGKILL, lambda: len(runs.lines_written(folder)) == 12),
    ]


def test_killed_at_four_moments_a_run_ends_with_the_bits_of_a_straight_run(tmp_path):
    file = tmp_path / "tiny.py"
    file.write_text(runs.CONFIG_FILE)
    folder, straight = tmp_path / "killed", tmp_path / "straight"
    other = runs.start("--config", str(file), "--workdir", str(straight))
    command = ("--config", str(file), "--workdir", str(folder))
    for name, number, moment in moments(folder):
        process = runs.start(*command)
        runs.wait_for(process, moment)
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
        assert not (folder / "summary.json").exists(), name
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "give the same command to go on" in errors
            assert "Traceback" not in errors
        else:
            assert process.returncode == -signal.SIGKILL
    process = runs.start(*command)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "going on from round" in out
    out, errors = other.communicate(timeout=120)
    assert other.returncode == 0, errors
    assert_same_end(folder, straight, read(str(file)))
