"""Where clients, batches and data are changes no number: several devices, and streams."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.sharding import Mesh

import runs
from federations import assert_close, assert_equal
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.run.experiment import build as module
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.run.experiment.model import AUGMENTATIONS
from fedjax_bn.training import checkpoint, mesh, rounds
from fedjax_bn.training.evaluation.evaluate import evaluator
from fedjax_bn.training.evaluation.scoring import SplitBatches

TESTED = {"adaptations": ("running", "tsmobn"), "adapt_batch_size": 4}
TRAINED = np.array([True, False, True])
TWO_A_BATCH = {"mesh__clients": 1, "mesh__batch": 2}
STREAMED = {"data__device_megabytes": 0}


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)
        yield


def two_rounds(**changes):
    """The experiment, its keys, and what makes its first state."""
    return prepare(runs.config(rounds=2, **changes), traced=False)


def after_two_rounds(**changes):
    """The state, and what is of clients: its rows without padding, and the last metrics."""
    experiment, keys, start = two_rounds(**changes)
    state = start()
    step = rounds.open_rounds(experiment, keys, state).compile(state)
    for _ in range(2):
        state, metrics = step(state)
    metrics = {name: metrics[name] for name in ("loss", "weights", "finite")}
    return state, (of_clients(state), jax.device_get(metrics))


def of_clients(state):
    """A state without rows of padding, on the host."""
    rows = len(state.weights)
    personal, memory = jax.tree.map(lambda leaf: leaf[:rows], (state.personal, state.memory))
    return jax.device_get(state._replace(personal=personal, memory=memory))


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh__batch": 1, "clients_per_round": 1} | STREAMED,
        pytest.param(TWO_A_BATCH | STREAMED, marks=pytest.mark.slow),
        pytest.param({"clients_per_round": 2, "method": "scaffold"}, marks=pytest.mark.slow),
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
def test_tests_and_checkpoints_on_a_mesh_are_those_of_one_device(tmp_path):
    """What two devices trained is saved, tested, and tested on one, where it comes back alone."""
    state, _ = after_two_rounds(mesh__clients=2)
    on_mesh, _, start = two_rounds(mesh__clients=2, **TESTED)
    scores = evaluator(on_mesh)(state, TRAINED)
    on_device, _, begin = two_rounds(mesh__clients=1, **TESTED)
    with checkpoint.open_folder(tmp_path, keep=2) as manager:
        checkpoint.save(manager, 1, state)
        checkpoint.settle(manager)
        arrays = jax.tree.leaves(checkpoint.all_arrays(tmp_path / "1"))
        assert {len(array.sharding.device_set) for array in arrays} == {1}
        alone = checkpoint.restore(manager, jax.eval_shape(begin))
        assert_equal(jax.device_get(alone), of_clients(state))
        assert evaluator(on_device)(alone, TRAINED) == scores

        checkpoint.save(manager, 2, alone)
        checkpoint.settle(manager)
        again = checkpoint.restore(manager, mesh.form_on(jax.eval_shape(start), on_mesh.mesh))
    assert_equal(of_clients(again), of_clients(state))
    rows = jax.tree.leaves(again.personal)[0]
    assert [shard.data.shape[0] for shard in rows.addressable_shards] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"personalize_samples": 2},
        {"validate_with": "global", "statistics": "precise"} | STREAMED,
        {"method": "fedbn", "statistics": "precise", "eval_clients": 2},
    ],
)
def test_other_ways_to_test_are_those_of_one_device_too(changes):
    changes |= {"eval_batch_size": 4, "adapt_batch_size": 4}
    changes["adaptations"] = ("running", "tsmobn", "batch", "ensemble", "random_alpha")
    scores = []
    for devices in ({"mesh__clients": 1}, {"mesh__clients": 2}, TWO_A_BATCH):
        experiment, _, start = two_rounds(**devices, **changes)
        scores.append(evaluator(experiment)(start(), TRAINED))
    for others in scores[1:]:
        assert_close(others, scores[0], rtol=1e-6)


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


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 16])
def test_side_by_side_no_core_idles_at_the_end_of_a_round(cores):
    """Of whole rounds of all devices and the clients that are left over."""
    for clients in range(1, 100):
        devices = mesh.side_by_side(clients, cores)
        assert min(clients, cores) <= devices <= min(clients, 2 * cores)
        leftover = clients % devices
        usable = range(min(clients, cores), min(clients, 2 * cores) + 1)
        if any(clients % n == 0 or clients % n >= cores for n in usable):
            assert leftover == 0 or leftover >= cores
        assert mesh.side_by_side(clients, cores, 1) == 1


# Older ones end a process that asks for the flags with which devices may wait.
TRIED = tuple(map(int, jaxlib.__version__.split(".")[:3])) >= (0, 10, 2)
UNSET = ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
# It ends with an error when the devices are there, and before anything compiles.
ALONE = """
import jax, numpy as np, optax
import fedjax_bn as fb
samples = np.zeros((20, 4), np.float32), np.arange(20) % 2
method = fb.methods.fedavg(fb.models.MLP(hidden=(2,)), optax.sgd(0.1))
try:
    fb.simulate(method, clients=dict.fromkeys("abc", samples), rounds=1, adaptations=["none"])
except ValueError:
    print(jax.device_count())
"""


@pytest.mark.parametrize(("setting", "devices"), [({}, None), ({"JAX_NUM_CPU_DEVICES": "1"}, 1)])
def test_a_simulation_divides_the_cpu_where_nobody_did(setting, devices):
    environment = {k: v for k, v in os.environ.items() if k not in UNSET} | setting
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, check=True
    )
    expected = devices or (mesh.side_by_side(3, mesh.cpu_cores()) if TRIED else 1)
    assert int(done.stdout) == expected
    assert ("side by side" in done.stderr) == (expected > 1)


def test_a_mesh_larger_than_the_devices_is_refused():
    with pytest.raises(ConfigError, match=r"mesh\.clients=2"):
        mesh.choose_mesh(2, 2, 3, 8)


@pytest.fixture(scope="module")
def prepared():
    """An experiment, its keys and first state, and the scores of that with data on the device."""
    experiment, keys, start = two_rounds()
    state = start()
    return experiment, keys, state, evaluator(experiment)(state)


def first_rounds(experiment, keys, state):
    """Two states and metrics of rounds, and the note of where their data are."""
    opened = rounds.open_rounds(experiment, keys, state)
    step, ends = opened.compile(state), []
    state = jax.tree.map(jnp.copy, state)  # a round donates it
    for _ in range(2):
        state, metrics = step(state)
        ends.append(jax.device_get((state, metrics)))
    return ends, opened.note


@pytest.fixture(scope="module")
def resident(prepared):
    """Two rounds of data on the device."""
    return first_rounds(*prepared[:3])


def test_streamed_rounds_end_where_resident_ones_do(prepared, resident):
    experiment, keys, state, _ = prepared
    plan = experiment.plan._replace(device_megabytes=0)
    streamed = first_rounds(experiment._replace(plan=plan), keys, state)
    assert "stay on the device" in resident[1]
    assert "are streamed" in streamed[1]
    assert_close(resident[0], streamed[0], rtol=1e-4, atol=1e-6)


def test_streamed_test_batches_are_the_resident_ones():
    splits = [domain.test for domain in runs.DATA.domains]
    whole = jax.device_get(SplitBatches(splits, 4).all_at_once())
    blocks = jax.device_get(list(SplitBatches(splits, 4).kept_within(1e-9)()))
    assert len({block.images.shape for block in blocks}) == 1
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *blocks)
    count = len(whole.client)
    for name in ("images", "labels", "valid", "client"):
        np.testing.assert_array_equal(getattr(joined, name)[:count], getattr(whole, name))
    assert not joined.valid[count:].any()


def test_streamed_evaluation_counts_as_the_resident_one(prepared):
    experiment, _, state, scores = prepared
    streamed = experiment.plan._replace(device_megabytes=0)
    assert evaluator(experiment._replace(plan=streamed))(state) == scores


def test_augmentation_changes_training_and_never_evaluation(monkeypatch, prepared, resident):
    _, keys, state, scores = prepared
    monkeypatch.setitem(AUGMENTATIONS, "none", lambda size: lambda key, images: images * 0)
    changed, _, _ = two_rounds()
    ((_, metrics), _), _ = first_rounds(changed, keys, state)
    assert not np.allclose(metrics["loss"], resident[0][0][1]["loss"])
    assert evaluator(changed)(state) == scores
