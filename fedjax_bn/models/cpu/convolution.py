"""Algorithms for convolutions on CPU, and the choice that `models.cpu.convolve` makes among them.

XLA:CPU runs matrix products at full speed on all cores, convolutions at less than half of that
speed, and gradient convolutions inside a loop at a fifteenth. So most layers become matrix products
here: `algorithm_of` chooses by the static shapes. Every algorithm has reverse-mode derivatives of
any order, and forward over reverse.

The choices follow measurements, which the docstring of `benchmarks/kernels.py` has.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from scipy.fft import next_fast_len

from fedjax_bn.engine.backend import computed_once
from fedjax_bn.models.cpu import bilinear
from fedjax_bn.models.cpu.bilinear import TILE, Padding, Pair, Strides

_MIN_SAVED = 3000  # multiplications per pair of channels that repay transforming its kernel
_FEW_CHANNELS = 16  # input times output channels, such as 3 x 3 of the colours of L2D's styles
_FEW_PAIRS = 64 * 32  # input times output channels up to which `few` has no tiles on large maps
_MAX_TWICE = 2**27  # values of all windows; more take gigabytes
_FEW = 16  # output channels up to which a kernel's gradient is faster with x padded beforehand
_MAX_PATCH_VALUES = 2 * 2**20  # values of all windows; more do not stay in the caches
NHWC = ("NHWC", "HWIO", "NHWC")

# JAX's cache of traces includes this value in its keys, so a trace is not reused for another value.
_twice = jax.make_user_context(False)


def differentiated_twice() -> AbstractContextManager[None]:
    """Returns a context for programs that differentiate gradients.

    XLA:CPU is fast at the gradients in `direct`, but not at the gradients of these. In this context
    `patches` is chosen instead if its windows fit in memory.
    """
    return _twice(True)


class Shapes(NamedTuple):
    """The static shapes of a convolution, known while it is traced."""

    images: tuple[int, ...]  # (B, H, W, C)
    kernel: tuple[int, ...]  # (r, s, C, F)
    strides: Strides
    padding: Padding

    @property
    def outputs(self) -> tuple[int, ...]:
        """Rows and columns of the result; below 1 if the kernel exceeds the padded map."""
        return tuple(
            (size + sum(sides) - taps) // stride + 1
            for size, taps, stride, sides in zip(
                self.images[1:3], self.kernel, self.strides, self.padding, strict=False
            )
        )

    @property
    def windows(self) -> int:
        """Total number of values in all windows of the images."""
        return prod((self.images[0], *self.outputs, *self.kernel[:3]))


def algorithm_of(shapes: Shapes, few: bool = False) -> str:
    """Returns the name in `ALGORITHMS` that measurements suggest for these shapes.

    `few` is whether up to 64 and 32 channels on maps of 32 pixels are convolved by XLA, as in a
    U-Net.
    """
    images, strides, outputs = shapes.images, shapes.strides, shapes.outputs
    sizes, taps = images[1:3], shapes.kernel[:2]
    direct = "patches" if _twice.value and shapes.windows <= _MAX_TWICE else "direct"
    # All but XLA's own need maps that are not empty and padding that is not negative.
    if min(*images, *outputs) < 1 or min(map(min, shapes.padding)) < 0:
        return "direct"
    deep, unit = min(shapes.kernel[2:]) >= 16, strides == (1, 1)
    if unit and min(taps) >= 5 and prod(shapes.kernel[2:]) <= _FEW_CHANNELS:
        return "fast_fourier"
    if unit and min(taps) >= 5 and deep and images[0] >= 8 and max(*sizes, *outputs) <= 14:
        return "transformed"
    if unit and {*taps} <= {3, 4, 5} and deep and max(outputs) <= 32:
        tiles = prod(-(-n // TILE) for n in outputs)
        # Multiplications for a pair of channels; they must repay transforming its kernel.
        saved = prod(outputs) * prod(taps) - tiles * prod(TILE + tap - 1 for tap in taps)
        repays = not few or max(outputs) <= 16 or prod(shapes.kernel[2:]) > _FEW_PAIRS
        if images[0] * saved >= _MIN_SAVED and repays:
            return "tiled"
    if max(taps) > 1 and max(sizes) <= 4 and min(shapes.kernel[2:]) >= 64:
        return "taps"
    if unit and max(taps) > 1 and shapes.kernel[2:] == (16, 16) and min(outputs) >= 32:
        return "pairs" if direct == "direct" else direct
    if max(taps) > 1 and min(outputs) >= 10 and images[3] % 8 == 0:
        return direct  # the channels fill the processor's vectors
    # XLA can take 50 times as long if a kernel exceeds its map, forward or in a gradient.
    exceeds = any(
        tap > min(size, n) or n > size for tap, size, n in zip(taps, sizes, outputs, strict=True)
    )
    if shapes.windows <= _MAX_PATCH_VALUES or exceeds or max(taps) == 1:
        return "patches"
    folds = all(stride > 1 and tap % stride == 0 for stride, tap in zip(strides, taps, strict=True))
    few_channels = images[3] * prod(strides) <= _FEW_CHANNELS
    return "folded" if folds and few_channels and direct == "direct" else direct


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _direct(x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding) -> jax.Array:
    """Convolves by XLA, with gradients that are convolutions in the usual dimension order."""
    # Autodiff's gradients have another order, in which XLA:CPU is up to 15 times slower in a loop.
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NHWC)


def _gradients(
    strides: Strides, padding: Padding, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    return (
        _gradient_images(g, kernel, x.shape[1:3], strides, padding),
        _gradient_kernel(x, g, kernel.shape[:2], strides, padding),
    )


# The forward pass is lax's own, so that forward mode can differentiate it.
_direct.defvjp(
    lambda x, kernel, strides, padding: (
        lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NHWC),
        (x, kernel),
    ),
    _gradients,
)


def _gradient_images(
    g: jax.Array, kernel: jax.Array, sizes: Sequence[int], strides: Strides, padding: Padding
) -> jax.Array:
    """Returns dL/dx f[B, H, W, C]: g f[B, H', W', F] convolved with the flipped kernel."""
    # Strides would dilate g, which is slow. Instead, the gradient at pixels a stride apart is a
    # convolution of g itself with the taps that reach them; such maps are then interleaved.
    gaps = [(0, max(0, stride - k)) for stride, k in zip(strides, kernel.shape, strict=False)]
    kernel = jnp.pad(kernel, (*gaps, (0, 0), (0, 0)))  # at least one tap for every pixel

    def meeting(axis: int, start: int) -> tuple[int, Pair]:
        """The first tap that reaches pixels start, start + stride, ..., and the padding of g."""
        size, stride, outputs = sizes[axis], strides[axis], g.shape[axis + 1]
        back, first_tap = divmod(start + padding[axis][0], stride)
        count = len(range(first_tap, kernel.shape[axis], stride))
        return first_tap, (count - 1 - back, -(-size // stride) + back - outputs)

    rows = []
    for top, high in (meeting(0, start) for start in range(strides[0])):
        columns = []
        for column, wide in (meeting(1, start) for start in range(strides[1])):
            taps = kernel[top :: strides[0], column :: strides[1]]
            # The barrier keeps XLA from folding the transpose into a slow dimension order.
            turned = lax.optimization_barrier(jnp.flip(taps, (0, 1)).swapaxes(2, 3))
            columns.append(
                lax.conv_general_dilated(g, turned, (1, 1), (high, wide), dimension_numbers=NHWC)
            )
        rows.append(jnp.stack(columns, 3))
    apart = jnp.stack(rows, 2)  # [B, rows, down, columns, across, C]
    interleaved = apart.reshape(
        len(g), apart.shape[1] * strides[0], apart.shape[3] * strides[1], apart.shape[5]
    )
    return interleaved[:, : sizes[0], : sizes[1]]


def _gradient_kernel(
    x: jax.Array, g: jax.Array, taps: Sequence[int], strides: Strides, padding: Padding
) -> jax.Array:
    """Returns dL/dkernel f[r, s, C, F]: x as C images of B channels, with g as dilated kernel."""
    if g.shape[-1] <= _FEW < x.shape[-1] and strides == (1, 1):
        # With x as kernel the sum has more than 16 output channels, which XLA:CPU does faster.
        around = tuple((k - 1 - low, 0) for k, (low, _) in zip(taps, padding, strict=True))
        turned = _gradient_kernel(g, x, taps, strides, around)
        return jnp.flip(turned, (0, 1)).swapaxes(2, 3)
    if g.shape[-1] <= _FEW:
        x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
        padding = ((0, 0), (0, 0))
    axes = zip(g.shape[1:3], x.shape[1:3], taps, strides, padding, strict=True)
    sides = [(low, k + (n - 1) * d - size - low) for n, size, k, d, (low, _) in axes]
    # The barriers keep XLA from folding the transposes, as above.
    x = lax.optimization_barrier(x.transpose(3, 1, 2, 0))
    g = lax.optimization_barrier(g.transpose(1, 2, 0, 3))
    y = lax.conv_general_dilated(x, g, (1, 1), sides, rhs_dilation=strides, dimension_numbers=NHWC)
    return y.transpose(1, 2, 0, 3)


def _patches(x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding) -> jax.Array:
    """Convolves by one matrix product of all windows f[B * H' * W', r * s * C] and the kernel."""
    r, s, channels, features = kernel.shape
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    # Concatenating across first makes the windows down few and long: faster than r * s copies.
    for axis, taps in ((2, s), (1, r)):
        stride = strides[axis - 1]
        reach = (x.shape[axis] - taps) // stride * stride + 1
        windows = [lax.slice_in_dim(x, i, i + reach, stride, axis) for i in range(taps)]
        x = jnp.concatenate(windows, axis=-1)
    y = x.reshape(-1, r * s * channels) @ kernel.reshape(-1, features)
    return y.reshape(*x.shape[:3], features)


def _pairs(x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding) -> jax.Array:
    """Convolves with each two columns of outputs as one with twice the features."""
    # XLA:CPU runs a convolution at half of its usual speed if input and output have at most 16
    # channels. A kernel that is a column wider costs only (s + 1) / s times the multiplications.
    del strides
    r, s, channels, features = kernel.shape
    rows, (left_padding, right) = padding
    wide = x.shape[2] + left_padding + right - s + 1
    shifted = [jnp.pad(kernel, ((0, 0), (i, 1 - i), (0, 0), (0, 0))) for i in (0, 1)]
    shifted = jnp.stack(shifted, 3).reshape(r, s + 1, channels, 2 * features)
    y = _direct(x, shifted, (1, 2), (rows, (left_padding, right + wide % 2)))
    # For the gradient of y: each of its readers would otherwise compute it again.
    return computed_once(y.reshape(*y.shape[:2], -1, features)[:, :, :wide])


def _folded(x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding) -> jax.Array:
    """Convolves with strides of 1, where the pixels of a stride have become channels."""
    # XLA:CPU takes over twice as long for the gradient of a kernel of few channels with strides.
    sides, gaps = [], []
    for size, taps, stride, (low, high) in zip(
        x.shape[1:3], kernel.shape, strides, padding, strict=False
    ):
        gap = -taps % stride
        gaps.append((0, gap))
        sides.append((low, high - (low + size + high - taps) % stride + gap, 0))

    def folded(maps: jax.Array) -> jax.Array:
        """f[B, H, W, C] -> f[B, H / down, W / across, down * across * C]."""
        (down, across), (batch, height, width, channels) = strides, maps.shape
        maps = maps.reshape(batch, height // down, down, width // across, across, channels)
        return maps.swapaxes(2, 3).reshape(batch, height // down, width // across, -1)

    x = folded(lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *sides, (0, 0, 0)]))
    kernel = jnp.pad(kernel, (*gaps, (0, 0), (0, 0)))
    kernel = jnp.moveaxis(folded(jnp.moveaxis(kernel, 3, 0)), 0, 3)
    return _direct(x, kernel, (1, 1), ((0, 0), (0, 0)))


def _taps(x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding) -> jax.Array:
    """Convolves by a sum of matrix products, one for each tap of the kernel."""
    # Each tap is multiplied by the pixels that it reaches, but not by padding: a 3x3 kernel on a
    # 2x2 map needs 16 products instead of 36.
    r, s, channels, features = kernel.shape

    def meetings(axis: int, taps: int) -> tuple[list[tuple[int, range]], int]:
        """The first output and the range of inputs of each tap; and the number of outputs."""
        size, stride, (low, high) = x.shape[axis], strides[axis - 1], padding[axis - 1]
        outputs, reached = (size + low + high - taps) // stride + 1, []
        for tap in range(taps):
            first_output = max(0, -((tap - low) // stride))
            end_output = min(outputs, (size - 1 - tap + low) // stride + 1)
            start = stride * first_output + tap - low
            end = start + stride * max(end_output - first_output, 0)
            reached.append((first_output, range(start, end, stride)))
        return reached, outputs

    (down, high), (across, wide) = meetings(1, r), meetings(2, s)
    taps = lax.split(kernel.reshape(r * s, channels, features), [1] * (r * s))
    y = jnp.zeros((len(x), high, wide, features), x.dtype)
    places = [(*row, *column) for row in down for column in across]
    for (top, rows, column, columns), tap in zip(places, taps, strict=True):
        if not (len(rows) and len(columns)):
            continue
        met = x[:, rows.start : rows.stop : rows.step, columns.start : columns.stop : columns.step]
        part = (met.reshape(-1, channels) @ tap[0]).reshape(*met.shape[:3], features)
        around = ((top, high - top - len(rows)), (column, wide - column - len(columns)))
        y += jnp.pad(part, ((0, 0), *around, (0, 0)))
    return y


def _fast_fourier(x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding) -> jax.Array:
    """Convolves large kernels with few channels by XLA's fast Fourier transform."""
    # A pair of channels costs one product per coefficient, whatever the size of the kernel. With
    # many channels most of the work is sums over channels, which matrix products do faster.
    # Rounding errors are relative to the largest output.
    del strides
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    sizes, taps = x.shape[1:3], kernel.shape[:2]
    cycle = [next_fast_len(size, real=True) for size in sizes]  # wrapped outputs are cut off below
    images = jnp.fft.rfft2(x.transpose(0, 3, 1, 2), cycle)
    # Conjugated, because the convolution of a network is a correlation.
    filters = jnp.fft.rfft2(kernel.transpose(2, 3, 0, 1), cycle).conj()
    y = sum(images[:, c, None] * filters[c] for c in range(x.shape[3]))
    rows, columns = (size - n + 1 for size, n in zip(sizes, taps, strict=True))
    return jnp.fft.irfft2(y, cycle)[:, :, :rows, :columns].transpose(0, 2, 3, 1)


# All take the arguments (x, kernel, strides, padding); those in `UNIT_STRIDES` need strides of 1.
ALGORITHMS: dict[str, Callable[[jax.Array, jax.Array, Strides, Padding], jax.Array]] = {
    **bilinear.ALGORITHMS,
    "direct": _direct,
    "fast_fourier": _fast_fourier,
    "folded": _folded,
    "pairs": _pairs,
    "patches": _patches,
    "taps": _taps,
}
UNIT_STRIDES = ("fast_fourier", "pairs", "tiled", "transformed")
