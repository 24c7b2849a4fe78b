"""Frozen leaves on the command line: forms of the key, checkpoints, resumed runs, populations."""

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import CheckpointError, WorkdirError
from fedjax_bn.run import train
from fedjax_bn.sharing import path_names
from fedjax_bn.training import checkpoint

FROZEN = {"method": "fedbn", "frozen": "dense1,norm1"}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


def test_a_continued_run_has_the_bits_of_a_straight_one_and_one_copy_in_its_checkpoint(tmp_path):
    for folder, rounds in (("continued", 1), ("continued", 2), ("straight", 2)):
        runs.run(tmp_path / folder, rounds=rounds, eval_every=1, **FROZEN)
    start = train.prepare(runs.config(**FROZEN))[2]
    like = jax.eval_shape(start)
    found = [runs.saved(tmp_path / folder, like) for folder in ("continued", "straight")]
    jax.tree.map(np.testing.assert_array_equal, *found)
    jax.tree.map(np.testing.assert_array_equal, found[0].frozen, start().frozen)
    (folder,) = (tmp_path / "straight/checkpoints/selected").glob("[12]")
    leaves = jax.tree_util.tree_leaves_with_path(checkpoint.all_arrays(folder))
    stored = [(path_names(path)[0], leaf.shape) for path, leaf in leaves if "dense1" in str(path)]
    assert sorted(stored) == [("frozen", (6, 16)), ("frozen", (16,))]

    other = jax.eval_shape(train.prepare(runs.config(method="fedbn", frozen="head"))[2])
    with pytest.raises(CheckpointError, match=r"sharing rule .*frozen/.*norm1"):
        runs.saved(tmp_path / "straight", other)
    with pytest.raises(WorkdirError, match=r"\('dense1,norm1'"):
        runs.run(tmp_path / "straight", rounds=2, method="fedbn", frozen="head")
