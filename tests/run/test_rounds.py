"""Where a round's data come from changes nothing: device, stream, and augmentation in training."""

import jax
import numpy as np
import pytest

import runs
from federations import assert_close, assert_equal
from fedjax_bn.data.sampling import point_to, rows_of, stack_clients
from fedjax_bn.run.config.keys import check
from fedjax_bn.run.evaluation.evaluate import evaluator
from fedjax_bn.run.evaluation.scoring_data import stack_batches
from fedjax_bn.run.experiment import build as module
from fedjax_bn.run.experiment.task import AUGMENTATIONS
from fedjax_bn.run.training import rounds, train
from fedjax_bn.run.training.stream import stream_rounds, stream_tests


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(module.DATASETS, "tiny", lambda config: runs.DATA)


def first_rounds(config, number):
    """States after each of the first rounds, and the rounds' note."""
    check(config)
    experiment, keys, start = train.prepare(config)
    state = start()
    opened = rounds.open_rounds(config, experiment, keys, state)
    step, states = opened.compile(state), []
    for _ in range(number):
        state, _ = step(state)
        states.append(jax.device_get(state))
    return states, opened.note


def small_limit(config):
    config.data.device_megabytes = 0
    return config


@pytest.mark.parametrize(("steps", "cohort"), [(0, 0), (5, 0), (0, 2)])
def test_the_stream_holds_the_samples_that_the_device_gathers_in_their_order(steps, cohort):
    config = runs.config(local_steps=steps, rounds=3, clients_per_round=cohort)
    experiment, keys, _ = train.prepare(config)
    splits = [domain.train for domain in experiment.internal.domains]
    data = stack_clients(splits)
    longest = data.labels.shape[1]

    def draw(number):
        return rounds.draw_round(config, experiment, longest, keys, number)

    for first in (0, 2):
        for number, streamed in enumerate(stream_rounds(splits, draw, first, 3), first):
            client, chosen = draw(number)
            resident = point_to(rows_of(data, client), chosen)
            images = jax.vmap(lambda source, index: source[index])(
                resident["source"], resident["image"]
            )
            valid = np.asarray(resident["valid"])
            np.testing.assert_array_equal(streamed["valid"], valid)
            np.testing.assert_array_equal(streamed["size"], resident["size"])
            for name, expected in (("image", images), ("label", resident["label"])):
                np.testing.assert_array_equal(
                    streamed[name][valid], np.asarray(expected)[valid], err_msg=name
                )
        assert number == 2


def resident_and_streamed():
    """The states after each of three rounds, both ways."""
    resident, note = first_rounds(runs.config(rounds=3), 3)
    assert "stay on the device" in note
    streamed, note = first_rounds(small_limit(runs.config(rounds=3)), 3)
    assert "are streamed" in note
    return resident, streamed


def test_streamed_rounds_end_where_resident_ones_do():
    assert_close(*resident_and_streamed(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_streamed_rounds_end_with_the_bits_of_resident_ones():
    """Both are programs of their own, and equal to the bit as XLA compiles them by default."""
    assert_equal(*resident_and_streamed())


def test_streamed_test_batches_are_the_resident_ones():
    splits = [domain.test for domain in runs.DATA.domains]
    whole = jax.device_get(stack_batches(splits, 4))
    blocks = list(stream_tests(splits, 4, 1e-9))
    assert len({block.images.shape for block in blocks}) == 1
    for name in ("images", "labels", "valid", "client"):
        joined = np.concatenate([getattr(block, name) for block in blocks])
        np.testing.assert_array_equal(joined[: len(whole.client)], getattr(whole, name))
        if name == "valid":
            assert not joined[len(whole.client) :].any()


def test_streamed_evaluation_counts_as_the_resident_one():
    config = runs.config(target=runs.DATA.domains[0].name)
    experiment, _, start = train.prepare(config)
    state = start()
    assert evaluator(config, experiment)(state) == evaluator(small_limit(config), experiment)(state)


def test_augmentation_changes_training_and_never_evaluation(monkeypatch):
    config = runs.config()
    plain, keys, start = train.prepare(config)
    monkeypatch.setitem(AUGMENTATIONS, "none", lambda size: lambda key, images: images * 0)
    changed, _, _ = train.prepare(config)
    state = start()
    losses = []
    for experiment in (plain, changed):
        step = rounds.open_rounds(config, experiment, keys, start()).compile(state)
        losses.append(np.asarray(step(start())[1]["loss"]))
    assert not np.allclose(*losses)
    assert evaluator(config, plain)(state) == evaluator(config, changed)(state)
