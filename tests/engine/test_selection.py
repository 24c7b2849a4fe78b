"""Local selection: the best state of a round, wherever in the round it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import runs
from fedjax_bn import client as local
from fedjax_bn.aggregation import uniform
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.domain import Split
from fedjax_bn.data.sampling import validation_batches
from fedjax_bn.engine.images import standardize
from fedjax_bn.local_step import LocalStep
from fedjax_bn.methods import scaffold
from fedjax_bn.methods.selection import best_of_round, validation_score
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.state import Received


def update(variables, state, batch, received, key):
    del received, key
    value = variables["params"] + batch["image"].sum()
    return {"params": value}, state + 1, value


COUNTING = LocalStep(init=lambda variables: jnp.zeros((), jnp.int32), update=update)
START = {"params": jnp.zeros(())}


def batches(steps):
    label, valid = jnp.zeros((steps, 1), jnp.int32), jnp.ones((steps, 1), bool)
    return {"image": jnp.ones((steps, 1)), "label": label, "valid": valid}


def near(variables, received):
    """The score of a client whose memory is the wanted sum."""
    return -jnp.abs(variables["params"] - received.memory)


@functools.cache
def selecting(every):
    """Local training of ten steps towards a sum, as one program."""
    select, key = best_of_round(near, every), jax.random.key(0)
    begin = START, jnp.int32(0), batches(10), key
    return jax.jit(lambda target: select(COUNTING, Received({}, {}, target), *begin))


@pytest.mark.parametrize(
    ("target", "every", "best"),
    [
        (7, 2, 6),  # between 6 and 8: the first of equals
        (100, 2, 10),
        (0, 2, 2),  # what was received is not a candidate
        (10, 4, 10),  # the last steps are fewer than a chunk
        (3, 50, 10),
    ],
)
def test_the_state_with_the_best_score_is_kept(target, every, best):
    trained = selecting(every)(float(target))
    np.testing.assert_array_equal(trained.variables["params"], best)
    np.testing.assert_array_equal(trained.losses, np.arange(1, 11))
    np.testing.assert_array_equal(trained.counts, 1)
    np.testing.assert_array_equal(trained.state, 10)


def test_empty_steps_between_the_others_change_nothing():
    """A client of several epochs beside larger ones has them, and alone over Flower it has none."""

    def noisy(variables, state, batch, received, key):
        value = variables["params"] + batch["image"].sum() * jax.random.uniform(key)
        return {"params": value}, state + 1, value

    step, state = LocalStep(COUNTING.init, noisy), jnp.zeros((), jnp.int32)
    valid = np.array([1, 0, 1, 1, 0, 1, 1, 1], bool)
    data = batches(8) | {"valid": jnp.asarray(valid)[:, None]}
    key, received = jax.random.key(0), Received({}, {}, 1.0)
    select = jax.jit(lambda data: best_of_round(near, 2)(step, received, START, state, data, key))
    among, alone = select(data), select(batches(6))
    np.testing.assert_array_equal(among.losses, np.where(valid, among.losses, 0))
    np.testing.assert_array_equal(among.losses[valid], alone.losses)
    np.testing.assert_array_equal(among.counts, valid)
    assert 0 < alone.steps < 6
    for name in ("variables", "state", "steps"):
        jax.tree.map(np.testing.assert_array_equal, *(getattr(one, name) for one in (among, alone)))
    plain = jax.jit(lambda data: local.run_steps(step, received, START, state, data, key))
    np.testing.assert_array_equal(plain(data).steps, 6)


def splits_of(sizes):
    random = np.random.default_rng(0)
    return [
        Split(
            random.normal(size=(n, federations.FEATURES)).astype(np.float32),
            random.integers(0, federations.CLASSES, n).astype(np.int32),
        )
        for n in sizes
    ]


def test_validation_score_is_the_share_of_right_answers_with_running_statistics():
    model, splits = federations.OneNorm(), splits_of([7, 3])
    variables, prepare = federations.variables_of(model), standardize()
    validation = validation_batches([*splits, splits[0]], batch_size=4)
    measure = validation_score(model, prepare)
    score = jax.jit(lambda own: measure(variables, Received({}, {}, validation=own)))
    apply = jax.jit(model.apply)
    for k, split in enumerate([*splits, splits[0]]):
        right = np.asarray(apply(variables, split.images)).argmax(-1) == split.labels
        ours = score(federations.client(validation, k))
        np.testing.assert_allclose(ours, 100 * right.mean(), rtol=1e-6)


def test_scaffold_divides_by_the_steps_behind_what_is_uploaded():
    """With the state after one step chosen, x - c lr is what the server averages, whatever S is."""
    model, sizes = federations.OneNorm(), [20, 12, 16]
    train = best_of_round(lambda variables, received: jnp.zeros(()), 1)
    method = scaffold(model, optax.sgd(0.5), clients="map", train=train, weigh=uniform)
    validation = {"validation": validation_batches(splits_of([7, 3, 5]), batch_size=4)}
    batches, start = federations.batches_of(sizes) | validation, federations.variables_of(model)
    state, _ = federations.run_rounds(method, start, batches)
    moved = jax.tree.map(
        lambda x, y: (np.asarray(x) - y) / np.float32(0.5), start["params"], state.shared["params"]
    )
    federations.assert_close(state.server.sent, moved, 1e-3, 1e-5)


def test_selection_needs_validation_samples(monkeypatch):
    data = runs.dataset(validation=False)
    monkeypatch.setitem(experiment.DATASETS, "tiny", lambda config: data)
    with pytest.raises(ConfigError, match="local_selection=3"):
        prepare(runs.config(local_selection=3))
