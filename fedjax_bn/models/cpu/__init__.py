"""Kernels for CPU, called only through this module; other backends get plain XLA, almost always.

XLA:CPU is slow at convolutions and windows inside loops, and at maps that do not fit in the caches.
The functions here check `fedjax_bn.engine.backend.on_cpu` while a program is traced:

    function     on CPU                                                     elsewhere
    convolve     matrix products, tiles or transforms (`convolution`)       lax.conv_general_dilated
    max_pool     comparisons of shifted maps (`pooling`)                    lax.reduce_window
    in_cache     a batch in chunks                                          the batch at once

On GPU a maximum also has a gradient of its own (`models.max_pool`).
Batch norm has kernels in `normalization.arithmetic`, and the step of `fedjax_bn.client` avoids a
copy; both check `on_cpu` too.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_bn.engine.backend import on_cpu, on_gpu
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.models.cpu import convolution, pooling
from fedjax_bn.models.cpu.bilinear import in_chunks
from fedjax_bn.models.max_pool import max_pool_with_places

_CHUNK_VALUES = 2**18  # values in a chunk of images: 21 images of 64 x 64 x 3
_MIN_CHUNK = 8  # images in a chunk at least; fewer make the matrix products too small


def convolve(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    *,
    few: bool = False,
    **options: Any,
) -> jax.Array:
    """Convolves like `jax.lax.conv_general_dilated`, with the same arguments and results.

    On CPU the algorithm depends on the shapes, for two-dimensional floating-point convolutions of
    images f[B, H, W, C] by a kernel f[r, s, C, F] without dilation or groups. All others are left
    to XLA. `dimension_numbers` are NHWC by default, `precision` has no effect on CPU, and `few` is
    as in `convolution.algorithm_of`.
    """
    options = {"dimension_numbers": convolution.NHWC} | options
    dilations = (options.get(f"{side}_dilation") or () for side in ("lhs", "rhs"))
    groups = (options.get(f"{kind}_group_count", 1) for kind in ("feature", "batch"))
    made_for_cpu = (
        on_cpu()
        and lhs.ndim == 4
        and lhs.dtype == rhs.dtype
        and jnp.issubdtype(lhs.dtype, jnp.floating)
        and lax.conv_dimension_numbers(lhs.shape, rhs.shape, options["dimension_numbers"])
        == lax.conv_dimension_numbers(lhs.shape, rhs.shape, convolution.NHWC)
        and {1, *chain(*dilations), *groups} == {1}
        and options.get("preferred_element_type") in (None, lhs.dtype)
    )
    if not made_for_cpu:
        return lax.conv_general_dilated(lhs, rhs, window_strides, padding, **options)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(lhs.shape[1:3], rhs.shape[:2], window_strides, padding)
    (down, across), (rows, columns) = window_strides, padding
    sides = (rows[0], rows[1]), (columns[0], columns[1])
    shapes = convolution.Shapes(lhs.shape, rhs.shape, (down, across), sides)
    algorithm = convolution.ALGORITHMS[convolution.algorithm_of(shapes, few)]
    # Half precision is computed in float32, because CPUs have no arithmetic for it.
    dtype = promote(lhs.dtype, jnp.float32)
    y = algorithm(lhs.astype(dtype), rhs.astype(dtype), shapes.strides, sides)
    return y.astype(lhs.dtype)


def max_pool(
    x: jax.Array,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
) -> jax.Array:
    """Returns the maximum over windows; padding is -infinity, and incomplete windows are dropped.

    The whole gradient of a window goes to one element. On CPU and GPU this is the first maximum in
    reading order, as in PyTorch, and the gradient can be differentiated again in both modes.

    x f[B, H, W, C], windows of (height, width), strides (down, across) and padding ((top, bottom),
    (left, right)) give f[B, (H + top + bottom - height) // down + 1, likewise W, C].
    """
    sides = tuple((low, high) for low, high in padding)
    pool = nn.max_pool
    if on_cpu():
        pool = pooling.shifted_max_pool
    elif on_gpu():
        pool = max_pool_with_places
    return pool(x, tuple(window), tuple(strides), sides)


def in_cache(function: Callable[[jax.Array], Any], images: jax.Array) -> Any:
    """Returns `function(images)`, computed on CPU in chunks whose maps fit in the caches.

    This is for inference: with 64 images of 64 x 64 pixels, ResNet-18 takes 0.7 to 0.9 of the time.
    `function` is a network, f[b, ...] -> arrays [b, ...], in which samples are independent.
    """
    # Networks of other samples than maps read more weights than data.
    if images.ndim != 4 or not on_cpu():
        return function(images)
    size = max(_CHUNK_VALUES // max(prod(images.shape[1:]), 1), _MIN_CHUNK)
    return in_chunks(function, images, size)
