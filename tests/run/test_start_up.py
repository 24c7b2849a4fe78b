"""What a start imports, and what benchmarks/start_up.py takes its parts from."""

import importlib
import subprocess
import sys

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
