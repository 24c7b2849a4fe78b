"""The theory's kernels, eigenvalues and rates, and UniFed's bounds, in float64."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from scipy import stats
from theory import bounds
from theory.convergence import (
    Data,
    evolution,
    gram,
    initialize,
    least_eigenvalue,
    predict,
    race,
    same_client,
    sampled_gram,
)

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def _float64(x64):
    pass


def arrays_of(clients=3, each=4, dimension=5, seed=0) -> Data:
    """Points whose covariance differs by client, standardized targets."""
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(clients, dimension, dimension))
    covariances = mixing @ mixing.transpose(0, 2, 1) / dimension + np.eye(dimension)
    points = [random.multivariate_normal(np.zeros(dimension), s, each) for s in covariances]
    targets = random.normal(size=clients * each)
    return Data(np.concatenate(points), np.repeat(np.arange(clients), each), covariances, targets)


def data_of(*sizes) -> Data:
    """The same on the device."""
    return Data(*map(jnp.asarray, arrays_of(*sizes)))


def test_closed_form_equals_monte_carlo_within_its_error():
    points, alpha = data_of().points, 2.5
    exact = gram(points, alpha)
    estimate, error = sampled_gram(KEY, points, 100_000, alpha)
    deviations = np.asarray((estimate - exact) / error)
    assert abs(deviations).max() < 4.5  # 78 entries
    assert deviations.std() < 2
    assert float((error / exact.max()).max()) < 0.02


def test_the_client_specific_matrix_is_the_block_diagonal_of_the_other():
    data = data_of()
    whole = gram(data.points)
    blocks = [gram(data.points[4 * i : 4 * i + 4]) for i in range(3)]
    ours = same_client(whole, data.client)
    np.testing.assert_allclose(ours, scipy.linalg.block_diag(*blocks), rtol=1e-12)
    least = min(np.linalg.eigvalsh(block)[0] for block in blocks)
    np.testing.assert_allclose(least_eigenvalue(ours), least, rtol=1e-9)


@pytest.mark.parametrize("scales", [1, 3])
def test_the_network_follows_its_equation(scales):
    data, network = arrays_of(), initialize(KEY, 7, 5, scales, alpha=2.0)
    v, gamma, c = map(np.asarray, network)
    gamma = gamma * np.arange(1.0, scales + 1)
    np.testing.assert_array_equal(abs(c), 1)
    found = jax.jit(predict)(network._replace(scale=gamma), data)
    for p, ours in enumerate(found):
        i, x = data.client[p], data.points[p]
        normed = [w @ x / np.sqrt(w @ data.covariances[i] @ w) for w in v]
        expected = c @ np.maximum(gamma[:, i if scales > 1 else 0] * normed, 0) / np.sqrt(7)
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scales", [1, 3])
def test_evolution_has_the_appendix_form(scales):
    data, alpha = arrays_of(), 1.5
    network = initialize(KEY, 8, 5, scales, alpha)
    direction, magnitude = evolution(network, data)
    v, gamma, c = map(np.asarray, network)
    x, s = data.points, data.covariances[data.client]
    norm = np.sqrt(np.einsum("ka,pab,kb->kp", v, s, v))
    active = np.maximum(v @ x.T, 0)
    own = gamma[:, data.client if scales > 1 else np.zeros(12, int)]
    # Eq. 23 and 25.
    expected = np.einsum("k,kp,kq->pq", c**2, active / norm, active / norm) / 8
    if scales > 1:
        expected = same_client(expected, data.client)
    np.testing.assert_allclose(magnitude, expected, rtol=1e-10, atol=1e-12)
    # Eq. 22 and 24: the part of x_p across v_k in the metric of S.
    sv = np.einsum("pab,kb->kpa", s, v)
    across = x[None] - sv * ((v @ x.T) / norm**2)[..., None]
    ways = (own / norm * (active > 0))[..., None] * across
    expected = np.einsum("kpa,kqa->pq", ways, ways) / 8
    np.testing.assert_allclose(direction, expected, rtol=1e-10, atol=1e-12)


def test_gradient_descent_keeps_the_predicted_rate_and_client_specific_scale_is_faster():
    data, steps = data_of(3, 4, 8), 120
    slow, fast = (race(KEY, data, 400, steps)[name] for name in ("averaged", "client-specific"))
    np.testing.assert_allclose(slow.losses[0], fast.losses[0], rtol=1e-10)
    shrink = slow.bound[1:] / slow.bound[:-1]
    # both with one rate, so that the eigenvalues alone make their bounds differ
    rate = 2 * (1 - shrink) / slow.eigenvalue
    np.testing.assert_allclose(rate, rate[0], rtol=1e-9)
    for course in (slow, fast):
        expected = course.losses[0] * (1 - rate[0] * course.eigenvalue / 2) ** np.arange(steps + 1)
        np.testing.assert_allclose(course.bound, expected, rtol=1e-9)
        assert (course.losses <= course.bound * (1 + 1e-9)).all()
        assert (np.diff(course.losses) < 0).all()
        assert course.slowest >= course.eigenvalue / 2  # Theorem 3.4, 1)
    assert fast.eigenvalue > slow.eigenvalue > 0
    assert fast.losses[-1] < slow.losses[-1]


@pytest.mark.slow
def test_the_script_writes_figures_and_numbers(tmp_path, monkeypatch):
    from theory import __main__ as script

    monkeypatch.setattr(script, "SAMPLES", 5000)
    sizes = ["--width", "50", "--steps", "20", "--seeds", "2"]
    assert script.main(["--workdir", str(tmp_path), *sizes]) == 0
    figures = {path.stem for path in tmp_path.glob("*.png")}
    assert figures == {"gram", "spectra", "rates", "fig1", "fig2"}
    found = json.loads((tmp_path / "theory.json").read_text())
    for name in ("random points", "digits"):
        numbers = {key: mean for key, (mean, _) in found[name].items()}
        assert numbers["least eigenvalue of G*"] >= numbers["least eigenvalue of G"] > 0
        assert numbers["Monte Carlo: largest deviation, standard errors"] < 6


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
    angles = np.linspace(0, np.pi, 61)
    around = bounds.divergence(*pair, np.stack([np.cos(angles), np.sin(angles)], 1))
    np.testing.assert_allclose(apart, around, atol=0.03)


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
