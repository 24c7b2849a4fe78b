"""UniFed's bounds: their terms beside closed forms and NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_bn.theory import bounds

RANDOM = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def float64(x64):
    """All of it."""


def client(size, dimension=3, shift=0.0, wrong=0.25):
    """Gaussian features, and predictions of which a known share is wrong."""
    labels = RANDOM.integers(0, 4, size)
    off = np.arange(size) < round(wrong * size)
    features = RANDOM.normal(size=(size, dimension)) + shift
    return bounds.Client(
        *map(jnp.asarray, (features, (labels + off) % 4, (labels + off) % 4, labels))
    )


def brute_force(first, second):
    """sup |P(A) - P'(A)| over all intervals with ends at samples, closed, open and half-open."""
    ends = np.unique(np.concatenate([first, second]))
    ends = np.sort(np.concatenate([ends - 1e-9, ends + 1e-9]))
    return max(
        abs(np.mean((first > a) & (first < b)) - np.mean((second > a) & (second < b)))
        for a in ends
        for b in ends
        if a < b
    )


@pytest.mark.parametrize("sizes", [(7, 5), (6, 9), (1, 4)])
def test_kuipers_statistic_is_the_supremum_over_intervals_ties_included(sizes):
    first, second = (np.round(RANDOM.normal(size=size), 1) for size in sizes)
    found = bounds.kuiper(jnp.asarray(first), jnp.asarray(second))
    np.testing.assert_allclose(found, brute_force(first, second), rtol=1e-12)


def test_equal_samples_are_not_apart_and_separate_ones_wholly():
    x, directions = jnp.asarray(RANDOM.normal(size=(50, 3))), jnp.eye(3)
    assert bounds.divergence(x, x, directions) == 0
    assert bounds.divergence(x, x + 100, directions) == 2


def test_the_divergence_of_gaussians_is_that_of_their_best_half_space():
    mean, other = np.array([1.0, -0.5]), np.array([0.2, 0.3])
    mixing = np.array([[1.0, 0.4], [0.0, 0.7]])
    covariance = mixing.T @ mixing
    exact = bounds.gaussian_divergence(*map(jnp.asarray, (mean, other, covariance)))
    distance = np.sqrt((mean - other) @ np.linalg.inv(covariance) @ (mean - other))
    total_variation = stats.norm.cdf(distance / 2) - stats.norm.cdf(-distance / 2)
    np.testing.assert_allclose(exact, 2 * total_variation, rtol=1e-12)
    draws = [jnp.asarray(RANDOM.normal(size=(20000, 2)) @ mixing + m) for m in (mean, other)]
    across = bounds.discriminant(*draws)[None]
    # Kuiper's statistic exceeds the half-line's by the noise of the other side, 1/sqrt(M).
    np.testing.assert_allclose(bounds.divergence(*draws, across), exact, atol=0.05)


def test_a_mixture_is_no_farther_than_its_clients_are_in_the_mean():
    clients = [jnp.asarray(RANDOM.normal(size=(40, 2)) + s) for s in (0.0, 1.0, 3.0)]
    unseen, directions = jnp.asarray(RANDOM.normal(size=(40, 2)) + 2), jnp.eye(2)
    apart = jnp.stack([bounds.divergence(c, unseen, directions) for c in clients])
    whole = bounds.divergence(jnp.concatenate(clients), unseen, directions)
    assert whole <= bounds.mixture_divergence(jnp.full(3, 1 / 3), apart) + 1e-12


def test_standardized_gaussians_have_mean_zero_and_identity_covariance():
    points = RANDOM.normal(size=(500, 3)) @ RANDOM.normal(size=(3, 3)) + 4
    mean, covariance = points.mean(0), np.cov(points, rowvar=False, bias=True)
    z = np.asarray(bounds.standardized(*map(jnp.asarray, (points, mean, covariance))))
    np.testing.assert_allclose(z.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(np.cov(z, rowvar=False, bias=True), np.eye(3), atol=1e-12)


def test_own_statistics_take_away_what_shifts_two_gaussian_clients_apart():
    seen = RANDOM.normal(size=(4000, 2)) @ np.array([[2.0, 0.3], [0.0, 0.5]]) + 3
    unseen = RANDOM.normal(size=(4000, 2)) @ np.array([[0.6, 0.0], [0.9, 1.5]])

    def apart(by):
        ours, theirs = (
            bounds.standardized(
                jnp.asarray(x), jnp.asarray(s.mean(0)), jnp.asarray(np.cov(s, rowvar=False))
            )
            for x, s in ((seen, seen), (unseen, by))
        )
        return bounds.divergence(ours, theirs, jnp.eye(2))

    assert apart(seen) > 1
    assert apart(unseen) < 0.15


def test_the_bounds_are_the_papers_sums():
    seen, unseen = [client(40, shift=0.5), client(40, wrong=0.5)], client(30, wrong=0.1)
    weights, dimension, delta = jnp.asarray([0.3, 0.7]), 10, 0.05
    averaged = bounds.averaged_bound(seen, unseen, weights, dimension, delta)
    specific = bounds.specific_bound(seen, unseen, weights, dimension, delta)
    size = 4 * np.sqrt((2 * dimension * np.log(160) + np.log(80)) / 80)
    risk, errors = 0.3 * 0.25 + 0.7 * 0.5, np.array([0.35, 0.6])
    np.testing.assert_allclose(averaged.risk, risk, rtol=1e-12)
    np.testing.assert_allclose(averaged.errors, errors, rtol=1e-12)
    np.testing.assert_allclose(averaged.complexity, size, rtol=1e-12)
    np.testing.assert_allclose(averaged.observed, 0.1, rtol=1e-12)
    np.testing.assert_allclose(specific.total, risk + weights @ errors + size, rtol=1e-12)
    difference = averaged.total - specific.total
    np.testing.assert_allclose(difference, weights @ averaged.divergences / 2, rtol=1e-9)
    assert difference > 0
    both = bounds.several_unseen([averaged, averaged], weights)
    np.testing.assert_allclose(both, 2 * averaged.total - averaged.complexity, rtol=1e-12)


def test_with_one_seen_client_it_is_the_bound_of_theorem_3_7():
    seen, unseen = client(40), client(40, shift=1.0, wrong=0.5)
    found = bounds.averaged_bound([seen], unseen, jnp.ones(1), 5, 0.1)
    across = bounds.discriminant(seen.features, unseen.features)[None]
    apart = bounds.divergence(seen.features, unseen.features, across)
    size = 4 * np.sqrt((2 * 5 * np.log(80) + np.log(40)) / 40)
    total = 0.25 + apart / 2 + size + (0.25 + 0.5)
    np.testing.assert_allclose(found.total, total, rtol=1e-12)
    np.testing.assert_allclose(found.divergences, [apart], rtol=1e-12)


def test_the_aggregated_hypothesis_is_the_weighted_mean_of_outputs():
    outputs, weights = RANDOM.normal(size=(3, 4, 2)), np.array([0.2, 0.5, 0.3])
    found = bounds.aggregated(jnp.asarray(weights), jnp.asarray(outputs))
    np.testing.assert_allclose(found, np.tensordot(weights, outputs, 1), rtol=1e-12)


@pytest.mark.parametrize("wrong", [(0, 10, 0.1), (1, 0, 0.1), (1, 10, 0.0), (1, 10, 1.0)])
def test_a_complexity_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 1, delta="):
        bounds.complexity(*wrong)


def test_the_divergence_compiles():
    x = jnp.asarray(RANDOM.normal(size=(20, 3)))
    jitted = jax.jit(bounds.divergence)(x, x + 1, jnp.eye(3))
    np.testing.assert_allclose(jitted, bounds.divergence(x, x + 1, jnp.eye(3)), rtol=1e-12)
