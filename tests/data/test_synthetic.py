"""FedBN's generated data: Gaussians of two covariances, and the toy regression."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.data.sets import synthetic
from fedjax_bn.data.source import TEST, TRAIN, check_source
from fedjax_bn.models import TwoLayer


def test_classes_lie_around_minus_one_and_one_with_the_covariance_of_the_client():
    source = check_source(synthetic.load_synthetic(samples=40000, correlation=-0.5))
    distance = np.abs(np.subtract.outer(np.arange(10), np.arange(10)))
    expected = {"identity": np.eye(10), "correlated": (-0.5) ** distance}
    for pool in source.pools:
        for label, centre in ((0, -1), (1, 1)):
            images = pool.images[pool.labels == label].astype(np.float64)
            np.testing.assert_allclose(images.mean(0), centre, atol=0.03)
            np.testing.assert_allclose(np.cov(images.T), expected[pool.name], atol=0.04)


def test_half_of_the_samples_trains_and_both_halves_have_both_classes_equally():
    for pool in synthetic.load_synthetic(samples=100).pools:
        assert pool.images.shape == (200, 10)
        assert pool.images.dtype == np.float32
        for part in (TRAIN, TEST):
            assert (pool.parts == part).sum() == 100
            assert pool.labels[pool.parts == part].sum() == 50
        assert len(set(pool.names)) == 200


def test_a_seed_gives_the_same_samples_and_another_seed_others():
    one, again, other = (synthetic.load_synthetic(seed=s, samples=20).pools for s in (3, 3, 4))
    for a, b, c in zip(one, again, other, strict=True):
        np.testing.assert_array_equal(a.images, b.images)
        assert (a.images != c.images).all()
    assert (one[0].images != one[1].images).all()


def test_the_best_linear_rule_separates_both_clients():
    for pool in synthetic.load_synthetic(samples=5000).pools:
        covariance = np.cov(pool.images.T - (2 * pool.labels - 1))
        score = pool.images @ np.linalg.solve(covariance, np.ones(10))
        assert ((score > 0) == (pool.labels == 1)).mean() > 0.998


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 1}, "samples is 1"),
        ({"dimension": 1}, "dimension 1"),
        ({"correlation": 0.0}, "correlation is 0.0"),
        ({"correlation": 1.0}, "correlation is 1.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_an_option_out_of_range_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        synthetic.load_synthetic(**options)


def test_the_network_starts_with_the_deviation_of_appendix_f_in_both_layers():
    variables = jax.jit(TwoLayer(hidden=2000).init)(jax.random.key(0), jnp.zeros((2, 10)))
    for layer in ("dense1", "head"):
        kernel = np.asarray(variables["params"][layer]["kernel"])
        np.testing.assert_allclose(kernel.std(), 10, rtol=0.05)
    np.testing.assert_allclose(variables["params"]["dense1"]["bias"].std(), 10, rtol=0.05)
    logits = jax.eval_shape(TwoLayer(hidden=2000).apply, variables, jnp.ones((4, 10)))
    assert logits.shape == (4, 2)


@pytest.fixture(scope="module")
def toy():
    return synthetic.toy_regression(points=40)


def error(toy, k: int, slope: float) -> float:
    return np.mean((np.cos(slope * toy.x[k]) - toy.y[k]) ** 2)


def test_toy_errors_are_the_mean_squared_errors_of_the_model(toy):
    for k in range(2):
        w, gamma = 37, 26
        weight = toy.weights[w]
        expected = error(toy, k, weight / toy.gammas[gamma])
        np.testing.assert_allclose(toy.surface[k, gamma, w], expected)
        np.testing.assert_allclose(toy.plain[k, w], error(toy, k, weight))
        np.testing.assert_allclose(toy.normalized[k, w], error(toy, k, weight / toy.x[k].std()))


def test_batch_norm_harmonizes_the_toys_errors(toy):
    alike = np.corrcoef(toy.normalized)[0, 1]
    assert alike > 0.9
    assert np.corrcoef(toy.plain)[0, 1] < 0.5
    np.testing.assert_allclose(toy.best, 6, atol=0.5)


def test_the_toys_mean_model_works_with_local_gamma_only(toy):
    mean_weight, mean_gamma = toy.best.mean(), toy.local_gammas.mean()
    for k in range(2):
        gammas = (toy.local_gammas[k], mean_gamma)
        local, mean = (error(toy, k, mean_weight / gamma) for gamma in gammas)
        assert local < 0.1
        assert mean > 5 * local
