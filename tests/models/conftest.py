"""What several tests of networks share."""

import numpy as np
import pytest


@pytest.fixture
def write(tmp_path):
    """Writes tensors to a safetensors file and returns its path."""
    numpy = pytest.importorskip("safetensors.numpy")

    def write(tensors, name="weights.safetensors"):
        numpy.save_file(
            {key: np.array(t, order="C") for key, t in tensors.items()}, tmp_path / name
        )
        return tmp_path / name

    return write
