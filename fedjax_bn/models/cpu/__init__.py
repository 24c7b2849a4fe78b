"""Kernels for CPU behind one seam: on any other backend every function here is plain XLA.

XLA:CPU is slow at convolutions and windows inside loops and at maps that leave the caches. What
goes around that lies in this folder and is reached through these functions only, which ask
`fedjax_bn.engine.backend.on_cpu` while a program is traced:

    function     on CPU                                                     elsewhere
    convolve     matrix products, tiles or transforms (`convolution`)       lax.conv_general_dilated
    max_pool     comparisons of shifted maps (`pooling`)                    lax.reduce_window
    in_cache     a batch in chunks (`chunks`)                               the batch at once

Three more places ask the same question, each in a line of its own: normalization by each sample's
statistics in `fedjax_bn.normalization.per_sample`, batch norm in
`fedjax_bn.normalization.few_channels`, and the step of `fedjax_bn.client`, which avoids a copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax import lax

from fedjax_bn.engine.backend import on_cpu
from fedjax_bn.models.cpu import chunks, convolution, pooling
from fedjax_bn.models.cpu.choice import forward_only


def convolve(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> jax.Array:
    """`lax.conv_general_dilated`, in the order NHWC by default, as `nn.Conv` takes it.

    On CPU a usual convolution is computed by the algorithm that suits its shapes; the arguments are
    those of `convolution.convolution`.
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

    For inference: convolutions are chosen for programs whose gradients nobody takes.

    Args:
      function: a network, f[b, H, W, C] -> arrays [b, ...], each sample by itself.
      images: f[B, ...].
    """
    if not on_cpu():
        return function(images)
    with forward_only():
        return chunks.in_cache(function, images)
