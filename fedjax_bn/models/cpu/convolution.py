"""Convolution that is fast on CPU, where XLA's own is not.

XLA:CPU runs matrix products at full speed on all cores, its convolutions at less than half of that,
and gradient convolutions inside a loop at a fifteenth. So most layers become matrix products here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.dtypes import promote
from fedjax_bn.models.cpu.fourier import fourier_convolution
from fedjax_bn.models.cpu.winograd import Padding, winograd_convolution

NHWC = ("NHWC", "HWIO", "NHWC")
_Strides = tuple[int, int]
_TILE = 4  # outputs a side; 6 would save little more and lose half a digit
_MIN_SAVED = 3000  # multiplications a pair of channels, for which its kernel is transformed
_MAX_PATCH_VALUES = 4 * 2**20  # more no longer stay in the caches


def convolution(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = NHWC,
    feature_group_count: int = 1,
    **options: Any,
) -> jax.Array:
    """Drop-in for `jax.lax.conv_general_dilated` on CPU; layers call `models.cpu.convolve`.

    A two-dimensional convolution in floating numbers, in the order NHWC and HWIO, without dilation
    or groups, takes the algorithm that suits its static shapes (`choose_algorithm`).
    Anything else is `lax.conv_general_dilated` itself. Forward and backward pass in a `scan`,
    median ms of 9 in turn on two shared AVX-512 cores, jax 0.10.2 and PyTorch 2.13 in
    channels_last, float32; * marks the choice:

        layer (kernel, images)              direct  patches  tiled  transformed  PyTorch
        5x5       3 ->  64, 32 x 28 x 28       5.8     5.2*      -            -      3.7
        5x5      64 ->  64, 32 x 14 x 14      26.8    34.9    16.5         9.3*     10.9
        5x5      64 -> 128, 32 x  7 x  7      11.4     9.8     5.5         4.9*      6.1
        7x7 / 2   3 ->  64, 16 x 64 x 64       5.5     4.7*      -            -      3.8
        3x3      64 ->  64, 16 x 16 x 16       7.8     6.7     4.6*        6.1       4.8
        3x3     256 -> 256, 16 x  4 x  4       6.4     3.5*    5.4         6.5       5.0
        3x3     512 -> 512, 16 x  2 x  2       288     5.3*   21.6            -     11.0
        3x3     512 -> 512, 64 x  2 x  2      1098    14.7*   46.1            -     25.2
        3x3 / 2 256 -> 512, 16 x  4 x  4      68.5     2.2*      -            -      6.1

    Reverse-mode derivatives of any order, and forward over reverse.

    Args:
      lhs: images f[B, H, W, C].
      rhs: kernel f[r, s, C, F].
      window_strides: strides (down, across).
      padding: ((top, bottom), (left, right)), or "SAME" or "VALID".
      lhs_dilation: dilation of the images.
      rhs_dilation: dilation of the kernel.
      dimension_numbers: as lax takes them; NHWC, HWIO, NHWC by default.
      feature_group_count: number of groups of channels.
      **options: further arguments of `lax.conv_general_dilated`, `precision` for example.

    Returns:
      f[B, H', W', F].
    """
    plain = {"lhs_dilation": lhs_dilation, "rhs_dilation": rhs_dilation, **options}
    plain |= {"dimension_numbers": dimension_numbers, "feature_group_count": feature_group_count}
    if not _is_usual(lhs, rhs, **plain):
        return lax.conv_general_dilated(lhs, rhs, window_strides, padding, **plain)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(lhs.shape[1:3], rhs.shape[:2], window_strides, padding)
    strides, sides = tuple(window_strides), tuple((low, high) for low, high in padding)
    algorithm = choose_algorithm(lhs.shape, rhs.shape, strides, sides)
    # Half precision has no arithmetic of its own here: products and sums are in float32.
    dtype = promote(lhs.dtype, jnp.float32)
    return algorithm(lhs.astype(dtype), rhs.astype(dtype), strides, sides).astype(lhs.dtype)


def _is_usual(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int = 1,
    preferred_element_type: Any = None,
    **options: Any,
) -> bool:
    """Whether the algorithms below know this convolution."""
    del options  # precision and the like change nothing on CPU
    if lhs.ndim != 4 or lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        return False
    order = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    return (
        order == lax.conv_dimension_numbers(lhs.shape, rhs.shape, NHWC)
        and {1, *(lhs_dilation or ()), *(rhs_dilation or ())} == {1}
        and feature_group_count == batch_group_count == 1
        and preferred_element_type in (None, lhs.dtype)
    )


def choose_algorithm(
    images: Sequence[int], kernel: Sequence[int], strides: _Strides, padding: Padding
) -> Callable[..., jax.Array]:
    """The fastest of the functions below for these shapes; see `convolution`."""
    sizes, taps, (channels, features) = images[1:3], kernel[:2], kernel[2:]
    outputs = [
        (size + sum(sides) - tap) // stride + 1
        for size, tap, stride, sides in zip(sizes, taps, strides, padding, strict=True)
    ]
    if min(*images, *outputs) < 1 or min(map(min, padding)) < 0:
        return direct_convolution
    deep = min(channels, features) >= 16
    small = images[0] >= 8 and max(*sizes, *outputs) <= 14
    if strides == (1, 1) and min(taps) >= 5 and deep and small:
        return transformed_convolution
    if strides == (1, 1) and {*taps} <= {3, 4, 5} and deep and max(outputs) <= 32:
        tiles = prod(-(-n // _TILE) for n in outputs)
        saved = prod(outputs) * prod(taps) - tiles * prod(_TILE + tap - 1 for tap in taps)
        if images[0] * saved >= _MIN_SAVED:
            return tiled_convolution
    # XLA's convolution, or that of a gradient, is 50 times slower where a kernel exceeds its map.
    exceeds = any(
        tap > min(size, n) or n > size for tap, size, n in zip(taps, sizes, outputs, strict=True)
    )
    few = images[0] * prod(outputs) * prod(taps) * channels <= _MAX_PATCH_VALUES
    return patches_convolution if few or exceeds or max(taps) == 1 else direct_convolution


def tiled_convolution(
    x: jax.Array, kernel: jax.Array, strides: _Strides, padding: Padding
) -> jax.Array:
    """`winograd_convolution`; arguments and result as in `direct_convolution`, strides all 1."""
    del strides
    return winograd_convolution(x, kernel, padding, _TILE)


def transformed_convolution(
    x: jax.Array, kernel: jax.Array, strides: _Strides, padding: Padding
) -> jax.Array:
    """`fourier_convolution`; arguments and result as in `direct_convolution`, strides all 1."""
    del strides
    return fourier_convolution(x, kernel, padding)


def patches_convolution(
    x: jax.Array, kernel: jax.Array, strides: _Strides, padding: Padding
) -> jax.Array:
    """Convolution as one matrix product of all windows, f[B * H' * W', r * s * C], with the kernel.

    Arguments and result as in `direct_convolution`.
    """
    r, s, channels, features = kernel.shape
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    # Across first: the windows down are then few and long, which copies faster than r * s of them.
    for axis, taps in ((2, s), (1, r)):
        stride = strides[axis - 1]
        reach = (x.shape[axis] - taps) // stride * stride + 1
        windows = [lax.slice_in_dim(x, i, i + reach, stride, axis) for i in range(taps)]
        x = jnp.concatenate(windows, axis=-1)
    return (x.reshape(-1, r * s * channels) @ kernel.reshape(-1, features)).reshape(
        *x.shape[:3], features
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def direct_convolution(
    x: jax.Array, kernel: jax.Array, strides: _Strides, padding: Padding
) -> jax.Array:
    """XLA's convolution, with gradients that are convolutions in the usual dimension order.

    The ones that autodiff makes are not, and XLA:CPU runs them up to 15 times slower in a loop.

    Args:
      x: f[B, H, W, C].
      kernel: f[r, s, C, F].
      strides: (down, across).
      padding: ((top, bottom), (left, right)).

    Returns:
      f[B, (H + top + bottom - r) // down + 1, (W + left + right - s) // across + 1, F].
    """
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NHWC)


def _direct_forward(
    x: jax.Array, kernel: jax.Array, strides: _Strides, padding: Padding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NHWC)
    return y, (x, kernel)


def _direct_backward(
    strides: _Strides, padding: Padding, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    return (
        _gradient_images(g, kernel, x.shape[1:3], strides, padding),
        _gradient_kernel(x, g, kernel.shape[:2], strides, padding),
    )


direct_convolution.defvjp(_direct_forward, _direct_backward)


def _gradient_images(
    g: jax.Array, kernel: jax.Array, sizes: Sequence[int], strides: _Strides, padding: Padding
) -> jax.Array:
    """dL/dx f[B, H, W, C]: the dilated g f[B, H', W', F] with the turned kernel."""
    sides = []
    for n, size, taps, stride, (low, _) in zip(
        g.shape[1:3], sizes, kernel.shape[:2], strides, padding, strict=True
    ):
        sides.append((taps - 1 - low, size + low - (n - 1) * stride - 1))
    # The barriers keep XLA from folding the transpose into an unusual dimension order again.
    turned = lax.optimization_barrier(jnp.flip(kernel, (0, 1)).swapaxes(2, 3))
    return lax.conv_general_dilated(
        g, turned, (1, 1), sides, lhs_dilation=strides, dimension_numbers=NHWC
    )


def _gradient_kernel(
    x: jax.Array, g: jax.Array, taps: Sequence[int], strides: _Strides, padding: Padding
) -> jax.Array:
    """dL/dkernel f[r, s, C, F]: x as C images of B channels, with g as its dilated kernel."""
    sides = []
    for n, size, k, stride, (low, _) in zip(
        g.shape[1:3], x.shape[1:3], taps, strides, padding, strict=True
    ):
        sides.append((low, k + (n - 1) * stride - size - low))
    x = lax.optimization_barrier(x.transpose(3, 1, 2, 0))
    g = lax.optimization_barrier(g.transpose(1, 2, 0, 3))
    y = lax.conv_general_dilated(x, g, (1, 1), sides, rhs_dilation=strides, dimension_numbers=NHWC)
    return y.transpose(1, 2, 0, 3)
