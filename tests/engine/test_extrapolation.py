"""Risk extrapolation aggregation: closed form, SLSQP, what is refused, and rounds with it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import runs
from federations import OneNorm, assert_equal, batches_of, variables_of
from fedjax_bn.aggregation import risk_extrapolation
from fedjax_bn.arguments.errors import RiskError
from fedjax_bn.engine.extrapolation import check_risks, equal_risks, least_variance
from fedjax_bn.methods import fedavg
from fedjax_bn.training.rounds import Rounds

RISKS = st.lists(st.floats(-4, 2), min_size=2, max_size=100).map(lambda x: 10 ** np.array(x))
COUNTS = st.sampled_from((2, 9, 100))  # few shapes, so that little is compiled
RULE, SGD = risk_extrapolation(3.0), optax.sgd(0.1)
ETAS = st.sampled_from((0.0, 0.3, 0.5, 0.8, 3.0))


def by_hand(sizes, risks, eta):
    inverse = 1 / np.asarray(risks, np.float64)
    powers = np.exp(eta * inverse / inverse.sum() + np.asarray(sizes) / np.sum(sizes))
    return powers / powers.sum()


@settings(max_examples=40, deadline=None)
@given(risks=RISKS, scale=st.sampled_from((1e-6, 1.0, 1e6)))
@example(risks=np.where(np.arange(100) % 2, 1e-4, 1e2), scale=1.0)
def test_least_squares_find_the_closed_form_over_six_decades_of_risks(risks, scale):
    inverse = 1 / risks
    ours = least_variance(scale * risks)
    np.testing.assert_allclose(ours, inverse / inverse.sum(), rtol=0, atol=2e-6)


@settings(max_examples=8, deadline=None)
@given(count=COUNTS, eta=ETAS, seed=st.integers(0, 999))
def test_weights_are_the_softmax_of_equation_18(count, eta, seed):
    random = np.random.default_rng(seed)
    sizes, risks = random.integers(1, 900, count), 10 ** random.uniform(-4, 2, count)
    weights = risk_extrapolation(eta)(jnp.asarray(sizes), jnp.asarray(risks, jnp.float32))
    np.testing.assert_allclose(weights, by_hand(sizes, risks, eta), rtol=2e-5)
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)


def test_in_float64_both_solvers_give_the_same_weights_under_jit(x64):
    random = np.random.default_rng(3)
    for count in (2, 7, 100):
        sizes, risks = random.integers(1, 500, count), 10 ** random.uniform(-4, 2, count)
        ours, theirs = (
            jax.jit(risk_extrapolation(0.8, solver))(jnp.asarray(sizes), jnp.asarray(risks))
            for solver in ("closed_form", "slsqp")
        )
        assert ours.dtype == jnp.float64
        np.testing.assert_allclose(ours, by_hand(sizes, risks, 0.8), rtol=1e-12)
        np.testing.assert_allclose(theirs, ours, rtol=2e-6)


@settings(max_examples=20, deadline=None)
@given(count=COUNTS, seed=st.integers(0, 999))
def test_the_closed_form_makes_the_weighed_risks_equal(count, seed):
    risks = jnp.asarray(10 ** np.random.default_rng(seed).uniform(-4, 2, count), jnp.float32)
    parts = equal_risks(risks, jnp.ones(len(risks), bool)) * risks
    np.testing.assert_allclose(parts, parts.mean(), rtol=1e-5)


def test_without_eta_only_sizes_count_and_with_equal_risks_they_decide_alone():
    sizes = np.array([5, 10, 40])
    softmax = np.exp(sizes / 55) / np.exp(sizes / 55).sum()
    for eta, risks in ((0.0, [0.1, 9.0, 2.0]), (0.8, [0.7, 0.7, 0.7])):
        weights = risk_extrapolation(eta)(jnp.asarray(sizes), jnp.asarray(risks))
        np.testing.assert_allclose(weights, softmax, rtol=1e-6)


@pytest.mark.parametrize("solver", ["closed_form", "slsqp"])
def test_clients_without_samples_are_as_if_they_were_not_there(solver):
    rule = jax.jit(risk_extrapolation(0.5, solver))
    weights = rule(jnp.asarray([3, 0, 5, 0]), jnp.asarray([0.2, 0.0, 0.9, jnp.nan]))
    np.testing.assert_allclose(weights[jnp.array([0, 2])], by_hand([3, 5], [0.2, 0.9], 0.5), 1e-5)
    assert weights[1] == weights[3] == 0
    np.testing.assert_array_equal(rule(jnp.zeros(4, int), jnp.zeros(4)), np.zeros(4))


@pytest.mark.parametrize("risk", [0.0, np.nan, np.inf, -0.25, 1e-38])
@pytest.mark.parametrize("solver", ["closed_form", "slsqp"])
def test_a_risk_that_is_not_positive_and_finite_makes_its_clients_weight_nan(solver, risk):
    sizes, risks = jnp.asarray([4, 4, 4]), jnp.asarray([0.3, 0.5, risk], jnp.float32)
    weights = jax.jit(risk_extrapolation(0.5, solver))(sizes, risks)
    np.testing.assert_array_equal(np.isnan(weights), [False, False, True])
    with pytest.raises(ValueError, match="client 2"):
        check_risks(np.asarray(sizes), np.asarray(risks))


def test_smallest_and_largest_normal_floats_are_risks_like_others():
    for risks in ([2e-38, 6e-38, 4e-38], [1e38, 3e38, 2e38]):
        weights = risk_extrapolation(0.8)(jnp.ones(3, int), jnp.asarray(risks, jnp.float32))
        np.testing.assert_allclose(weights, by_hand([1, 1, 1], risks, 0.8), rtol=1e-5)


def test_a_round_with_a_wrong_risk_changes_nothing_and_says_so():
    """A loss of exactly 0: one logit is so far ahead that float32 has no smaller loss."""
    start = variables_of(OneNorm())
    start["params"]["c"]["bias"] = jnp.asarray([1e6, 0.0, 0.0])
    batches = batches_of((8, 8)) | {"label": jnp.zeros((2, 2, 4), jnp.int32)}
    method = fedavg(OneNorm(), optax.sgd(0.1), weigh=risk_extrapolation())
    before = method.init(jax.random.key(0), start, 2)
    shared = jax.tree.map(jnp.copy, before.shared)
    after, metrics = method.round(before, batches, jax.random.key(0))
    assert np.isnan(metrics["weights"]).all()
    assert_equal(after.shared, shared)
    np.testing.assert_allclose(after.weights, [0.5, 0.5])


def test_a_run_with_a_wrong_risk_stops_and_names_the_client(tmp_path, monkeypatch):
    runs.install(monkeypatch)
    monkeypatch.setattr("fedjax_bn.run.train.open_rounds", lambda *_: silent())
    with pytest.raises(RiskError, match="bee"):
        runs.run(tmp_path, weigh="risk_extrapolation")


def silent():
    """Rounds whose second client has no loss."""
    risk, weights = np.array([0.5, 0.0, 0.4]), np.full(3, np.nan)
    metrics = {"loss": risk, "risk": risk, "weights": weights, "finite": np.ones(3, bool)}
    metrics["server_finite"] = np.bool_(True)
    return Rounds("", lambda state: lambda state: (state, metrics))
