"""Frozen leaves on the command line: forms of the key, checkpoints, resumed runs, populations."""

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import CheckpointError, ConfigError, WorkdirError
from fedjax_bn.run import train
from fedjax_bn.sharing import path_names
from fedjax_bn.training import checkpoint
from fedjax_bn.training.start import partition_table

FROZEN = {"method": "fedbn", "frozen": "dense1,norm1"}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    runs.install(monkeypatch)


@pytest.mark.parametrize(
    ("frozen", "leaves"),
    [
        ("head", 2),
        ("dense1,norm1", 6),
        ("all_but:paths=head", 12),
        ("all_but_head", 12),
        ("all_but_batch_norm", 6),
        ("at:paths=norm1,dense1/kernel:statistics=False", 3),
        ("fedjax_bn.sharing:all_but_norms", 6),
    ],
)
def test_the_printed_partition_has_the_leaves_that_a_form_of_the_key_freezes(frozen, leaves):
    experiment, _, start = train.prepare(runs.config(method="fedbn", frozen=frozen))
    lines = partition_table(experiment, jax.eval_shape(start)).splitlines()
    assert sum(line.startswith(f"frozen: {leaves} leaves, ") for line in lines) == 1


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (
            "layer1",
            r"the path 'layer1', of frozen .*, is not in the model, which begins with dense1",
        ),
        ("all_but:paths=hea", "the path 'hea'"),
        ("everything", "frozen chooses every parameter"),
        ("nothing", "frozen chooses no leaf"),
        ("all_but", "frozen='all_but': all_but needs paths"),
        ("at:paths=norm1:statistics=no", "must be bool"),
        ("nomodule:rule", "module 'nomodule' cannot be imported"),
    ],
)
def test_a_wrong_rule_is_one_sentence(frozen, message):
    with pytest.raises(ConfigError, match=message) as error:
        train.prepare(runs.config(method="fedbn", frozen=frozen))
    assert "\n" not in str(error.value)


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


@pytest.mark.slow
def test_rows_on_the_disk_lack_frozen_leaves_and_train_as_those_on_the_device(tmp_path):
    changes = {"method": "scaffold", "clients_per_round": 2, "frozen": "dense1,norm1"}
    scores = []
    for population in ("host", "device"):
        folder = tmp_path / population
        runs.run(folder, population=population, rounds=2, eval_every=1, **changes)
        scores.append([line["accuracy"]["mean"] for line in runs.lines(folder)])
    np.testing.assert_allclose(*scores, rtol=1e-5)
    rows = {path.parent.name: path.stat().st_size for path in tmp_path.glob("*/population/*/c.*")}
    trained = 16 * 16 + 16 + 2 * 16 + 16 * 3 + 3  # dense2, norm2 and the head; a variate of each
    assert 4 * trained <= rows["memory"] < 4 * trained + 100
