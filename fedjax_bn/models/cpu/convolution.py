"""Convolution that is fast on CPU, where XLA's own is not.

XLA:CPU runs matrix products at full speed on all cores, its convolutions at less than half of that,
and gradient convolutions inside a loop at a fifteenth. So most layers become matrix products here.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.models.cpu.choice import chosen, shapes_of
from fedjax_bn.models.cpu.direct import NHWC


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
    or groups, takes the algorithm that suits its static shapes (`choice.chosen`).
    Anything else is `lax.conv_general_dilated` itself. Forward and backward pass in a `scan`,
    float32, jax 0.10.2: ms on two shared AVX-512 cores, median of 9 in turn, PyTorch 2.13 in
    channels_last; behind a slash, on slower ones (AMD EPYC of family 25, model 17), CPU ms of both,
    the least of 9; * marks what the table takes:

        layer (kernel, images)             direct   patches    taps      tiled  transformed PyTorch
        5x5       3 ->  64, 32 x 28 x 28  5.8/7.3  5.2/11.6*      -          -        -         3.7
        5x5      64 ->  64, 32 x 14 x 14  27/41      35/87        -    16.5/24   9.3/15.4*     10.9
        5x5      64 -> 128, 32 x  7 x  7  11/22     9.8/28        -     5.5/9.5   4.9/7.0*      6.1
        7x7 / 2   3 ->  64, 16 x 64 x 64  5.5/8.8*  4.7/16.7      -          -        -         3.8
        3x3      64 ->  64, 16 x 16 x 16  7.8/10.2  6.7/16.1    /18.3   4.6/6.9*  6.1/10.2      4.8
        3x3     256 -> 256, 16 x  4 x  4  6.4/11.6  3.5/11.9    /9.3*   5.4/8.8   6.5/11.2      5.0
        3x3     512 -> 512, 16 x  2 x  2  288/      5.3/16.4   /11.8*  21.6/49.9     /28.5     11.0
        3x3     512 -> 512, 64 x  2 x  2  1098/    14.7/46.4   /23.6*  46.1/105                25.2
        3x3 / 2 256 -> 512, 16 x  4 x  4  68.5/     2.2/8.3     /8.0*        -        -         6.1
        3x3 / 2  16 ->  32, 4 x 160 x 160     /13.6*   /29.3    /36.3        -        -        /11.4
        3x3      16 ->  16, 4 x  80 x  80      /8.4*   /17.2    /23.7        -        -         /4.5
        3x3      32 ->  32, 4 x  40 x  40      /4.1*    /9.0     /9.7     /6.6        -         /4.5
        6x6 / 2   3 ->  16, 4 x 320 x 320     /50.7; "folded" /22.4*                            /9.0

    Of a few channels `fast_fourier` is faster than all of these, see there.

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
    # Half precision has no arithmetic of its own here: products and sums are in float32.
    dtype = promote(lhs.dtype, jnp.float32)
    algorithm = chosen(shapes_of(lhs.shape, rhs.shape, strides, sides, dtype))
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
