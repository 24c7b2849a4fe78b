"""BatchNorm: PyTorch's numbers, masked samples, and rules that cost nothing where not chosen."""

import json
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import norm_nets as nets
from fedjax_bn import adaptation
from fedjax_bn.normalization import BatchNorm, batch_statistics, normalize_with, running_statistics

SHAPES = [(7, 3), (5, 4, 6, 3), (2, 9, 3)]


@partial(jax.jit, static_argnums=0)
def train(layer, variables, x, valid=None):
    return layer.apply(variables, x, mutable=["batch_stats"], valid=valid)


def data(shape, seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.normal(size=shape) * [1, 10, 0.1] + [0, 100, -5], dtype)


@pytest.fixture
def variables():
    random = np.random.default_rng(1)
    leaf = lambda: jnp.asarray(random.uniform(0.5, 2, 3))  # noqa: E731
    return {
        "params": {"scale": leaf(), "bias": leaf()},
        "batch_stats": {"mean": leaf(), "var": leaf()},
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_two_steps_and_evaluation_equal_pytorch(x64, shape):
    torch = pytest.importorskip("torch")
    theirs = (torch.nn.BatchNorm1d if len(shape) < 4 else torch.nn.BatchNorm2d)(3).double()
    layer = BatchNorm()
    ours = layer.init(jax.random.key(0), data(shape, dtype=np.float32))
    ours = jax.tree.map(lambda x: x.astype(np.float64), ours)

    def assert_equal(y, x):
        expected = theirs(torch.tensor(np.asarray(x)).movedim(-1, 1)).movedim(1, -1)
        np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-10, atol=1e-12)

    for seed in range(2):
        x = data(shape, seed)
        y, moved = train(layer, ours, x)
        ours |= moved
        assert_equal(y, x)
    np.testing.assert_allclose(ours["batch_stats"]["mean"], theirs.running_mean, rtol=1e-12)
    np.testing.assert_allclose(ours["batch_stats"]["var"], theirs.running_var, rtol=1e-12)
    theirs.eval()
    assert_equal(layer.apply(ours, x), x)


@pytest.mark.parametrize("shape", SHAPES)
def test_masked_samples_do_not_exist(x64, variables, shape):
    x = data(shape)
    n = shape[0] - 1
    poisoned = x.at[n:].set(jnp.nan)
    y, moved = train(BatchNorm(), variables, poisoned, valid=jnp.arange(shape[0]) < n)
    short, expected = train(BatchNorm(), variables, x[:n])
    np.testing.assert_allclose(y[:n], short, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), moved, expected)


def test_variance_is_safe_far_from_zero():
    x = jnp.asarray(np.random.default_rng(0).normal(3e4, 1.0, (4096, 1)), jnp.float32)
    layer = BatchNorm(momentum=0.0)
    _, moved = train(layer, layer.init(jax.random.key(0), x), x)
    exact = np.asarray(x, np.float64).var(ddof=1)
    np.testing.assert_allclose(moved["batch_stats"]["var"], exact, rtol=1e-3)


@pytest.mark.parametrize("count", [0, 1])
def test_one_sample_or_none_gives_no_nan(variables, count):
    variables = jax.tree.map(lambda x: x.astype(jnp.float32), variables)
    x, valid = data((4, 3), dtype=np.float32), jnp.arange(4) < count

    def loss(params):
        y, moved = train(BatchNorm(), variables | {"params": params}, x, valid=valid)
        return jnp.sum(jnp.where(valid[:, None], y, 0) ** 2), moved

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, moved), gradients = step(variables["params"])
    for leaf in jax.tree.leaves((moved, gradients)):
        assert np.isfinite(leaf).all()
    y, _ = train(BatchNorm(), variables, x[:1])
    np.testing.assert_allclose(y[0], variables["params"]["bias"], rtol=1e-6)


def program(function, *arguments):
    return str(jax.make_jaxpr(function)(*arguments))


@pytest.mark.parametrize("model", [nets.HandMade(), nets.Remat()])
def test_rules_that_are_not_chosen_add_nothing_to_a_pass(model):
    images = nets.images_of(4).astype(jnp.float32)
    variables = nets.variables_of(model, images)
    plain = program(model.apply, variables, images)
    for adapt in (adaptation.running(model), adaptation.stateless(model, running_statistics)):
        assert program(lambda v, x, a=adapt: a.predict(v, (), x)[0], variables, images) == plain

    def trained(variables, images, rule=None, inside=True):
        if not inside:
            return model.apply(variables, images, mutable=["batch_stats"])
        with normalize_with(rule):
            return model.apply(variables, images, mutable=["batch_stats"])

    bare = program(lambda v, x: trained(v, x, inside=False), variables, images)
    assert program(trained, variables, images) == bare
    assert program(lambda v, x: trained(v, x, batch_statistics), variables, images) == bare


X = [[1.0, -2.0], [0.5, 4.0], [3.0, 1.0]]
PROGRAM = f"""
import flax.linen as nn
import jax
import jax.numpy as jnp
from fedjax_bn.adaptation import batch, running

model, ones, zeros = nn.BatchNorm(use_running_average=True), jnp.ones(2), jnp.zeros(2)
params, statistics = {{"scale": ones, "bias": zeros}}, {{"mean": zeros, "var": ones}}
variables, x = {{"params": params, "batch_stats": statistics}}, jnp.asarray({X})
predicts = [jax.jit(make(model).predict) for make in (batch, running, batch)]
print([predict(variables, (), x)[0].tolist() for predict in predicts])
"""


def test_python_without_assertions_applies_each_rule_in_its_own_passes():
    command = [sys.executable, "-O", "-c", PROGRAM]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    x = np.array(X)
    by_batch, by_running = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), x / np.sqrt(1 + 1e-5)
    expected = [by_batch, by_running, by_batch]
    np.testing.assert_allclose(json.loads(result.stdout), expected, rtol=1e-5, atol=1e-6)
