"""Weighted means and weighing rules in float64; risk extrapolation: closed form, SLSQP, rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import runs
from federations import OneNorm, assert_equal, batches_of, variables_of
from fedjax_bn.aggregation import by_size, risk_extrapolation, uniform, weighted_mean
from fedjax_bn.arguments.errors import RiskError
from fedjax_bn.engine.risk_extrapolation import check_risks
from fedjax_bn.engine.weighing import normalized, relative_weights
from fedjax_bn.methods import fedavg
from fedjax_bn.training.rounds import Rounds


def by_hand(sizes, risks, eta):
    inverse = 1 / np.asarray(risks, np.float64)
    powers = np.exp(eta * inverse / inverse.sum() + np.asarray(sizes) / np.sum(sizes))
    return powers / powers.sum()


def test_both_solvers_give_the_same_weights_over_six_decades_of_risks_under_jit(x64):
    random = np.random.default_rng(3)
    far_apart = np.where(np.arange(100) % 2, 1e-4, 1e2)
    drawn = [10 ** random.uniform(-4, 2, count) for count in (2, 9, 100)]
    for eta, scale in ((0.0, 1e-6), (0.8, 1.0), (3.0, 1e6)):
        for risks in (*drawn, far_apart):
            sizes, risks = random.integers(1, 500, len(risks)), scale * risks
            ours, least_variance = (
                jax.jit(risk_extrapolation(eta, solver))(jnp.asarray(sizes), jnp.asarray(risks))
                for solver in ("closed_form", "slsqp")
            )
            assert ours.dtype == jnp.float64
            np.testing.assert_allclose(ours, by_hand(sizes, risks, eta), rtol=1e-12)
            np.testing.assert_allclose(least_variance, ours, rtol=6e-6)


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
    with pytest.raises(ValueError, match="cat"):
        check_risks(np.asarray(sizes), np.asarray(risks), ["ant", "bee", "cat"])


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int8"])
def test_a_leaf_keeps_its_dtype(dtype):
    leaf = jnp.asarray([[1, 2], [4, 4]], dtype)
    mean = weighted_mean(leaf, jnp.asarray([1.0, 2.0]))
    assert mean.dtype == leaf.dtype
    np.testing.assert_allclose(
        np.asarray(mean, np.float64), [3, 10 / 3 // 1 if "int" in dtype else 10 / 3], rtol=1e-2
    )


def test_float64_leaves_are_averaged_in_float64(x64):
    leaf = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)))
    for weights in (jnp.asarray([40, 21, 56]), by_size(jnp.asarray([40, 21, 56]), jnp.zeros(3))):
        mean = weighted_mean(leaf, weights)
        np.testing.assert_allclose(mean, np.average(leaf, 0, [40, 21, 56]), rtol=1e-13)


def test_a_client_of_weight_zero_is_left_out_even_if_it_is_nan():
    leaf = jnp.asarray([[1.0, 2.0], [jnp.nan, jnp.inf], [3.0, 4.0]])
    np.testing.assert_array_equal(weighted_mean(leaf, jnp.asarray([1.0, 0.0, 1.0])), [2, 3])
    assert not np.isfinite(weighted_mean(leaf, jnp.ones(3))).any()


@pytest.mark.parametrize(
    ("rule", "sizes", "expected"),
    [
        (by_size, [40, 21, 56], [40 / 117, 21 / 117, 56 / 117]),
        (by_size, [0, 1, 3], [0, 0.25, 0.75]),
        (uniform, [40, 21, 56], [1 / 3, 1 / 3, 1 / 3]),
        (uniform, [0, 1, 3], [0, 0.5, 0.5]),
        (by_size, [0, 0], [0, 0]),
    ],
)
def test_weighing_rules_sum_to_one_over_those_who_count(rule, sizes, expected):
    sizes = jnp.asarray(sizes, jnp.int32)
    weights = rule(sizes, jnp.ones(len(sizes)))
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert weights.dtype == jnp.result_type(float)
    # Rounds over several devices weigh by these, and divide last.
    np.testing.assert_array_equal(normalized(relative_weights(rule, sizes)), weights)
