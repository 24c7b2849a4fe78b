"""The fast convolution against XLA's, SciPy's and closed forms, in float64 unless it says so."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy.signal import correlate

from fedjax_bn.models.cpu.algorithms import (
    direct_convolution,
    fast_fourier_convolution,
    patches_convolution,
    taps_convolution,
    tiled_convolution,
    transformed_convolution,
)
from fedjax_bn.models.cpu.choice import chosen, shapes_of
from fedjax_bn.models.cpu.convolution import convolution
from fedjax_bn.models.cpu.direct import NHWC
from fedjax_bn.models.cpu.winograd import transforms

UNIT_STRIDES = [tiled_convolution, transformed_convolution, fast_fourier_convolution]
ALGORITHMS = [direct_convolution, patches_convolution, taps_convolution, *UNIT_STRIDES]
# images, kernel, strides, padding
SHAPES = [
    ((1, 10, 6, 3), (5, 5, 3, 4), (1, 1), ((2, 2), (2, 2))),
    ((3, 7, 9, 2), (5, 3, 2, 3), (1, 1), ((2, 2), (1, 1))),  # unequal sides, odd sizes
    ((2, 6, 6, 1), (4, 3, 1, 2), (1, 1), ((3, 0), (1, 4))),  # padding on one side
    ((2, 2, 2, 3), (3, 3, 3, 2), (1, 1), ((1, 1), (1, 1))),  # kernel beyond the images
    ((1, 1, 3, 2), (5, 5, 2, 2), (1, 1), ((2, 2), (9, 2))),
    ((2, 9, 8, 2), (3, 3, 2, 3), (2, 2), ((1, 1), (1, 1))),
    ((2, 7, 5, 2), (1, 1, 2, 3), (2, 2), ((0, 0), (0, 0))),
    ((1, 11, 9, 2), (7, 5, 2, 2), (3, 2), ((3, 3), (0, 1))),
    ((1, 6, 6, 2), (2, 2, 2, 2), (3, 3), ((0, 0), (0, 0))),  # gaps between windows
]
CASES = [
    pytest.param(algorithm, *shape, id=f"{algorithm.__name__}-{'x'.join(map(str, shape[1]))}-{i}")
    for i, shape in enumerate(SHAPES)
    for algorithm in ALGORITHMS
    if algorithm not in UNIT_STRIDES or shape[2] == (1, 1)
]


def draw(*shapes, dtype=np.float64):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def reference(x, kernel, strides, padding):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NHWC)


def assert_close(actual, expected, tolerance=1e-12):
    scale = max(float(jnp.abs(expected).max()), 1e-300)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


@partial(jax.jit, static_argnums=(0, 3, 4))
def derivatives(convolve, x, w, strides, padding):
    y, pull = jax.vjp(lambda x, w: convolve(x, w, strides, padding), x, w)
    return y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))


def assert_same_derivatives(algorithm, *arguments, tolerance=1e-12):
    expected = derivatives(reference, *arguments)
    for a, b in zip(derivatives(algorithm, *arguments), expected, strict=True):
        assert_close(a, b, tolerance)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("algorithm", "images", "kernel", "strides", "padding"), CASES)
def test_every_algorithm_gives_xlas_values_and_gradients(
    algorithm, images, kernel, strides, padding
):
    assert_same_derivatives(algorithm, *draw(images, kernel), strides, padding)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_second_derivatives_are_xlas(algorithm):
    strides, padding = (1, 1), ((1, 1), (2, 1))
    x, w, dx, dw = draw(*2 * [(2, 5, 4, 2), (3, 3, 2, 3)])

    def second(convolve):
        def gradients(x, w):
            return jax.grad(
                lambda x, w: jnp.sum(jnp.sin(convolve(x, w, strides, padding))), argnums=(0, 1)
            )(x, w)

        def squares(x, w):
            return sum(jnp.sum(jnp.square(g)) for g in gradients(x, w))

        @jax.jit
        def both(x, w, dx, dw):
            forward_over_reverse = jax.jvp(gradients, (x, w), (dx, dw))[1]
            return *forward_over_reverse, *jax.grad(squares, argnums=(0, 1))(x, w)

        return both(x, w, dx, dw)

    for a, b in zip(second(algorithm), second(reference), strict=True):
        assert_close(a, b)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_channel_is_scipys_correlation(algorithm):
    x, w = draw((1, 9, 8, 1), (5, 3, 1, 1))
    y = jax.jit(partial(algorithm, strides=(1, 1), padding=((0, 0), (0, 0))))(x, w)
    assert_close(y[0, ..., 0], correlate(x[0, ..., 0], w[..., 0, 0], "valid"))


@pytest.mark.parametrize(("outputs", "taps"), [(2, 3), (4, 3), (2, 5), (4, 5), (6, 3), (1, 1)])
def test_minimal_filtering_is_the_correlation(outputs, taps):
    a, g, b = transforms(outputs, taps)
    d, w = np.random.default_rng(0).standard_normal((2, 16))
    d, w = d[: outputs + taps - 1], w[:taps]
    np.testing.assert_allclose(a @ ((g @ w) * (b @ d)), np.correlate(d, w), atol=1e-13)


def test_transforms_of_f_2_3_are_winograds():
    a, g, b = transforms(2, 3)
    # Lavin & Gray 2016, section 4.1, divide in G what is divided in B^T here, and turn a sign.
    np.testing.assert_array_equal(a, [[1, 1, 1, 0], [0, 1, -1, 1]])
    np.testing.assert_array_equal(g, [[1, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 1]])
    scaled = np.array([[1], [2], [2], [1]]) * b
    np.testing.assert_array_equal(
        scaled, [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]]
    )


@pytest.mark.parametrize(
    ("algorithm", "size", "bound"),
    [
        (tiled_convolution, 3, 1e-5),
        (tiled_convolution, 5, 1e-5),
        (transformed_convolution, 5, 2e-6),
        (fast_fourier_convolution, 9, 2e-6),
    ],
)
def test_float32_errors_stay_within_a_bound_of_the_largest_value(algorithm, size, bound):
    images, kernel, padding = (4, 14, 14, 64), (size, size, 64, 64), ((size // 2,) * 2,) * 2
    x, w = draw(images, kernel, dtype=np.float32)
    actual = derivatives(algorithm, x, w, (1, 1), padding)
    with jax.enable_x64(True):
        x, w = (jnp.asarray(np.asarray(v), np.float64) for v in (x, w))
        expected = derivatives(reference, x, w, (1, 1), padding)
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == np.float32
            assert_close(np.asarray(a), b, bound)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("algorithm", UNIT_STRIDES)
def test_more_images_than_a_chunk_are_convolved_alike(algorithm):
    x, w = draw((70, 4, 4, 2), (3, 3, 2, 2))
    assert_same_derivatives(algorithm, x, w, (1, 1), ((1, 1), (1, 1)))


LAYERS = [
    ((4, 16, 16, 3), (9, 9, 3, 3), (1, 1), ((8, 8), (8, 8)), fast_fourier_convolution),
    ((8, 8, 8, 16), (3, 3, 16, 16), (1, 1), ((1, 1), (1, 1)), tiled_convolution),
    ((8, 8, 8, 16), (5, 5, 16, 32), (1, 1), ((2, 2), (2, 2)), transformed_convolution),
    ((8, 16, 16, 16), (5, 5, 16, 32), (1, 1), ((2, 2), (2, 2)), tiled_convolution),
    ((2, 14, 14, 16), (5, 5, 16, 32), (1, 1), ((2, 2), (2, 2)), tiled_convolution),
    ((2, 2, 2, 32), (3, 3, 32, 32), (1, 1), ((1, 1), (1, 1)), patches_convolution),
    ((64, 2, 2, 512), (3, 3, 512, 512), (1, 1), ((1, 1), (1, 1)), taps_convolution),
    ((16, 4, 4, 256), (3, 3, 256, 256), (1, 1), ((1, 1), (1, 1)), taps_convolution),
    ((32, 4, 4, 256), (3, 3, 256, 256), (1, 1), ((1, 1), (1, 1)), tiled_convolution),
    ((4, 8, 8, 16), (3, 3, 16, 32), (2, 2), ((1, 1), (1, 1)), patches_convolution),
    ((4, 8, 8, 16), (1, 1, 16, 32), (2, 2), ((0, 0), (0, 0)), patches_convolution),
    ((4, 28, 28, 3), (5, 5, 3, 64), (1, 1), ((2, 2), (2, 2)), patches_convolution),
    ((64, 64, 64, 3), (7, 7, 3, 64), (2, 2), ((3, 3), (3, 3)), direct_convolution),
]


@pytest.mark.parametrize(("images", "kernel", "strides", "padding", "algorithm"), LAYERS)
def test_the_algorithm_follows_from_the_shapes(images, kernel, strides, padding, algorithm):
    assert chosen(shapes_of(images, kernel, strides, padding)) is algorithm


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("images", "kernel", "strides", "padding", "algorithm"), LAYERS[:5:2])
def test_vmap_over_clients_is_the_loop_and_never_a_grouped_convolution(
    images, kernel, strides, padding, algorithm
):
    x, w = draw((3, *images), (3, *kernel))

    def gradients(x, w):
        y, pull = jax.vjp(lambda x, w: convolution(x, w, strides, padding), x, w)
        return y, *pull(y)

    batched = jax.vmap(gradients)
    looped = jax.jit(lambda x, w: lax.map(lambda a: gradients(*a), (x, w)))(x, w)
    assert "conv_general_dilated" not in str(jax.make_jaxpr(batched)(x, w)), algorithm
    for a, b in zip(jax.jit(batched)(x, w), looped, strict=True):
        assert_close(a, b)


@pytest.mark.usefixtures("x64")
def test_vmap_over_images_or_kernels_alone_is_the_loop():
    padding = ((1, 1), (1, 1))
    x, w, more_x, more_w = draw((4, 8, 8, 16), (3, 3, 16, 16), (2, 4, 8, 8, 16), (2, 3, 3, 16, 16))
    convolve = partial(convolution, window_strides=(1, 1), padding=padding)
    over_images = jax.jit(jax.vmap(convolve, (0, None)))(more_x, w)
    over_kernels = jax.jit(jax.vmap(convolve, (None, 0)))(x, more_w)
    for i in range(2):
        assert_close(over_images[i], reference(more_x[i], w, (1, 1), padding))
        assert_close(over_kernels[i], reference(x, more_w[i], (1, 1), padding))


@pytest.mark.usefixtures("x64")
def test_gradient_in_a_scan_is_the_gradient_outside():
    x, w = draw((5, 4, 8, 8, 16), (3, 3, 16, 16))
    padding = ((1, 1), (1, 1))

    def total(w, convolve):
        def step(carry, images):
            return carry + jnp.sum(jnp.sin(convolve(images, w, (1, 1), padding))), None

        return lax.scan(step, jnp.zeros(()), x)[0]

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    assert_close(gradient(w, convolution), gradient(w, reference))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "arguments",
    [
        {"padding": "SAME", "strides": (2, 2)},
        {"padding": ((1, 1), (0, 2))},
        {"feature_group_count": 2},
        {"kernel_dilation": 2},
        {"input_dilation": 2, "padding": ((1, 1), (1, 1))},
    ],
)
def test_linen_convolutions_keep_their_meaning(arguments):
    (x,) = draw((4, 9, 8, 16))
    layer = partial(nn.Conv, 16, (3, 3), param_dtype=jnp.float64, **arguments)
    variables = layer().init(jax.random.key(0), x)
    fast = layer(conv_general_dilated=convolution)
    assert_close(jax.jit(fast.apply)(variables, x), layer().apply(variables, x))


@pytest.mark.parametrize("numbers", [("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "NHWC")])
def test_other_dimension_orders_are_left_to_xla(numbers):
    x, w = draw((2, 6, 6, 6), (6, 6, 3, 3), dtype=np.float32)
    expected = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    np.testing.assert_array_equal(
        convolution(x, w, (1, 1), "SAME", dimension_numbers=numbers), expected
    )
