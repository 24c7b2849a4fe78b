"""The fast convolution against XLA's own, in value and in gradients of both orders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_bn.models.convolution import NHWC, choose_algorithm, convolution

# images, kernel, strides, padding, and the algorithm that these shapes get
CASES = {
    "digits 5x5": ((2, 14, 14, 16), (5, 5, 16, 17), (1, 1), ((2, 2), (2, 2)), "tiled_convolution"),
    "odd sizes": ((8, 7, 9, 16), (3, 5, 16, 16), (1, 1), ((1, 0), (0, 3)), "tiled_convolution"),
    "first layer": ((2, 9, 8, 3), (5, 5, 3, 16), (1, 1), ((2, 2), (2, 2)), "direct_convolution"),
    "stem": ((2, 11, 10, 3), (7, 7, 3, 4), (2, 2), ((3, 3), (3, 3)), None),
    "strided": ((2, 8, 7, 16), (3, 3, 16, 5), (2, 2), ((1, 1), (1, 1)), "patches_convolution"),
    "shortcut": ((2, 7, 7, 4), (1, 1, 4, 6), (2, 2), ((0, 0), (0, 0)), "patches_convolution"),
    "kernel beyond map": ((2, 2, 2, 16), (3, 3, 16, 8), (1, 1), ((1, 1), (1, 1)), None),
    "one pixel": ((3, 1, 1, 2), (3, 3, 2, 2), (1, 1), ((1, 1), (1, 1)), None),
    "cut": ((2, 6, 6, 2), (3, 3, 2, 2), (1, 1), ((-1, 1), (0, -1)), "direct_convolution"),
}


def reference(x, kernel, strides, padding):
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NHWC)


def arguments(name, dtype=np.float64, seed=0):
    images, kernel, strides, padding, _ = CASES[name]
    random = np.random.default_rng(seed)
    x, k = (jnp.asarray(random.normal(size=shape), dtype) for shape in (images, kernel))
    return x, k, strides, padding


def assert_near(ours, theirs, tolerance):
    """Equal within `tolerance` times the largest value."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.abs(b).max()))


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_those_of_xla(x64, name):
    x, kernel, strides, padding = arguments(name)
    expected, theirs = jax.vjp(lambda a, b: reference(a, b, strides, padding), x, kernel)
    value, ours = jax.vjp(lambda a, b: convolution(a, b, strides, padding), x, kernel)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=expected.shape))
    assert_near((value, ours(cotangent)), (expected, theirs(cotangent)), 1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][-1]])
def test_static_shapes_choose_the_algorithm(name):
    *shapes, algorithm = CASES[name]
    assert choose_algorithm(*shapes).__name__ == algorithm


@pytest.mark.parametrize("name", ["digits 5x5", "strided", "stem"])
def test_float32_is_as_exact_as_a_layer_needs(name):
    x, kernel, strides, padding = arguments(name, np.float32)
    ours = np.asarray(convolution(x, kernel, strides, padding))
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(array, np.float64)) for array in (x, kernel))
        exact = np.asarray(reference(*wide, strides, padding))
    assert np.abs(ours - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("name", ["digits 5x5", "stem", "kernel beyond map"])
def test_second_derivatives_equal_those_of_xla(x64, name):
    x, kernel, strides, padding = arguments(name)

    def squared_gradient(conv):
        def loss(a, b):
            return jnp.sum(jnp.tanh(conv(a, b, strides, padding)))

        return lambda a, b: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(a, b))

    ours = jax.grad(squared_gradient(convolution), (0, 1))(x, kernel)
    theirs = jax.grad(squared_gradient(reference), (0, 1))(x, kernel)
    assert_near(ours, theirs, 1e-11)


@pytest.mark.parametrize("name", ["digits 5x5", "first layer"])
def test_it_maps_over_images_and_over_kernels(x64, name):
    _, _, strides, padding = arguments(name)
    pairs = [arguments(name, seed=seed)[:2] for seed in range(3)]
    xs, kernels = (jnp.stack(arrays) for arrays in zip(*pairs, strict=True))

    def step(x, kernel):
        def loss(k):
            return jnp.sum(jnp.sin(convolution(x, k, strides, padding)))

        return jax.grad(loss)(kernel)

    loop = jnp.stack([step(x, k) for x, k in pairs])
    _, scanned = jax.lax.scan(lambda _, pair: (None, step(*pair)), None, (xs, kernels))
    assert_near([jax.vmap(step)(xs, kernels), scanned], [loop, loop], 1e-12)


def test_a_map_over_kernels_is_no_grouped_convolution():
    x, kernel, strides, padding = arguments("digits 5x5", np.float32)
    stacked = jnp.stack([kernel, kernel])
    program = jax.jit(jax.vmap(lambda k: convolution(x, k, strides, padding)))
    assert "convolution" not in program.lower(stacked).as_text()


@pytest.mark.parametrize(
    "options",
    [
        {"feature_group_count": 2},
        {"lhs_dilation": (2, 2)},
        {"rhs_dilation": (2, 1)},
        {"dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ],
)
def test_everything_else_is_xla_itself(options):
    random = np.random.default_rng(0)
    channels_first = "dimension_numbers" in options
    shape = (2, 8, 9, 9) if channels_first else (2, 9, 9, 8)
    groups = options.get("feature_group_count", 1)
    kernel = (4, 8, 3, 3) if channels_first else (3, 3, 8 // groups, 4)
    x, k = (jnp.asarray(random.normal(size=s), jnp.float32) for s in (shape, kernel))
    sides = ((1, 1), (1, 1))
    expected = jax.lax.conv_general_dilated(
        x, k, (1, 1), sides, **({"dimension_numbers": NHWC} | options)
    )
    np.testing.assert_array_equal(convolution(x, k, (1, 1), sides, **options), expected)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_named_padding_is_understood(padding):
    x, kernel, strides, _ = arguments("digits 5x5", np.float32)
    expected = reference(x, kernel, strides, padding)
    assert_near(convolution(x, kernel, strides, padding), expected, 1e-5)
