"""What a start imports, and what benchmarks/start_up.py takes its parts from."""

import importlib
import subprocess
import sys
import time

import pytest

import runs
from fedjax_bn.run import train
from fedjax_bn.training import rounds
from fedjax_bn.training.rounds import Rounds

# Each takes from 0.2 to 4 seconds, and training needs none of them before its first round.
NOT_NEEDED = ("torch", "tensorflow", "flax.nnx", "scipy.ndimage", "sklearn", "grain", "h5py")


def test_training_imports_nothing_that_it_does_not_need():
    code = "import sys, fedjax_bn.main, fedjax_bn.run.commands; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True, check=True
    )
    imported = set(result.stdout.split())
    assert "fedjax_bn.run.train" in imported
    assert not imported & set(NOT_NEEDED)


@pytest.fixture
def start_up(monkeypatch):
    """benchmarks/start_up.py as a module."""
    monkeypatch.setattr(sys, "path", [str(runs.ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("start_up")


def test_every_part_that_is_timed_is_there(start_up):
    assert callable(rounds.round_record)
    for name in (*start_up.FUNCTIONS.values(), "open_rounds"):
        place, last = start_up.owner(train, name)
        assert callable(getattr(place, last))
    assert "compile" in Rounds._fields


def test_a_part_is_charged_with_its_first_call_alone(start_up):
    parts = start_up.Parts()
    wait = parts.timed("wait", time.sleep)
    wait(0.02)
    first = parts.seconds["wait"]
    wait(0.05)
    assert parts.seconds == {"wait": first}
    assert first[0] >= 0.02 > first[1]


@pytest.mark.slow
def test_a_later_start_compiles_faster_and_its_parts_add_up(start_up):
    taken = start_up.measure("quickstart", ["--config.model=DigitCNN:width=8"], 1)
    for [run] in taken.values():
        wall = {part: seconds[0] for part, seconds in run.items()}
        total = wall.pop("total")
        assert sum(wall.values()) == pytest.approx(total)
        assert min(wall.values()) >= 0
    (first,), (later,) = taken.values()
    assert later["compile"][1] < first["compile"][1]
