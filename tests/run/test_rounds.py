"""Where a round's data come from changes nothing: device, stream, and augmentation in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from federations import assert_close
from fedjax_bn.run.config import check
from fedjax_bn.run.experiment import build as module
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.run.experiment.method import AUGMENTATIONS
from fedjax_bn.training import rounds
from fedjax_bn.training.evaluation.evaluate import evaluator
from fedjax_bn.training.evaluation.scoring import SplitBatches


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)


def first_rounds(config, number):
    """States and metrics of the first rounds, and the rounds' note."""
    check(config)
    experiment, keys, start = prepare(config, traced=False)
    state = start()
    opened = rounds.open_rounds(experiment, keys, state)
    step, states = opened.compile(state), []
    for _ in range(number):
        state, metrics = step(state)
        states.append(jax.device_get((state, metrics)))
    return states, opened.note


@pytest.fixture(scope="module")
def resident():
    """Three rounds of data on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)
        return first_rounds(runs.config(rounds=3), 3)


def test_streamed_rounds_end_where_resident_ones_do(resident):
    streamed = first_rounds(runs.config(rounds=3, data__device_megabytes=0), 3)
    assert "stay on the device" in resident[1]
    assert "are streamed" in streamed[1]
    assert_close(resident[0], streamed[0], rtol=1e-4, atol=1e-6)


def test_streamed_test_batches_are_the_resident_ones():
    splits = [domain.test for domain in runs.DATA.domains]
    whole = jax.device_get(SplitBatches(splits, 4).all_at_once())
    blocks = jax.device_get(list(SplitBatches(splits, 4).kept_within(1e-9)()))
    assert len({block.images.shape for block in blocks}) == 1
    for name in ("images", "labels", "valid", "client"):
        joined = np.concatenate([getattr(block, name) for block in blocks])
        np.testing.assert_array_equal(joined[: len(whole.client)], getattr(whole, name))
        if name == "valid":
            assert not joined[len(whole.client) :].any()


@pytest.fixture(scope="module")
def scored():
    """An experiment, its first state, and the scores of that with test data on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)
        config = runs.config(rounds=3)
        experiment, _, start = prepare(config, traced=False)
        state = start()
        return experiment, state, evaluator(experiment)(state)


def test_streamed_evaluation_counts_as_the_resident_one(scored):
    experiment, state, scores = scored
    streamed = experiment.evaluation._replace(device_megabytes=0)
    assert evaluator(experiment._replace(evaluation=streamed))(state) == scores


def test_augmentation_changes_training_and_never_evaluation(monkeypatch, resident, scored):
    _, state, scores = scored
    monkeypatch.setitem(AUGMENTATIONS, "none", lambda size: lambda key, images: images * 0)
    config = runs.config(rounds=3)
    changed, keys, _ = prepare(config, traced=False)
    step = rounds.open_rounds(changed, keys, state).compile(state)
    loss = step(jax.tree.map(jnp.copy, state))[1]["loss"]  # it donates the state
    assert not np.allclose(loss, resident[0][0][1]["loss"])
    assert evaluator(changed)(state) == scores
