"""What a start imports, and what benchmarks/start_up.py takes its parts from."""

import subprocess
import sys

import pytest

import runs
from fedjax_bn.run.imports import hidden

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


def test_a_hidden_module_is_found_again_behind_the_block(monkeypatch):
    monkeypatch.syspath_prepend(str(runs.ROOT / "tests"))
    monkeypatch.delitem(sys.modules, "tiny_digits", raising=False)
    with hidden("tiny_digits"), pytest.raises(ImportError):
        import tiny_digits
    import tiny_digits

    with hidden("tiny_digits"):
        import tiny_digits as the_same
    assert the_same is tiny_digits is sys.modules["tiny_digits"]
