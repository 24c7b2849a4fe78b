"""Where a round's data come from changes nothing: device, stream, and augmentation in training."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from federations import assert_close, assert_equal
from fedjax_bn.data.domain import Split
from fedjax_bn.data.sampling import Draw, point_to, rows_of, stack_clients
from fedjax_bn.run.config.keys import check
from fedjax_bn.run.experiment import build as module
from fedjax_bn.run.experiment.start import prepare
from fedjax_bn.run.experiment.task import AUGMENTATIONS
from fedjax_bn.training import rounds
from fedjax_bn.training.evaluation.evaluate import evaluator
from fedjax_bn.training.evaluation.scoring import SplitBatches
from fedjax_bn.training.stream import stream_rounds


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


def small_limit(config):
    config.data.device_megabytes = 0
    return config


@pytest.mark.parametrize(("steps", "cohort"), [(0, 0), (5, 0), (0, 2)])
def test_the_stream_holds_the_samples_that_the_device_gathers_in_their_order(steps, cohort):
    config = runs.config(local_steps=steps, rounds=3, clients_per_round=cohort)
    experiment, keys, _ = prepare(config, traced=False)
    splits = [domain.train for domain in experiment.internal.domains]
    data, (drawing, facts) = stack_clients(splits), rounds.drawing_of(experiment)
    draw = jax.jit(lambda number: drawing(facts, keys, number)[1:3])

    @jax.jit
    def gathered(number):
        client, chosen = drawing(facts, keys, number)[1:3]
        resident = point_to(rows_of(data, client), chosen)
        return resident, jax.vmap(lambda a, index: a[index])(resident["source"], resident["image"])

    for first in (0, 2):
        for number, streamed in enumerate(stream_rounds(splits, draw, first, 3), first):
            resident, images = gathered(number)
            valid = np.asarray(resident["valid"])
            np.testing.assert_array_equal(streamed["valid"], valid)
            np.testing.assert_array_equal(streamed["size"], resident["size"])
            for name, expected in (("image", images), ("label", resident["label"])):
                np.testing.assert_array_equal(
                    streamed[name][valid], np.asarray(expected)[valid], err_msg=name
                )
        assert number == 2


@pytest.fixture(scope="module")
def streamed():
    """The same rounds of data on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)
        return first_rounds(small_limit(runs.config(rounds=3)), 3)


def test_streamed_rounds_end_where_resident_ones_do(resident, streamed):
    assert "stay on the device" in resident[1]
    assert "are streamed" in streamed[1]
    assert_close(resident[0], streamed[0], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_streamed_rounds_end_with_the_bits_of_resident_ones(resident, streamed):
    """Both are programs of their own, and equal to the bit as XLA compiles them by default."""
    assert_equal(resident[0], streamed[0])


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


def test_while_a_cohort_trains_the_samples_of_the_next_are_read():
    class Watched(np.ndarray):
        def __getitem__(self, index):
            read.add(int(np.asarray(index).ravel()[0]))
            return np.asarray(super().__getitem__(index))

    def draw(number):
        index = np.full((1, 1, 2), number, np.int32)
        return np.zeros(1, np.int32), Draw(index, np.ones(index.shape, bool))

    read, end = set(), time.monotonic() + 30
    images = np.zeros((50, 3), np.float32).view(Watched)
    stream = stream_rounds([Split(images, np.zeros(50, np.int32))], draw, 0, 50)
    next(stream)
    while 1 not in read and time.monotonic() < end:
        time.sleep(0.01)
    assert 1 in read
    assert 49 not in read  # nor is all of it read ahead
