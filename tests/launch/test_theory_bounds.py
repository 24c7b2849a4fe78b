"""UniFed's bounds: their terms beside closed forms and brute force in float64."""

import numpy as np
import pytest
from scipy import stats
from theory import bounds

RANDOM = np.random.default_rng(5)


def client(size, dimension=3, shift=0.0, wrong=0.25):
    """Gaussian features, and predictions of which a known share is wrong."""
    labels = RANDOM.integers(0, 4, size)
    guessed = (labels + (np.arange(size) < round(wrong * size))) % 4
    features = RANDOM.normal(size=(size, dimension)) + shift
    return bounds.Client(features, guessed, guessed, labels)


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
def test_the_divergence_is_twice_the_supremum_over_intervals_ties_included(sizes):
    first, second = (np.round(RANDOM.normal(size=(size, 2)), 1) for size in sizes)
    found = bounds.divergence(first, second, np.eye(2))
    expected = max(brute_force(a, b) for a, b in zip(first.T, second.T, strict=True))
    np.testing.assert_allclose(found, 2 * expected, rtol=1e-12)


def standardized_pair(seed=0, size=20000):
    """Two clients with standardized features of correlation 0.8 and -0.8."""
    random, clients = np.random.default_rng(seed), []
    for correlation in (0.8, -0.8):
        mixing = np.linalg.cholesky([[1, correlation], [correlation, 1]])
        x = random.normal(size=(size, 2)) @ mixing.T
        clients.append((x - x.mean(0)) / x.std(0))
    return clients


def test_standardized_clients_are_apart_along_the_ratio_of_their_variances():
    """Along (1, 1) the variances are 1.8 and 0.2: the closed form of N(0, 1.8) and N(0, 0.2)."""
    wide, narrow = 1.8, 0.2
    end = np.sqrt(np.log(wide / narrow) * wide * narrow / (wide - narrow))  # equal densities
    exact = 4 * (stats.norm.cdf(end / narrow**0.5) - stats.norm.cdf(end / wide**0.5))
    pair = standardized_pair()
    apart = bounds.divergence(*pair, bounds.separating_directions(*pair))
    np.testing.assert_allclose(apart, exact, atol=0.03)
    angles = np.linspace(0, np.pi, 181)
    around = bounds.divergence(*pair, np.stack([np.cos(angles), np.sin(angles)], 1))
    np.testing.assert_allclose(apart, around, atol=0.03)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("whitened", [False, True])
def test_the_divergence_does_not_depend_on_the_order_of_points(dtype, whitened):
    """Of standardized features the means are equal, of whitened ones the covariances too."""
    pair, apart = standardized_pair(size=180), []
    if whitened:
        pair = [x @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False))).T for x in pair]
    pair = [x.astype(dtype) for x in pair]
    for seed in range(4):
        random = np.random.default_rng(seed)
        first, second = (random.permutation(x) for x in pair)
        found = bounds.averaged_bound(
            [bounds.Client(first, *[np.zeros(180, int)] * 3)],
            bounds.Client(second, *[np.zeros(180, int)] * 3),
            *(np.ones(1), 3, 0.05),
        )
        apart.append(found.divergences)
    np.testing.assert_allclose(apart, apart[:1] * 4, rtol=1e-12)


def test_the_bounds_are_the_papers_sums():
    seen, unseen = [client(40, shift=0.5), client(40, wrong=0.5)], client(30, wrong=0.1)
    weights, dimension, delta = np.array([0.3, 0.7]), 10, 0.05
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
