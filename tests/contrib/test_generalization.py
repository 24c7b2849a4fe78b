"""FedDG-GA's weights: closed forms, a federation by hand, and beside any method's message."""

import jax
import numpy as np
import optax
import pytest

import federations as fed
import runs
from federations import once
from fedjax_bn.aggregation import generalization_adjustment
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.methods import fedavg
from fedjax_bn.methods.selection import validation_loss
from fedjax_bn.run.experiment import build as module
from fedjax_bn.state import Received

SIZES, KEY = (9, 4, 6), jax.random.key(1)
SGD = optax.sgd(0.1)


def first_bias(variables, received):
    """A metric that needs no data."""
    del received
    return variables["params"]["dense"]["bias"][0]


def test_weights_stay_a_distribution_and_who_is_absent_keeps_its_own():
    random = np.random.default_rng(0)
    rule = generalization_adjustment(first_bias, step=0.9, rounds=10**6)
    state, weigh = rule.init(5), jax.jit(rule.weigh)
    for _ in range(50):
        present = random.random(5) < 0.7
        sent = random.normal(size=(2, 5)).astype(np.float32)
        messages = {"received": sent[0], "trained": sent[1]}
        weights, after = weigh(state, present.astype(np.int32), np.zeros(5), messages)
        new, before = np.asarray(after["weight"]), state["weight"]
        np.testing.assert_array_equal(new[~present], before[~present])
        np.testing.assert_array_equal(weights, np.where(present, new, 0))
        assert (new >= 0).all()
        np.testing.assert_allclose(new.sum(), 1, rtol=1e-5)
        state = after
    assert state["weight"].max() > 0.3


def test_weights_of_a_federation_are_those_of_the_authors_loop(x64):
    """A client's gap is taken of the model aggregated in the round before."""
    variables = fed.in_float64(fed.variables_of(fed.PlainNet()))
    rule = generalization_adjustment(first_bias, step=0.2, rounds=4)
    method, plain = fedavg(fed.PlainNet(), SGD, weigh=rule), once(fedavg, fed.PlainNet(), SGD)
    state, a, trained = fed.begun(method, KEY, variables, 3), np.full(3, 1 / 3), None
    for r in range(3):
        server = first_bias(fed.global_variables(state), None)
        if trained is not None:  # after round r - 1, in the paper's count
            gaps = np.asarray(server - trained)
            a = a + (0.2 - (r - 2) * 0.2 / 4) * gaps / np.abs(gaps).max() / 3
            a = np.clip(a, 0, 1) / np.clip(a, 0, 1).sum()
        start, batches = fed.global_variables(state), fed.batches_of(SIZES)
        alone = [fed.run_rounds(plain, start, fed.client(batches, [k]))[0] for k in range(3)]
        trained = np.array([first_bias(fed.global_variables(one), None) for one in alone])
        state, metrics = method.round(state, fed.batches_of(SIZES), KEY)
        np.testing.assert_allclose(metrics["weights"], a, rtol=1e-9)
        np.testing.assert_allclose(first_bias(fed.global_variables(state), None), a @ trained)
    assert np.ptp(a) > 0.05


def test_the_loss_on_validation_samples_is_their_mean_cross_entropy(x64):
    variables = fed.in_float64(fed.variables_of(fed.PlainNet()))
    one = jax.tree.map(lambda x: x[0], fed.batches_of((10,)))
    loss = validation_loss(fed.PlainNet(), lambda images, dtype: images.astype(dtype))
    ours = loss(variables, Received((), (), validation=one))
    dense, valid = variables["params"]["dense"], np.asarray(one["valid"]).ravel()
    x = np.asarray(one["image"]).reshape(-1, 6)[valid]
    z = x @ dense["kernel"] + dense["bias"]
    logs = z - np.log(np.exp(z).sum(1, keepdims=True))
    label = np.asarray(one["label"]).ravel()[valid]
    np.testing.assert_allclose(ours, -logs[np.arange(10), label].mean(), rtol=1e-12)


def test_a_configuration_spells_it_for_any_method_and_needs_validation_samples(monkeypatch):
    runs.install(monkeypatch)
    text = "generalization_adjustment:metric=accuracy:step=0.1"
    module.prepare(runs.config(method="fedbn", weigh=text))  # traces a round
    runs.install(monkeypatch, runs.dataset(validation=False))
    with pytest.raises(ConfigError, match=r"config\.weigh='generalization_.* needs validation"):
        module.prepare(runs.config(method="fedbn", weigh=text))
