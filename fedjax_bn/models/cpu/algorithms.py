"""Algorithms for a convolution in the order NHWC on CPU, all with the same arguments.

`choice` says which suits which shapes. Reverse-mode derivatives of any order, and forward over
reverse.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.models.cpu.fourier import fourier_convolution
from fedjax_bn.models.cpu.winograd import Padding, winograd_convolution

NHWC = ("NHWC", "HWIO", "NHWC")
Strides = tuple[int, int]
Algorithm = Callable[[jax.Array, jax.Array, Strides, Padding], jax.Array]
TILE = 4  # outputs a side; 6 would save little more and lose half a digit


def tiled_convolution(
    x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding, tile: int = TILE
) -> jax.Array:
    """`winograd_convolution`; arguments and result as in `direct_convolution`, strides all 1."""
    del strides
    return winograd_convolution(x, kernel, padding, tile)


def transformed_convolution(
    x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding
) -> jax.Array:
    """`fourier_convolution`; arguments and result as in `direct_convolution`, strides all 1."""
    del strides
    return fourier_convolution(x, kernel, padding)


def patches_convolution(
    x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding
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


def taps_convolution(
    x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding
) -> jax.Array:
    """Convolution as a sum of matrix products, one for each tap of the kernel.

    A tap is multiplied with the pixels that it meets and with no padding, which on a map of 2x2 is
    a product of 16 pairs of pixels in place of 36. Arguments and result as in `direct_convolution`.
    """
    r, s, channels, features = kernel.shape
    down, high = _meetings(x.shape[1], r, strides[0], padding[0])
    across, wide = _meetings(x.shape[2], s, strides[1], padding[1])
    taps = lax.split(kernel.reshape(r * s, channels, features), [1] * (r * s))
    y = jnp.zeros((len(x), high, wide, features), x.dtype)
    for (top, rows), (left, columns), tap in zip(
        [one for one in down for _ in across], across * r, taps, strict=True
    ):
        if not (len(rows) and len(columns)):
            continue
        met = x[:, rows.start : rows.stop : rows.step, columns.start : columns.stop : columns.step]
        part = (met.reshape(-1, channels) @ tap[0]).reshape(*met.shape[:3], features)
        around = ((top, high - top - len(rows)), (left, wide - left - len(columns)))
        y += jnp.pad(part, ((0, 0), *around, (0, 0)))
    return y


def _meetings(
    size: int, taps: int, stride: int, padding: tuple[int, int]
) -> tuple[list[tuple[int, range]], int]:
    """By tap of an axis, the first output that it reaches and its inputs; the number of outputs."""
    low, high = padding
    outputs, meetings = (size + low + high - taps) // stride + 1, []
    for tap in range(taps):
        first = max(0, -((tap - low) // stride))
        last = min(outputs, (size - 1 - tap + low) // stride + 1)
        start = stride * first + tap - low
        meetings.append((first, range(start, start + stride * max(last - first, 0), stride)))
    return meetings, outputs


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def direct_convolution(
    x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding
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
    x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NHWC)
    return y, (x, kernel)


def _direct_backward(
    strides: Strides, padding: Padding, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    return (
        _gradient_images(g, kernel, x.shape[1:3], strides, padding),
        _gradient_kernel(x, g, kernel.shape[:2], strides, padding),
    )


direct_convolution.defvjp(_direct_forward, _direct_backward)


def _gradient_images(
    g: jax.Array, kernel: jax.Array, sizes: Sequence[int], strides: Strides, padding: Padding
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
    x: jax.Array, g: jax.Array, taps: Sequence[int], strides: Strides, padding: Padding
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


UNIT_STRIDES = ("tiled", "tiled_small", "transformed")
ALGORITHMS: dict[str, Algorithm] = {
    "direct": direct_convolution,
    "patches": patches_convolution,
    "taps": taps_convolution,
    "tiled": tiled_convolution,
    "tiled_small": partial(tiled_convolution, tile=2),
    "transformed": transformed_convolution,
}
