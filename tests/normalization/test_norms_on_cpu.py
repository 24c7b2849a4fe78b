"""Batch norm in forms for CPU and GPU, against NumPy and the plain formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.engine.backend import traced_for
from fedjax_bn.normalization.instance import instance_moments, positioned
from fedjax_bn.normalization.layer import Statistics, moments, normalize

# Maps of few channels: 4096 positions; 4 * 31 * 37, of which eight parts cannot be made repeatedly.
SHAPE = (4, 32, 32, 3)
VALID = np.array([True, False, True, True])
# Maps of samples: few positions, neighbours before a product, a prime number of positions; one axis
# and three.
SHAPES = [(3, 4, 4, 5), (2, 12, 10, 3), (2, 19, 4), (2, 3, 2, 3, 2), (2, 1, 1, 3)]


def draw(shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(2, 3, shape), dtype)


def by_batch(x, scale, bias):
    mean, var, _ = moments(x, jnp.asarray(VALID))
    return normalize(x, Statistics(mean, var), 1e-3, scale, bias)


def by_batch_plainly(x, scale, bias):
    keep = VALID.astype(x.dtype)
    weight = (keep / keep.sum() / x[0, ..., 0].size).reshape(-1, 1, 1, 1)
    mean = (weight * x).sum((0, 1, 2))
    var = (weight * jnp.square(x - mean)).sum((0, 1, 2))
    return scale * (x - mean) / jnp.sqrt(var + 1e-3) + bias


def by_sample(x, scale, bias, weight):
    mean, var = (positioned(weight * one, x) for one in instance_moments(x))
    return normalize(x, Statistics(mean, var), 1e-3, scale, bias)


def by_sample_plainly(x, scale, bias, weight):
    axes = tuple(range(1, x.ndim - 1))
    mean = x.mean(axes, keepdims=True)
    var = jnp.square(x - mean).mean(axes, keepdims=True)
    mean, var = (positioned(weight * one.reshape(len(x), -1), x) for one in (mean, var))
    return scale * (x - mean) / jnp.sqrt(var + 1e-3) + bias


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("shape", "platform"), [*((shape, "cpu") for shape in (*SHAPES, SHAPE)), (SHAPE, "cuda")]
)
def test_values_and_two_derivatives_are_those_of_the_formula(shape, platform):
    x, g, channels = draw(shape), draw(shape, 1), shape[-1]
    given = x, draw(channels, 2), draw(channels, 3), abs(draw((shape[0], channels), 4))
    functions = by_sample, by_sample_plainly
    if shape == SHAPE:
        given, functions = given[:3], (by_batch, by_batch_plainly)

    @jax.jit
    def derivatives(*given):
        def gradients(function, *given):
            y, pull = jax.vjp(function, *given)
            return y, *pull(g * jnp.cos(y))

        def steepness(function, *given):
            return sum(jnp.square(d).sum() for d in gradients(function, *given)[1:])

        def both(function):
            numbers = tuple(range(len(given)))
            again = jax.grad(lambda *given: steepness(function, *given), argnums=numbers)
            return *gradients(function, *given), *again(*given)

        return [both(function) for function in functions]

    with traced_for(platform):
        found = derivatives(*given)
    for ours, other in zip(*found, strict=True):
        np.testing.assert_allclose(ours, other, rtol=0, atol=1e-11 * float(jnp.abs(other).max()))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(("shape", "valid"), [(SHAPE, VALID), ((4, 31, 37, 2), None)])
def test_moments_of_a_batch_are_numpys(shape, valid, platform):
    x = draw(shape)
    kept = np.asarray(x)[slice(None) if valid is None else valid]
    valid = None if valid is None else jnp.asarray(valid)
    with traced_for(platform):
        mean, var, count = jax.jit(lambda x: moments(x, valid))(x)
    np.testing.assert_allclose(mean, kept.mean((0, 1, 2)), rtol=1e-13)
    np.testing.assert_allclose(var, kept.var((0, 1, 2)), rtol=1e-13)
    assert count == kept[..., 0].size
    if valid is not None:
        with traced_for(platform):
            mean, var, count = jax.jit(moments)(x, jnp.zeros(4, bool))
        assert not mean.any() | var.any() | count.any()


@pytest.mark.usefixtures("x64")
def test_norms_by_sample_are_differentiated_forwards_and_mapped_too():
    shape = SHAPES[1]
    x, (scale, bias), weight = draw(shape), draw((2, shape[-1]), 2), abs(draw((2, shape[-1]), 4))

    def derivatives(function):
        def loss(scale, weight):
            return jnp.sin(function(x, scale, bias, weight)).sum()

        curved = jax.hessian(loss, argnums=(0, 1))(scale, weight)
        several = jnp.stack([weight, 2 * weight])
        return curved, jax.vmap(jax.grad(loss, argnums=1), (None, 0))(scale, several)

    ours, other = jax.jit(lambda: (derivatives(by_sample), derivatives(by_sample_plainly)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), ours, other)


@pytest.mark.usefixtures("x64")
def test_norms_by_batch_are_differentiated_forwards_on_gpu():
    x, v, (scale, bias) = draw(SHAPE), draw(SHAPE, 1), draw((2, SHAPE[-1]), 2)

    def derivatives(function):
        def change(x, scale, bias):
            given, moved = (x, scale, bias), (v, bias, scale)
            return jax.jvp(lambda *given: jnp.sin(function(*given)), given, moved)[1]

        y, pull = jax.vjp(change, x, scale, bias)
        return y, pull(jnp.cos(v))

    with traced_for("cuda"):
        ours, other = jax.jit(lambda: [derivatives(f) for f in (by_batch, by_batch_plainly)])()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), ours, other)


def test_rounding_of_a_batchs_mean_stays_small():
    x = np.abs(draw((4, 160, 160, 16), dtype=np.float32))
    mean, _, _ = jax.jit(moments)(x)
    np.testing.assert_allclose(mean, x.mean((0, 1, 2), dtype=np.float64), rtol=1e-6)
