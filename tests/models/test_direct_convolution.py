"""XLA's convolution with gradients of our own and its folded form, against XLA's, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_bn.models.cpu.choice import Shapes, by_table
from fedjax_bn.models.cpu.direct import NHWC, direct_convolution, folded_convolution

EVEN = ((2, 2), (2, 2))


def derivatives(convolve, x, kernel):
    """The value, its gradients, and the gradient of the gradient of the kernel."""

    def gradients(x, kernel):
        y, pull = jax.vjp(convolve, x, kernel)
        return y, *pull(jnp.sin(y))

    def steepness(x, kernel):
        return jnp.square(gradients(x, kernel)[2]).sum()

    return *gradients(x, kernel), jax.grad(steepness)(x, kernel)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("convolve", "images", "kernel", "strides", "padding"),
    [
        (folded_convolution, (2, 8, 12, 3), (6, 6, 3, 4), (2, 2), EVEN),
        # What does not fit: taps, odd sides, unequal strides, a row that no window meets.
        (folded_convolution, (1, 9, 12, 2), (3, 5, 2, 3), (2, 3), ((1, 0), (2, 1))),
        (direct_convolution, (2, 9, 8, 2), (3, 5, 2, 18), (2, 3), ((1, 1), (2, 1))),
    ],
)
def test_values_and_derivatives_are_xlas(convolve, images, kernel, strides, padding):
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(shape)) for shape in (images, kernel))

    def reference(x, w):
        return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=NHWC)

    ours = jax.jit(lambda x, w: derivatives(lambda *xw: convolve(*xw, strides, padding), x, w))
    for own, other in zip(
        ours(x, w), jax.jit(lambda x, w: derivatives(reference, x, w))(x, w), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-12 * float(jnp.abs(other).max()))


@pytest.mark.parametrize(
    ("images", "kernel", "stride", "padding", "name"),
    [
        ((4, 320, 320, 3), (6, 6, 3, 16), 2, 2, "folded"),
        ((4, 80, 80, 16), (3, 3, 16, 16), 1, 1, "direct"),
        ((4, 40, 40, 32), (3, 3, 32, 32), 1, 1, "direct"),
        ((4, 20, 20, 64), (3, 3, 64, 64), 1, 1, "tiled"),
        ((4, 80, 80, 32), (1, 1, 32, 16), 1, 0, "patches"),
        # ResNet18's and DigitCNN's are as they were.
        ((16, 64, 64, 3), (7, 7, 3, 64), 2, 3, "direct"),
        ((16, 16, 16, 64), (3, 3, 64, 64), 1, 1, "tiled"),
        ((16, 16, 16, 64), (3, 3, 64, 128), 2, 1, "patches"),
        ((16, 4, 4, 256), (3, 3, 256, 512), 2, 1, "taps"),
        ((32, 28, 28, 3), (5, 5, 3, 64), 1, 2, "patches"),
        ((32, 14, 14, 64), (5, 5, 64, 64), 1, 2, "transformed"),
        # The stylist's of L2D, of images as small as digits and as large as photographs.
        ((32, 28, 28, 3), (5, 5, 3, 3), 1, 0, "fast_fourier"),
        ((64, 208, 208, 3), (17, 17, 3, 3), 1, 16, "fast_fourier"),
    ],
)
def test_the_table_names_what_was_fastest(images, kernel, stride, padding, name):
    shapes = Shapes(images, kernel, (stride, stride), ((padding, padding),) * 2)
    assert by_table(shapes) == name
