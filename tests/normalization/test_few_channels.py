"""Batch norm of large maps with few channels, against NumPy and the plain formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.engine.backend import traced_for
from fedjax_bn.normalization.few_channels import suits, sums
from fedjax_bn.normalization.layer import Statistics, moments, normalize

# 4096 positions; 4 * 31 * 37, of which eight parts cannot be made again and again.
SHAPE = (4, 32, 32, 3)
VALID = np.array([True, False, True, True])
CASES = [(SHAPE, VALID), ((4, 31, 37, 2), None)]


def draw(shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(2, 3, shape), dtype)


def normalized(x, scale, bias, valid):
    mean, var, _ = moments(x, valid)
    return normalize(x, Statistics(mean, var), 1e-3, scale, bias)


def plain(x, scale, bias, valid):
    keep = valid.astype(x.dtype)
    weight = (keep / keep.sum() / x[0, ..., 0].size).reshape(-1, 1, 1, 1)
    mean = (weight * x).sum((0, 1, 2))
    var = (weight * jnp.square(x - mean)).sum((0, 1, 2))
    return scale * (x - mean) / jnp.sqrt(var + 1e-3) + bias


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("shape", "valid"), CASES)
def test_moments_are_numpys(shape, valid):
    x = draw(shape)
    kept = np.asarray(x)[slice(None) if valid is None else valid]
    valid = None if valid is None else jnp.asarray(valid)
    mean, var, count = jax.jit(lambda x: moments(x, valid))(x)
    np.testing.assert_allclose(mean, kept.mean((0, 1, 2)), rtol=1e-13)
    np.testing.assert_allclose(var, kept.var((0, 1, 2)), rtol=1e-13)
    assert count == kept[..., 0].size


@pytest.mark.usefixtures("x64")
def test_without_a_valid_sample_mean_and_variance_are_0():
    mean, var, count = jax.jit(moments)(draw(SHAPE), jnp.zeros(4, bool))
    assert not mean.any()
    assert not var.any()
    assert count == 0


@pytest.mark.usefixtures("x64")
def test_values_and_derivatives_are_those_of_the_formula():
    x, g, valid = draw(SHAPE), draw(SHAPE, 1), jnp.asarray(VALID)
    scale, bias = draw(SHAPE[-1], 2), draw(SHAPE[-1], 3)

    @jax.jit
    def derivatives(x, scale, bias):
        def gradients(function, *arguments):
            y, pull = jax.vjp(lambda *given: function(*given, valid), *arguments)
            return y, *pull(g * jnp.cos(y))

        def steepness(function, *arguments):
            return sum(jnp.square(d).sum() for d in gradients(function, *arguments)[1:])

        def both(function):
            again = jax.grad(lambda *given: steepness(function, *given), argnums=(0, 1, 2))
            return *gradients(function, x, scale, bias), *again(x, scale, bias)

        return both(normalized), both(plain)

    for ours, other in zip(*derivatives(x, scale, bias), strict=True):
        np.testing.assert_allclose(ours, other, rtol=0, atol=1e-12 * float(jnp.abs(other).max()))


def test_rounding_of_sums_stays_small():
    x = np.abs(draw((4, 160, 160, 16), dtype=np.float32))
    exact = x.sum((0, 1, 2), dtype=np.float64)
    total = jax.jit(lambda x: sums(lambda part: part, x))(x)
    np.testing.assert_allclose(total, exact, rtol=1e-6)


def test_other_maps_and_other_platforms_are_left_to_xla():
    assert suits(jnp.zeros((4, 32, 32, 32)))
    assert not suits(jnp.zeros((4, 32, 31, 32)))
    assert not suits(jnp.zeros((4, 32, 32, 33)))
    with traced_for("cuda"):
        assert not suits(jnp.zeros((4, 32, 32, 32)))
