"""The fast convolutions against XLA's, SciPy's and closed forms, in float64 unless stated."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_bn.models.cpu import convolve
from fedjax_bn.models.cpu.convolution import (
    ALGORITHMS,
    NHWC,
    UNIT_STRIDES,
    Shapes,
    algorithm_of,
    differentiated_twice,
)

# images, kernel, strides, padding
SHAPES = [
    ((3, 7, 9, 2), (5, 3, 2, 3), (1, 1), ((2, 2), (1, 1))),  # unequal sides, odd sizes
    ((2, 6, 6, 1), (4, 3, 1, 2), (1, 1), ((3, 0), (1, 4))),  # padding on one side
    ((70, 4, 4, 2), (3, 3, 2, 2), (1, 1), ((1, 1), (1, 1))),  # more images than a chunk
    ((1, 1, 3, 2), (5, 5, 2, 2), (1, 1), ((2, 2), (9, 2))),  # kernel beyond the images
    ((2, 9, 8, 2), (3, 3, 2, 18), (2, 2), ((1, 1), (1, 1))),  # features that fill vectors
    ((1, 11, 9, 2), (7, 5, 2, 2), (3, 2), ((3, 3), (0, 1))),
    ((1, 6, 6, 2), (2, 2, 2, 2), (3, 3), ((0, 0), (0, 0))),  # gaps between windows
    ((2, 6, 5, 18), (3, 3, 18, 2), (1, 1), ((0, 3), (2, 0))),  # fewer outputs than inputs
]


def draw(*shapes, dtype=np.float64):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def reference(x, kernel, strides, padding):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NHWC)


def of_strides(strides):
    """The algorithms for such strides, XLA's own first."""
    unit = strides == (1, 1)
    return {"XLA": reference} | {
        name: one for name, one in ALGORITHMS.items() if unit or name not in UNIT_STRIDES
    }


def assert_close(actual, expected, tolerance=1e-12, err_msg=""):
    atol = tolerance * float(jnp.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=err_msg)


def assert_all_as_xla(found):
    for name, values in found.items():
        for one, expected in zip(values, found["XLA"], strict=True):
            assert_close(one, expected, err_msg=name)


def derivatives(convolve, x, w, strides, padding):
    y, pull = jax.vjp(lambda x, w: convolve(x, w, strides, padding), x, w)
    return y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("images", "kernel", "strides", "padding"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case in SHAPES[1:3])) for case in SHAPES],
)
def test_every_algorithm_gives_xlas_values_and_gradients(images, kernel, strides, padding):
    @jax.jit
    def every(x, w):
        algorithms = of_strides(strides).items()
        return {name: derivatives(one, x, w, strides, padding) for name, one in algorithms}

    assert_all_as_xla(every(*draw(images, kernel)))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_second_derivatives_are_xlas(strides):
    x, w, dx, dw = draw(*2 * [(2, 5, 4, 2), (3, 3, 2, 3)])

    def second(convolve):
        def gradients(x, w):
            value = lambda x, w: jnp.sin(convolve(x, w, strides, ((1, 1), (2, 1)))).sum()  # noqa: E731
            return jax.grad(value, argnums=(0, 1))(x, w)

        def squares(x, w):
            return sum(jnp.sum(jnp.square(g)) for g in gradients(x, w))

        forward_over_reverse = jax.jvp(gradients, (x, w), (dx, dw))[1]
        return *forward_over_reverse, *jax.grad(squares, argnums=(0, 1))(x, w)

    algorithms = of_strides(strides).items()
    assert_all_as_xla(jax.jit(lambda: {name: second(one) for name, one in algorithms})())


@pytest.mark.parametrize(
    ("name", "size", "bound"),
    [("tiled", 3, 1e-5), ("tiled", 5, 1e-5), ("transformed", 5, 2e-6), ("fast_fourier", 9, 2e-6)],
)
def test_float32_errors_stay_within_a_bound_of_the_largest_value(name, size, bound):
    x, w = draw((2, 14, 14, 32), (size, size, 32, 32), dtype=np.float32)
    padding = ((size // 2,) * 2,) * 2
    actual = jax.jit(lambda x, w: derivatives(ALGORITHMS[name], x, w, (1, 1), padding))(x, w)
    with jax.enable_x64(True):
        x, w = (jnp.asarray(np.asarray(v), np.float64) for v in (x, w))
        expected = jax.jit(lambda x, w: derivatives(reference, x, w, (1, 1), padding))(x, w)
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == np.float32
            assert_close(np.asarray(a), b, bound)


# images, kernel, stride, padding on all sides
LAYERS = [
    ((8, 8, 8, 16), (3, 3, 16, 16), 1, 1, "tiled"),
    ((8, 8, 8, 16), (5, 5, 16, 32), 1, 2, "transformed"),
    ((2, 14, 14, 16), (5, 5, 16, 32), 1, 2, "tiled"),
    ((2, 2, 2, 32), (3, 3, 32, 32), 1, 1, "patches"),
    ((4, 8, 8, 16), (3, 3, 16, 32), 2, 1, "patches"),
    ((4, 4, 4, 16), (3, 3, 16, 16), 1, -1, "direct"),
    # YOLOv5n's, of 320 pixels.
    ((4, 320, 320, 3), (6, 6, 3, 16), 2, 2, "folded"),
    ((4, 80, 80, 16), (3, 3, 16, 16), 1, 1, "pairs"),
    ((4, 80, 80, 32), (1, 1, 32, 16), 1, 0, "patches"),
    # ResNet18's, of 64 pixels.
    ((16, 64, 64, 3), (7, 7, 3, 64), 2, 3, "direct"),
    ((16, 4, 4, 256), (3, 3, 256, 256), 1, 1, "taps"),
    ((16, 4, 4, 256), (3, 3, 256, 512), 2, 1, "taps"),
    # DigitCNN's.
    ((32, 28, 28, 3), (5, 5, 3, 64), 1, 2, "patches"),
    ((32, 14, 14, 64), (5, 5, 64, 64), 1, 2, "transformed"),
    # The stylist's of L2D.
    ((64, 208, 208, 3), (17, 17, 3, 3), 1, 16, "fast_fourier"),
]


@pytest.mark.parametrize(("images", "kernel", "stride", "padding", "name"), LAYERS)
def test_the_algorithm_follows_from_the_shapes(images, kernel, stride, padding, name):
    shapes = Shapes(images, kernel, (stride,) * 2, ((padding,) * 2,) * 2)
    assert algorithm_of(shapes) == name
    if name in ("direct", "folded", "pairs") and padding >= 0:
        with differentiated_twice():  # matrix products, where these fit in memory
            assert algorithm_of(shapes) == "patches"
            assert algorithm_of(shapes._replace(images=(4096, 224, 224, images[3]))) == name


def test_few_channels_have_no_tiles_where_a_network_asks():
    shapes = Shapes((8, 32, 32, 64), (3, 3, 64, 32), (1, 1), ((1, 1), (1, 1)))
    assert [algorithm_of(shapes, few) for few in (False, True)] == ["tiled", "direct"]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("images", "kernel", "stride", "padding", "name"), [*LAYERS[:2], LAYERS[3]]
)
def test_vmap_over_clients_is_the_loop_and_never_a_grouped_convolution(
    images, kernel, stride, padding, name
):
    x, w = draw((3, 2, *images[1:]), (3, *kernel))

    def gradients(x, w):
        y, pull = jax.vjp(lambda x, w: convolve(x, w, (stride,) * 2, [(padding,) * 2] * 2), x, w)
        return y, *pull(y)

    looped = jax.jit(lambda x, w: lax.map(lambda a: gradients(*a), (x, w)))(x, w)
    assert "conv_general_dilated" not in str(jax.make_jaxpr(jax.vmap(gradients))(x, w)), name
    for a, b in zip(jax.jit(jax.vmap(gradients))(x, w), looped, strict=True):
        assert_close(a, b)


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
    fast = layer(conv_general_dilated=convolve)
    assert_close(jax.jit(fast.apply)(variables, x), layer().apply(variables, x))


def test_other_dimension_orders_are_left_to_xla():
    x, w = draw((2, 6, 6, 6), (6, 6, 3, 3), dtype=np.float32)
    arguments = {"padding": "SAME", "dimension_numbers": ("NHWC", "OIHW", "NHWC")}
    expected = lax.conv_general_dilated(x, w, (1, 1), **arguments)
    np.testing.assert_array_equal(convolve(x, w, (1, 1), **arguments), expected)
