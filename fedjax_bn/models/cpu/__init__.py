"""Kernels for CPU, reached through this module alone; any other backend gets plain XLA.

XLA:CPU is slow at convolutions and windows inside loops and at maps that leave the caches. The
functions here ask `fedjax_bn.engine.backend.on_cpu` while a program is traced:

    function     on CPU                                                     elsewhere
    convolve     matrix products, tiles or transforms (`convolution`)       lax.conv_general_dilated
    max_pool     comparisons of shifted maps (`pooling`)                    lax.reduce_window
    in_cache     a batch in chunks (`chunks`)                               the batch at once

Batch norm has kernels of its own in `fedjax_bn.normalization.per_sample` and `few_channels`, and
the step of `fedjax_bn.client` avoids a copy; each asks the same question in one line.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import flax.linen as nn
import jax
from jax import lax

from fedjax_bn.engine.backend import on_cpu
from fedjax_bn.models.cpu import convolution, pooling
from fedjax_bn.models.cpu.chunks import in_chunks

CHUNK_VALUES = 2**18  # values of images at a time: 21 of 64 x 64 x 3
MIN_CHUNK = 8  # images; fewer do not fill the matrix products


def convolve(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> jax.Array:
    """`lax.conv_general_dilated`, in the order NHWC by default, as `nn.Conv` takes it.

    Args:
      lhs, rhs, window_strides, padding, **options: as of `convolution.convolution`.
    """
    if on_cpu():
        return convolution.convolution(lhs, rhs, window_strides, padding, **options)
    options = {"dimension_numbers": convolution.NHWC} | options
    return lax.conv_general_dilated(lhs, rhs, window_strides, padding, **options)


def max_pool(
    x: jax.Array,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
) -> jax.Array:
    """Maximum over windows of f[B, H, W, C]; the padding never wins; see `pooling.max_pool`."""
    if on_cpu():
        return pooling.max_pool(x, window, strides, padding)
    return nn.max_pool(x, tuple(window), tuple(strides), tuple(padding))


def in_cache(function: Callable[[jax.Array], Any], images: jax.Array) -> Any:
    """`function(images)`, on CPU in chunks whose maps stay in the caches, elsewhere at once.

    For inference: ResNet-18 takes 0.7 to 0.9 of the time for 64 images of 64 x 64 pixels.

    Args:
      function: a network, f[b, H, W, C] -> arrays [b, ...], each sample by itself.
      images: f[B, ...]. Samples that are not maps pass at once, because their networks read more
        weights than data.
    """
    if images.ndim != 4 or not on_cpu():
        return function(images)
    size = max(CHUNK_VALUES // max(prod(images.shape[1:]), 1), MIN_CHUNK)
    return in_chunks(function, images, size)
