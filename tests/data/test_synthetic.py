"""FedBN's generated data: Gaussians of two covariances, and the toy regression."""

import jax
import jax.numpy as jnp
import numpy as np

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
        for part in (TRAIN, TEST):
            assert np.bincount(pool.labels[pool.parts == part]).tolist() == [50, 50]


def test_the_best_linear_rule_separates_both_clients():
    for pool in synthetic.load_synthetic(samples=5000).pools:
        covariance = np.cov(pool.images.T - (2 * pool.labels - 1))
        score = pool.images @ np.linalg.solve(covariance, np.ones(10))
        assert ((score > 0) == (pool.labels == 1)).mean() > 0.998


def test_the_network_starts_with_the_deviation_of_appendix_f_in_both_layers():
    variables = jax.jit(TwoLayer(hidden=2000).init)(jax.random.key(0), jnp.zeros((2, 10)))
    for layer in ("dense1", "head"):
        kernel = np.asarray(variables["params"][layer]["kernel"])
        np.testing.assert_allclose(kernel.std(), 10, rtol=0.05)
    np.testing.assert_allclose(variables["params"]["dense1"]["bias"].std(), 10, rtol=0.05)
