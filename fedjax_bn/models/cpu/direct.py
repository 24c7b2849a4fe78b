"""XLA's own convolution in the order NHWC, with gradients that XLA:CPU computes fast."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

NHWC = ("NHWC", "HWIO", "NHWC")
Pair = tuple[int, int]
Strides = Pair
Padding = tuple[Pair, Pair]
_FEW = 16  # output channels up to which a kernel's gradient is faster with x padded beforehand


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def direct_convolution(
    x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding
) -> jax.Array:
    """Convolves by XLA, with gradients that are convolutions in the usual dimension order.

    Autodiff's gradients have another order, in which XLA:CPU is up to 15 times slower in a loop.

    x f[B, H, W, C] and kernel f[r, s, C, F], with strides (down, across) and padding ((top,
    bottom), (left, right)), give f[B, (H + top + bottom - r) // down + 1, likewise W, F].
    """
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
direct_convolution.defvjp(
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
    sides = []
    for n, size, k, stride, (low, _) in zip(
        g.shape[1:3], x.shape[1:3], taps, strides, padding, strict=True
    ):
        sides.append((low, k + (n - 1) * stride - size - low))
    # The barriers keep XLA from folding the transposes, as above.
    x = lax.optimization_barrier(x.transpose(3, 1, 2, 0))
    g = lax.optimization_barrier(g.transpose(1, 2, 0, 3))
    y = lax.conv_general_dilated(x, g, (1, 1), sides, rhs_dilation=strides, dimension_numbers=NHWC)
    return y.transpose(1, 2, 0, 3)
