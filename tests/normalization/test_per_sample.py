"""Normalization by each sample's statistics on CPU, against the plain formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.engine.backend import traced_for
from fedjax_bn.normalization.instance import instance_moments, positioned
from fedjax_bn.normalization.layer import Statistics, normalize
from fedjax_bn.normalization.per_sample import suits, sums

# Few positions, neighbours before a product, a prime number of positions; one axis and three.
SHAPES = [(3, 4, 4, 5), (2, 12, 10, 3), (2, 19, 4), (2, 3, 2, 3, 2), (2, 1, 1, 3)]


def draw(shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(2, 3, shape), dtype)


def normalized(x, scale, bias, weight):
    mean, var = (positioned(weight * one, x) for one in instance_moments(x))
    return normalize(x, Statistics(mean, var), 1e-3, scale, bias)


def plain(x, scale, bias, weight):
    axes = tuple(range(1, x.ndim - 1))
    mean = x.mean(axes, keepdims=True)
    var = jnp.square(x - mean).mean(axes, keepdims=True)
    mean, var = (positioned(weight * one.reshape(len(x), -1), x) for one in (mean, var))
    return scale * (x - mean) / jnp.sqrt(var + 1e-3) + bias


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_derivatives_are_those_of_the_formula(shape):
    channels = shape[-1]
    x, g = draw(shape), draw(shape, 1)
    given = x, draw(channels, 2), draw(channels, 3), abs(draw((shape[0], channels), 4))

    @jax.jit
    def derivatives(*given):
        def gradients(function, *given):
            y, pull = jax.vjp(function, *given)
            return y, *pull(g * jnp.cos(y))

        def steepness(function, *given):
            return sum(jnp.square(d).sum() for d in gradients(function, *given)[1:])

        def both(function):
            again = jax.grad(lambda *given: steepness(function, *given), argnums=(0, 1, 2, 3))
            return *gradients(function, *given), *again(*given)

        return both(normalized), both(plain)

    for ours, other in zip(*derivatives(*given), strict=True):
        np.testing.assert_allclose(ours, other, rtol=0, atol=1e-11 * float(jnp.abs(other).max()))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_it_is_differentiated_forwards_and_mapped_too(shape):
    channels = shape[-1]
    given = draw(shape), draw(channels, 2), draw(channels, 3), abs(draw((shape[0], channels), 4))

    def derivatives(function):
        def loss(scale, weight):
            return jnp.sin(function(given[0], scale, given[2], weight)).sum()

        curved = jax.hessian(loss, argnums=(0, 1))(given[1], given[3])
        several = jnp.stack([given[3], 2 * given[3]])
        return curved, jax.vmap(jax.grad(loss, argnums=1), (None, 0))(given[1], several)

    ours, other = jax.jit(lambda: (derivatives(normalized), derivatives(plain)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), ours, other)


@pytest.mark.parametrize("shape", [(2, 16, 3), (2, 256, 3), (2, 19, 3)])
def test_sums_are_numpys(shape):
    x = draw(shape, dtype=np.float32)
    ours = jax.jit(lambda x: sums(lambda part: (part, jnp.square(part)), x))(x)
    for total, terms in zip(ours, (x, np.square(np.float64(x))), strict=True):
        np.testing.assert_allclose(total, np.float64(terms).sum(1), rtol=1e-5)


def test_other_statistics_and_other_platforms_are_left_to_xla():
    x, one = jnp.zeros((4, 8, 8, 3)), jnp.zeros((4, 1, 1, 3))
    assert suits(x, one, one)
    assert not suits(x, one[:1], one)
    assert not suits(x, one, jnp.zeros(3))
    assert not suits(jnp.zeros((4, 3)), jnp.zeros((4, 3)))
    with traced_for("cuda"):
        assert not suits(x, one)
