"""How much and by what the clients train: epochs of each client, the local optimizer's keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import runs
from fedjax_bn.data.sampling import by_epochs, by_steps
from fedjax_bn.engine.keys import step_keys
from fedjax_bn.run.experiment.build import build
from fedjax_bn.run.experiment.method import OPTIMIZERS
from fedjax_bn.training.records import summarize

KEY = jax.random.key(0)
SIZES, CLIENTS = jnp.asarray([5, 3, 4], jnp.int32), jnp.arange(3, dtype=jnp.int32)


def test_each_client_makes_its_own_number_of_epochs():
    draw = jax.jit(by_epochs(2, (1, 3, 2)), static_argnums=2)(SIZES, CLIENTS, 5, KEY)
    assert draw.index.shape == draw.valid.shape == (3, 9, 2)
    for k, (size, epochs) in enumerate(((5, 1), (3, 3), (4, 2))):
        for epoch in range(3):
            steps = slice(3 * epoch, 3 * epoch + 3)
            seen = np.sort(draw.index[k, steps][draw.valid[k, steps]])
            expected = np.arange(size) if epoch < epochs else []
            np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_client_draws_depends_on_no_other_clients_size(x64):
    """A client alone, or beside one of any size, draws its samples in the same order."""

    def drawn(sampler, rows, longest):
        draw = jax.jit(sampler, static_argnums=2)(SIZES[rows], CLIENTS[rows], longest, KEY)
        return np.asarray(draw.index)[np.asarray(draw.valid)]

    k, size, everybody = slice(1, 2), 3, slice(None)
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        alone = drawn(by_epochs(2, (3,)), k, size)
        np.testing.assert_array_equal(drawn(by_epochs(2, (3,)), everybody, 5)[15:24], alone)
        np.testing.assert_array_equal(drawn(by_epochs(2, (1,)), everybody, 5)[5:8], alone[:3])
        steps = drawn(by_steps(2, 7, 3), everybody, 5)[14:28]
        np.testing.assert_array_equal(steps, drawn(by_steps(2, 7, size), k, size))


def test_steps_take_the_same_keys_with_and_without_empty_ones_between_them():
    valid = jnp.asarray([[1, 1], [1, 0], [0, 0], [1, 1], [0, 0]], bool)
    keys = jax.random.key_data(jax.jit(step_keys)(KEY, valid))[np.array([0, 1, 3])]
    np.testing.assert_array_equal(keys, jax.random.key_data(jax.random.split(KEY, 3)))


def test_a_run_takes_the_epochs_of_each_client(monkeypatch):
    runs.install(monkeypatch)
    config = runs.config(client_epochs=("1", "3", "2"))
    experiment = build(config)
    draw = jax.jit(experiment.work.sampler(11, 22), static_argnums=2)
    draw = draw(jnp.asarray([22, 18, 11]), CLIENTS, 22, KEY)
    np.testing.assert_array_equal(draw.valid.sum((1, 2)), [22, 54, 22])
    record = {"round": 1, "seconds": 2.0, "accuracy": {"mean": 1.0}}
    assert summarize(experiment, [record], 1.0)["samples_per_second"] == 98 / 2


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_pytorchs(nesterov):
    """v = 0.9 v + g, and a step of -lr v, by Nesterov of -lr (g + 0.9 v): `torch.optim.SGD`."""
    config = runs.config(**{"optimizer.momentum": 0.9, "optimizer.nesterov": nesterov}).optimizer
    optimizer = OPTIMIZERS["sgd"](config, config.learning_rate)
    expected, velocity = np.array([1.0, -2.0]), np.zeros(2)
    values = jnp.asarray([1.0, -2.0])
    state = optimizer.init(values)
    for _ in range(4):
        updates, state = optimizer.update(jnp.cos(values), state, values)
        values = optax.apply_updates(values, updates)
        gradient = np.cos(expected)
        velocity = 0.9 * velocity + gradient
        expected = expected - 0.01 * (gradient + 0.9 * velocity if nesterov else velocity)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
