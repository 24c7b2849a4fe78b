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

SIZES, CLIENTS = jnp.asarray([5, 3, 4], jnp.int32), jnp.arange(3, dtype=jnp.int32)


def test_each_client_makes_its_own_number_of_epochs():
    draw = by_epochs(2, (1, 3, 2))(SIZES, CLIENTS, 5, jax.random.key(0))
    assert draw.index.shape == draw.valid.shape == (3, 9, 2)
    for k, (size, epochs) in enumerate(((5, 1), (3, 3), (4, 2))):
        for epoch in range(3):
            steps = slice(3 * epoch, 3 * epoch + 3)
            seen = np.sort(draw.index[k, steps][draw.valid[k, steps]])
            expected = np.arange(size) if epoch < epochs else []
            np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("x64", [False, True])
def test_what_a_client_draws_depends_on_no_other_clients_size(x64):
    """A client alone, or beside one of any size, draws its samples in the same order."""
    everybody = SIZES, CLIENTS, 5, jax.random.key(0)
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        three, single = by_epochs(2, (3,))(*everybody), by_epochs(2, (1,))(*everybody)
        steps = by_steps(2, 7, 3)(*everybody)
        for k, size in enumerate([5, 3, 4]):
            row = SIZES[k : k + 1], CLIENTS[k : k + 1], size, jax.random.key(0)
            alone, drawn = by_epochs(2, (3,))(*row), three.index[k][three.valid[k]]
            np.testing.assert_array_equal(alone.index[alone.valid], drawn)
            np.testing.assert_array_equal(single.index[k][single.valid[k]], drawn[:size])
            np.testing.assert_array_equal(by_steps(2, 7, size)(*row).index[0], steps.index[k])


def test_steps_take_the_same_keys_with_and_without_empty_ones_between_them():
    valid = jnp.asarray([[1, 1], [1, 0], [0, 0], [1, 1], [0, 0]], bool)
    key = jax.random.key(0)
    keys = jax.random.key_data(step_keys(key, valid))[np.array([0, 1, 3])]
    np.testing.assert_array_equal(keys, jax.random.key_data(jax.random.split(key, 3)))


def test_a_run_takes_the_epochs_of_each_client(monkeypatch):
    runs.install(monkeypatch)
    config = runs.config(client_epochs=("1", "3", "2"))
    experiment = build(config)
    draw = experiment.work.sampler(11, 22)
    draw = draw(jnp.asarray([22, 18, 11]), CLIENTS, 22, jax.random.key(0))
    np.testing.assert_array_equal(draw.valid.sum((1, 2)), [22, 54, 22])
    record = {"round": 1, "seconds": 2.0, "accuracy": {"mean": 1.0}}
    assert summarize(experiment, [record], 1.0)["samples_per_second"] == 98 / 2


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_pytorchs(nesterov):
    torch = pytest.importorskip("torch")
    config = runs.config(**{"optimizer.momentum": 0.9, "optimizer.nesterov": nesterov}).optimizer
    ours, optimizer = jnp.asarray([1.0, -2.0]), OPTIMIZERS["sgd"](config, config.learning_rate)
    theirs = torch.tensor([1.0, -2.0], requires_grad=True)
    other = torch.optim.SGD([theirs], lr=0.01, momentum=0.9, nesterov=nesterov)
    state = optimizer.init(ours)
    for _ in range(4):
        updates, state = optimizer.update(jnp.cos(ours), state, ours)
        ours = optax.apply_updates(ours, updates)
        theirs.grad = torch.cos(theirs.detach())
        other.step()
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5)
