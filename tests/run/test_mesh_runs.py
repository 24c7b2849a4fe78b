"""Runs on several devices: the numbers of one, for all places of the data and all cohorts."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import runs
from federations import assert_close, assert_equal
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.run import train
from fedjax_bn.run.config import check
from fedjax_bn.run.experiment import build as module
from fedjax_bn.training import checkpoint, mesh, rounds
from fedjax_bn.training.evaluation import evaluate

TESTED = {"adaptations": ("running", "tsmobn"), "adapt_batch_size": 4}
TRAINED = np.array([True, False, True])


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)


def prepared(**changes):
    config = runs.config(rounds=2, **changes)
    check(config)
    return config, *train.prepare(config)


def after_two_rounds(**changes):
    """The state, and the last metrics, without rows of padding."""
    _, experiment, keys, start = prepared(**changes)
    state = start()
    step = rounds.open_rounds(experiment, keys, state).compile(state)
    for _ in range(2):
        state, metrics = step(state)
    metrics = {name: metrics[name] for name in ("loss", "weights", "finite")}
    return state, (of_clients(state), jax.device_get(metrics))


def of_clients(state):
    """A state without rows of padding, on the host."""
    rows = len(state.weights)
    own = jax.tree.map(lambda leaf: leaf[:rows], (state.personal, state.memory))
    return jax.device_get(state._replace(personal=own[0], memory=own[1]))


TWO_A_BATCH = {"mesh__clients": 1, "mesh__batch": 2}
STREAMED = {"data__device_megabytes": 0}
ONE, TWO = {"clients_per_round": 1}, {"clients_per_round": 2}


@pytest.fixture(scope="module")
def spread():
    """A state that two devices have trained, and its numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)
        return after_two_rounds(mesh__clients=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh__batch": 1} | STREAMED | ONE,
        pytest.param(TWO_A_BATCH | STREAMED, marks=pytest.mark.slow),
        pytest.param(TWO | {"method": "scaffold"}, marks=pytest.mark.slow),
        pytest.param({"local_selection": 2}, marks=pytest.mark.slow),
        pytest.param({"method": "fedrep"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_a_mesh_has_the_numbers_of_one_device(changes):
    """Three clients, or one, on two devices: one of these has a row of padding."""
    _, alone = after_two_rounds(**changes | {"mesh__clients": 1, "mesh__batch": 0})
    state, spread = after_two_rounds(**{"mesh__clients": 2} | changes)
    assert len(state.round.sharding.device_set) == 2
    assert_close(spread, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_tests_and_checkpoints_on_a_mesh_are_those_of_one_device(tmp_path, spread):
    """What two devices trained is saved, tested, and tested on one, where it comes back alone."""
    state, _ = spread
    _, experiment, _, start = prepared(mesh__clients=2, **TESTED)
    scores = evaluate.evaluator(experiment)(state, TRAINED)
    _, alone, _, begin = prepared(mesh__clients=1, **TESTED)
    with checkpoint.open_folder(tmp_path / "two", keep=2) as manager:
        checkpoint.save(manager, 1, state)
        checkpoint.settle(manager)
        on_one = checkpoint.restore(manager, jax.eval_shape(begin))
    assert_equal(jax.device_get(on_one), of_clients(state))
    assert evaluate.evaluator(alone)(on_one, TRAINED) == scores

    # And back, as NumPy arrays, which were saved before there were meshes.
    with checkpoint.open_folder(tmp_path / "one", keep=2) as manager:
        checkpoint.save(manager, 1, jax.tree.map(np.asarray, on_one))
        checkpoint.settle(manager)
        form = mesh.form_on(jax.eval_shape(start), experiment.mesh)
        on_two = checkpoint.restore(manager, form)
    assert_equal(of_clients(on_two), of_clients(state))
    rows = jax.tree.leaves(on_two.personal)[0]
    assert [shard.data.shape[0] for shard in rows.addressable_shards] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"personalize_samples": 2}, {"validate_with": "global"} | STREAMED]
)
def test_other_ways_to_test_are_those_of_one_device_too(changes):
    scores = []
    for devices in ({"mesh__clients": 1}, {"mesh__clients": 2}, TWO_A_BATCH):
        texts = (*TESTED["adaptations"], "batch", "ensemble", "random_alpha")
        _, experiment, _, start = prepared(
            eval_batch_size=4, **TESTED | {"adaptations": texts}, **devices, **changes
        )
        scores.append(evaluate.evaluator(experiment)(start(), TRAINED))
    for other in scores[1:]:
        assert_close(other, scores[0], rtol=1e-6)


def test_each_device_gets_and_each_process_reads_the_rows_of_its_clients_alone():
    over = mesh.clients_of(Mesh(np.array(jax.devices()), ("clients",)))
    asked = []

    def read(start, stop):
        asked.append((start, stop))
        return {"a": np.arange(start, stop), "b": np.ones((stop - start, 3)) * start}

    placed = mesh.place_rows(read, 4, over)
    assert asked == [(0, 2), (2, 4)]
    assert [shard.data.tolist() for shard in placed["a"].addressable_shards] == [[0, 1], [2, 3]]
    np.testing.assert_array_equal(placed["b"][:, 0], [0, 0, 2, 2])


@pytest.mark.parametrize(
    ("devices", "rows", "batch", "shape"),
    [
        ((0, 0), 3, 8, {"clients": 2}),
        ((0, 0), 1, 8, {"clients": 1, "batch": 2}),
        ((0, 0), 1, 1, None),
        ((1, 0), 5, 8, None),
        ((0, 2), 9, 8, {"clients": 1, "batch": 2}),
    ],
)
def test_where_there_are_more_devices_than_clients_a_batch_is_split(devices, rows, batch, shape):
    chosen = mesh.choose_mesh(*devices, rows, batch)
    assert (chosen and dict(chosen.shape)) == shape


def test_a_mesh_larger_than_the_devices_is_refused():
    with pytest.raises(ConfigError, match=r"mesh\.clients=2"):
        mesh.choose_mesh(2, 2, 3, 8)
