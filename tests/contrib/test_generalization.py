"""FedDG-GA's weights: closed forms, a federation by hand, and beside any method's message."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import runs
from federations import (
    PlainNet,
    batches_of,
    begun,
    global_variables,
    in_float64,
    once,
    run_rounds,
    variables_of,
)
from fedjax_bn.aggregation import generalization_adjustment
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.engine.weighing import adjust_weights
from fedjax_bn.methods import fedavg
from fedjax_bn.methods.selection import validation_loss
from fedjax_bn.run.experiment import start
from fedjax_bn.state import Received

SIZES, KEY = (9, 4, 6), jax.random.key(1)
SGD = optax.sgd(0.1)
ALL = jnp.ones(3, bool)


def first_bias(variables, received):
    """A metric that needs no data."""
    del received
    return variables["params"]["dense"]["bias"][0]


def test_weights_stay_a_distribution_and_who_is_absent_keeps_its_own():
    random = np.random.default_rng(0)
    weights, once = np.full(5, 0.2, np.float32), jax.jit(adjust_weights)
    for _ in range(50):
        present = random.random(5) < 0.7
        gaps = np.where(present, random.normal(size=5), 0).astype(np.float32)
        new = np.asarray(once(weights, gaps, 0.9, present))
        np.testing.assert_array_equal(new[~present], weights[~present])
        assert (new >= 0).all()
        np.testing.assert_allclose(new.sum(), 1, rtol=1e-5)
        weights = new
    assert weights.max() > 0.3


def test_weights_of_a_federation_are_those_of_the_authors_loop(x64):
    """A client's gap is taken of the model aggregated in the round before."""
    variables = in_float64(variables_of(PlainNet()))
    rule = generalization_adjustment(first_bias, step=0.2, rounds=4)
    method, plain = fedavg(PlainNet(), SGD, weigh=rule), once(fedavg, PlainNet(), SGD)
    state, a, trained = begun(method, KEY, variables, 3), np.full(3, 1 / 3), None
    for r in range(3):
        server = first_bias(global_variables(state), None)
        if trained is not None:  # after round r - 1, in the paper's count
            gaps = np.asarray(server - trained)
            a = a + (0.2 - (r - 2) * 0.2 / 4) * gaps / np.abs(gaps).max() / 3
            a = np.clip(a, 0, 1) / np.clip(a, 0, 1).sum()
        alone = [
            run_rounds(
                plain,
                global_variables(state),
                jax.tree.map(lambda x, k=k: x[k : k + 1], batches_of(SIZES)),
            )[0]
            for k in range(3)
        ]
        trained = np.array([first_bias(global_variables(one), None) for one in alone])
        state, metrics = method.round(state, batches_of(SIZES), KEY)
        np.testing.assert_allclose(metrics["weights"], a, rtol=1e-9)
        np.testing.assert_allclose(first_bias(global_variables(state), None), a @ trained)
    assert np.ptp(a) > 0.05


def test_with_accuracy_the_sign_turns():
    told = {"received": jnp.asarray([1.0, 0.0]), "trained": jnp.asarray([0.0, 0.0])}
    weights = {}
    for metric in ("loss", "accuracy"):
        rule = generalization_adjustment(first_bias, metric=metric, rounds=10)
        state, sizes = rule.init(2), jnp.asarray([5, 5])
        for _ in range(2):
            weights[metric], state = rule.weigh(state, sizes, jnp.zeros(2), told)
    # Equation: 1/2 +- the step of r = 0, which is 0.2 + 0.2 / 10, over 2; the sum was not 1.
    np.testing.assert_allclose(weights["loss"], np.array([0.61, 0.5]) / 1.11, rtol=1e-6)
    np.testing.assert_allclose(weights["accuracy"], np.array([0.39, 0.5]) / 0.89, rtol=1e-6)


def test_the_loss_on_validation_samples_is_their_mean_cross_entropy(x64):
    variables = in_float64(variables_of(PlainNet()))
    one = jax.tree.map(lambda x: x[0], batches_of((10,)))
    loss = validation_loss(PlainNet(), lambda images, dtype: images.astype(dtype))
    ours = loss(variables, Received((), (), validation=one))
    dense, valid = variables["params"]["dense"], np.asarray(one["valid"]).ravel()
    x = np.asarray(one["image"]).reshape(-1, 6)[valid]
    z = x @ dense["kernel"] + dense["bias"]
    logs = z - np.log(np.exp(z).sum(1, keepdims=True))
    label = np.asarray(one["label"]).ravel()[valid]
    np.testing.assert_allclose(ours, -logs[np.arange(10), label].mean(), rtol=1e-12)


def test_a_rule_without_a_measure_says_what_it_needs():
    method = fedavg(PlainNet(), SGD, weigh=generalization_adjustment())
    state = begun(method, KEY, variables_of(PlainNet()), 3)
    with pytest.raises(ValueError, match=r"measure=fedjax_bn\.methods\.selection.validation_loss"):
        method.round(state, batches_of(SIZES), KEY)


def test_a_configuration_spells_it_for_any_method_and_needs_validation_samples(monkeypatch):
    runs.install(monkeypatch)
    text = "generalization_adjustment:metric=accuracy:step=0.1"
    start.prepare(runs.config(method="fedbn", weigh=text))  # traces a round
    runs.install(monkeypatch, runs.dataset(validation=False))
    with pytest.raises(ConfigError, match=r"config\.weigh='generalization_.* needs validation"):
        start.prepare(runs.config(method="fedbn", weigh=text))
