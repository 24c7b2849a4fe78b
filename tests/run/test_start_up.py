"""What a start imports."""

import subprocess
import sys

import runs

# Each takes from 0.2 to 4 seconds, and training needs none of them before its first round.
NOT_NEEDED = ("torch", "tensorflow", "flax.nnx", "scipy.ndimage", "sklearn", "grain", "h5py")


def test_training_imports_nothing_that_it_does_not_need():
    code = "import sys, fedjax_bn.main, fedjax_bn.run.train; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True, check=True
    )
    imported = set(result.stdout.split())
    assert "fedjax_bn.run.train" in imported
    assert not imported & set(NOT_NEEDED)
