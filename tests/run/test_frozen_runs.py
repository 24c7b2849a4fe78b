"""Frozen leaves on the command line: the form of the key, and one copy in a checkpoint."""

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import CheckpointError, WorkdirError
from fedjax_bn.run import train
from fedjax_bn.sharing import path_names
from fedjax_bn.training import checkpoint

FROZEN = {"method": "fedbn", "frozen": "dense1,norm1"}


def test_frozen_leaves_stay_as_they_start_and_are_saved_once(tmp_path, monkeypatch):
    """That such a run continues exactly is in test_resume.py."""
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
