"""Max-pooling and ReLU for CPU and GPU against those of XLA and PyTorch, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_bn.engine.backend import traced_for
from fedjax_bn.models.cpu import max_pool
from fedjax_bn.models.layers import relu

# sizes, window, strides, padding
CASES = [
    ((6, 8), (2, 2), (2, 2), ((0, 0), (0, 0))),
    ((7, 5), (2, 2), (2, 2), ((0, 0), (0, 0))),  # rows that fill no window are dropped
    ((9, 8), (3, 3), (2, 2), ((1, 1), (1, 1))),
    ((5, 7), (3, 2), (1, 3), ((1, 0), (0, 1))),
    ((9, 9), (2, 2), (4, 3), ((0, 0), (1, 1))),  # gaps between windows
    ((1, 1), (3, 3), (2, 2), ((1, 1), (1, 1))),
]


@pytest.fixture(params=["cpu", "cuda"], autouse=True)
def platform(request):
    with traced_for(request.param):
        yield request.param


def draw(*sizes):
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, *sizes, 3)))


def reference(x, window, strides, padding):
    sides = ((0, 0), *padding, (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, *strides, 1), sides)


@partial(jax.jit, static_argnums=(0, 2, 3, 4))
def value_and_gradient(pool, x, window, strides, padding):
    y, pull = jax.vjp(lambda x: pool(x, window, strides, padding), x)
    return y, *pull(cosines(y.shape))


def cosines(shape):
    return jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float64)).reshape(shape)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("sizes", "window", "strides", "padding"), CASES)
def test_values_and_gradients_are_xlas(sizes, window, strides, padding):
    x, arguments = draw(*sizes), (window, strides, padding)
    y, dx = value_and_gradient(max_pool, x, *arguments)
    expected, expected_dx = value_and_gradient(reference, x, *arguments)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_allclose(dx, expected_dx, atol=1e-15)
    np.testing.assert_array_equal(max_pool(x, *arguments), y)


@pytest.mark.usefixtures("x64")
def test_tied_gradients_go_to_one_element_as_in_pytorch():
    torch = pytest.importorskip("torch")
    sizes, window, strides, padding = CASES[2]
    x = np.maximum(np.round(draw(*sizes)), 0)  # many ties
    y, dx = value_and_gradient(max_pool, jnp.asarray(x), window, strides, padding)
    g = np.asarray(cosines(y.shape))
    images = torch.tensor(x).permute(0, 3, 1, 2).requires_grad_()
    pooled = torch.nn.functional.max_pool2d(images, window, strides, 1)
    pooled.backward(torch.tensor(g).permute(0, 3, 1, 2))
    np.testing.assert_allclose(dx, images.grad.permute(0, 2, 3, 1), atol=1e-15)
    np.testing.assert_allclose(dx.sum(), g.sum(), atol=1e-12)


def slices(x, window, strides, padding):
    """Windows of 3x3 and stride 2 of a map of 7x6; reduce_window has no second derivative."""
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)), constant_values=-jnp.inf)
    windows = [x[:, i : i + 7 : 2, j : j + 5 : 2] for i in range(3) for j in range(3)]
    return jnp.max(jnp.stack(windows), axis=0)


@pytest.mark.usefixtures("x64")
def test_second_derivatives_are_xlas():
    x, arguments = draw(7, 6), ((3, 3), (2, 2), ((1, 1), (1, 1)))

    def second(pool):
        def gradient(x):
            return jax.grad(lambda x: jnp.sum(jnp.sin(pool(x, *arguments))))(x)

        @jax.jit
        def both(x):
            forward_over_reverse = jax.jvp(gradient, (x,), (jnp.cos(x),))[1]
            return forward_over_reverse, jax.grad(lambda x: jnp.sum(jnp.square(gradient(x))))(x)

        return both(x)

    for a, b in zip(second(max_pool), second(slices), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("platform", ["cuda"], indirect=True)
def test_forward_mode_and_what_is_made_of_it_are_xlas():
    x, arguments = draw(7, 6), ((3, 3), (2, 2), ((1, 1), (1, 1)))

    @partial(jax.jit, static_argnums=0)
    def forwards(pool, x):
        def change(x):
            return jax.jvp(lambda x: jnp.sin(pool(x, *arguments)), (x,), (jnp.cos(x),))[1]

        def steepness(x):
            return jnp.square(change(x)).sum()

        return change(x), jax.grad(steepness)(x), jax.jvp(change, (x,), (jnp.sin(x),))[1]

    for a, b in zip(forwards(max_pool, x), forwards(slices, x), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)


def test_integers_of_16_bits_have_the_derivatives_of_32():
    integers = jnp.round(4 * draw(9, 8))  # with ties; bfloat16 stores them exactly

    @partial(jax.jit, static_argnums=0)
    def pooled(dtype):
        pool = partial(max_pool, window=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        y, pull = jax.vjp(pool, integers.astype(dtype))
        return y, *pull(jnp.arange(y.size, dtype=dtype).reshape(y.shape) % 7)

    for a, b in zip(pooled(jnp.bfloat16), pooled(jnp.float32), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(a.astype(jnp.float32), b)


def test_nan_is_never_hidden():
    x = jnp.zeros((1, 4, 4, 1)).at[0, 1, 0, 0].set(jnp.nan)
    for y in (max_pool(x, (2, 2), (2, 2)), jax.vjp(lambda x: max_pool(x, (2, 2), (2, 2)), x)[0]):
        assert jnp.isnan(y[0, 0, 0, 0])
        assert not jnp.isnan(y[0, 1:]).any()


@pytest.mark.usefixtures("x64")
def test_derivatives_of_relu_are_jaxs():
    x = jnp.array([-2.0, -0.0, 0.0, 1e-300, 3.0, jnp.inf])
    ours, other = (
        (jax.jvp(f, (x,), (jnp.cos(x),)), jax.vmap(jax.grad(f))(x), jax.vmap(jax.hessian(f))(x))
        for f in (relu, jax.nn.relu)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, other)
    assert jnp.isnan(relu(jnp.nan))
