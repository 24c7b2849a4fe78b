"""Algorithms for a convolution in the order NHWC on CPU, all with the same arguments.

`choice` says which suits which shapes. Reverse-mode derivatives of any order, and forward over
reverse.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.models.cpu.direct import Padding, Strides, direct_convolution, folded_convolution
from fedjax_bn.models.cpu.fast_fourier import fast_fourier_convolution
from fedjax_bn.models.cpu.fourier import fourier_convolution
from fedjax_bn.models.cpu.winograd import winograd_convolution

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


UNIT_STRIDES = ("fast_fourier", "tiled", "tiled_small", "transformed")
ALGORITHMS: dict[str, Algorithm] = {
    "direct": direct_convolution,
    "fast_fourier": fast_fourier_convolution,
    "folded": folded_convolution,
    "patches": patches_convolution,
    "taps": taps_convolution,
    "tiled": tiled_convolution,
    "tiled_small": partial(tiled_convolution, tile=2),
    "transformed": transformed_convolution,
}
