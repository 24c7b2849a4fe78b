"""Narrow maps on TPU: neighbouring columns share the lanes of a vector register.

A TPU stores and computes the channels of a position in rows of 128 lanes, of which 64 channels
fill one half. Therefore two neighbouring columns of such a map are stored as one with twice the
channels, f[B, H, W, C] as f[B, H, W / 2, 2 C]. A convolution has its kernel at as many places of a
larger kernel, and zeros elsewhere. Modules pack what they read and unpack what they return, and XLA
removes an unpacking that meets a packing.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.engine.backend import on_tpu

_LANES = 128
FEWEST_VALUES = 2**20  # of a map; smaller ones have no cycles to spare for larger kernels


def fitting(shape: Sequence[int]) -> int:
    """Returns the number of columns to pack in maps of shape (B, H, W, C): 2 on TPU, or 1."""
    # Two columns are packed if they fill the lanes better than one, and if the map is large.
    (*_, width, channels), half = shape, _LANES // 2
    large = math.prod(shape) >= FEWEST_VALUES
    return 2 if on_tpu() and large and half // 2 < channels <= half and width % 2 == 0 else 1


def pack(x: jax.Array, columns: int) -> jax.Array:
    """Returns f[B, H, W, C] as f[B, H, W / columns, columns C]."""
    return x if columns == 1 else x.reshape(*x.shape[:2], x.shape[2] // columns, -1)


def unpack(x: jax.Array, columns: int) -> jax.Array:
    """Returns f[B, H, W / columns, columns C] as f[B, H, W, C]."""
    return x if columns == 1 else x.reshape(*x.shape[:2], x.shape[2] * columns, -1)


def repeated(values: jax.Array, columns: int) -> jax.Array:
    """Returns values f[..., C] of channels for maps of packed columns, f[..., columns C]."""
    return values if columns == 1 else jnp.concatenate([values] * columns, axis=-1)


def unpacked_moments(mean: jax.Array, var: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance f[..., C] of channels from those of packed columns."""
    if columns == 1:
        return mean, var
    mean, var = (moment.reshape(*moment.shape[:-1], columns, -1) for moment in (mean, var))
    total_mean = mean.mean(-2, keepdims=True)
    return total_mean.squeeze(-2), (var + jnp.square(mean - total_mean)).mean(-2)


def convolve_packed(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    read: int,
    written: int,
) -> jax.Array:
    """Convolves f[B, H, W / read, read C] into f[B, H', W' / written, written F].

    The kernel is f[r, s, C, F], strides are (down, across), padding ((top, bottom), (left, right)).
    Across times `written` is a multiple of `read`, and W' one of `written`.
    """
    (down, across), (rows, (left_padding, right)) = strides, padding
    size, width = kernel.shape[1], x.shape[2] * read
    outputs = (width + left_padding + right - size) // across + 1
    # Output `written * j + i` reads the columns from `written * j * across + i * across - left`.
    first_tap = -left_padding // read
    last_tap = (across * (written - 1) + size - 1 - left_padding) // read
    taps = last_tap - first_tap + 1
    begins = [across * i - left_padding - first_tap * read for i in range(written)]
    ends = [taps * read - begin - size for begin in begins]
    sides = zip(begins, ends, strict=True)
    copies = [jnp.pad(kernel, ((0, 0), side, (0, 0), (0, 0))) for side in sides]
    large = jnp.stack(copies, axis=3)  # f[r, taps read, C, written, F]
    large = large.reshape(kernel.shape[0], taps, read * kernel.shape[2], -1)
    step = across * written // read
    after = step * (outputs // written - 1) + last_tap - (x.shape[2] - 1)
    window = (down, step), (rows, (-first_tap, after))
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, large, *window, dimension_numbers=layout)
