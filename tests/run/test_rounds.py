"""Where a round's data come from changes nothing: device, stream, and augmentation in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from federations import assert_close
from fedjax_bn.run.experiment import build as module
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.run.experiment.method import AUGMENTATIONS
from fedjax_bn.training.evaluation.evaluate import evaluator
from fedjax_bn.training.evaluation.scoring import SplitBatches
from fedjax_bn.training.rounds import open_rounds


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)


@pytest.fixture(scope="module")
def prepared():
    """An experiment, its keys and first state, and the scores of that with data on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)
        experiment, keys, start = prepare(runs.config(rounds=2), traced=False)
        state = start()
        return experiment, keys, state, evaluator(experiment)(state)


def first_rounds(experiment, keys, state):
    """Two states and metrics of rounds, and the note of where their data are."""
    opened = open_rounds(experiment, keys, state)
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
    streamed = experiment.evaluation._replace(device_megabytes=0)
    assert evaluator(experiment._replace(evaluation=streamed))(state) == scores


def test_augmentation_changes_training_and_never_evaluation(monkeypatch, prepared, resident):
    _, keys, state, scores = prepared
    monkeypatch.setitem(AUGMENTATIONS, "none", lambda size: lambda key, images: images * 0)
    changed, _, _ = prepare(runs.config(rounds=2), traced=False)
    ((_, metrics), _), _ = first_rounds(changed, keys, state)
    assert not np.allclose(metrics["loss"], resident[0][0][1]["loss"])
    assert evaluator(changed)(state) == scores
