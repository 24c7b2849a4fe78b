"""Max-pooling against XLA's own and against PyTorch's choice among equals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.models.pooling import max_pool

CASES = [  # height and width, window, strides, padding
    ((6, 8), (2, 2), (2, 2), ((0, 0), (0, 0))),
    ((7, 5), (2, 2), (2, 2), ((0, 0), (0, 0))),
    ((9, 10), (3, 3), (2, 2), ((1, 1), (1, 1))),
    ((9, 7), (3, 3), (2, 2), ((0, 0), (0, 0))),
    ((5, 6), (3, 2), (1, 2), ((1, 0), (0, 1))),
    ((7, 7), (2, 2), (3, 3), ((0, 0), (0, 0))),
]


def reference(x, window, strides, padding):
    return jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, *window, 1), (1, *strides, 1), ((0, 0), *padding, (0, 0))
    )


@pytest.mark.parametrize(("size", "window", "strides", "padding"), CASES)
def test_value_and_gradient_equal_those_of_xla(x64, size, window, strides, padding):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, *size, 3)))
    expected, theirs = jax.vjp(lambda a: reference(a, window, strides, padding), x)
    value, ours = jax.vjp(lambda a: max_pool(a, window, strides, padding), x)
    np.testing.assert_array_equal(value, expected)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=value.shape))
    np.testing.assert_allclose(ours(cotangent)[0], theirs(cotangent)[0], rtol=1e-12)


@pytest.mark.parametrize(("size", "window", "strides", "padding"), CASES)
def test_among_equals_the_gradient_goes_where_pytorch_sends_it(x64, size, window, strides, padding):
    torch = pytest.importorskip("torch")
    if any(low != high for low, high in padding):
        pytest.skip("PyTorch pads both sides alike")
    x = np.random.default_rng(0).integers(0, 2, (2, *size, 3)).astype(np.float64)
    theirs = torch.tensor(x).permute(0, 3, 1, 2).requires_grad_()
    sides = [low for low, _ in padding]
    pooled = torch.nn.functional.max_pool2d(theirs, window, strides, sides)
    cotangent = np.random.default_rng(1).normal(size=pooled.shape)
    pooled.backward(torch.tensor(cotangent))
    _, ours = jax.vjp(lambda a: max_pool(a, window, strides, padding), jnp.asarray(x))
    gradient = ours(jnp.asarray(cotangent.transpose(0, 2, 3, 1)))[0]
    np.testing.assert_allclose(gradient, theirs.grad.permute(0, 2, 3, 1), rtol=1e-12)


@pytest.mark.parametrize(("size", "window", "strides", "padding"), CASES[:3])
def test_second_derivatives_equal_those_of_xla(x64, size, window, strides, padding):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, *size, 2)))

    def twice(pool):
        def loss(a):
            return jnp.sum(jnp.sin(pool(a, window, strides, padding)))

        return jax.grad(lambda a: jnp.sum(jax.grad(loss)(a) ** 2))(x)

    np.testing.assert_allclose(twice(max_pool), twice(reference), rtol=1e-10, atol=1e-12)


def test_a_nan_is_not_hidden():
    x = jnp.asarray([[1.0, jnp.nan], [2.0, 3.0]]).reshape(1, 2, 2, 1)
    assert np.isnan(max_pool(x, (2, 2), (2, 2))).all()
