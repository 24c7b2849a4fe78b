"""Max-pooling that is fast on CPU, in a training step and inside loops; see `models.cpu`.

XLA:CPU spends a third of a ResNet's step on `reduce_window` and its gradient. Here the forward pass
compares shifted copies of the map and saves the place of each maximum; the backward pass is a few
selects.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.models.max_pool import Padding, Pair, elements, max_and_place


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def shifted_max_pool(x: jax.Array, window: Pair, strides: Pair, padding: Padding) -> jax.Array:
    """Returns the maximum over windows; arguments and result as in `models.cpu.max_pool`."""
    return reduce(jnp.maximum, elements(x, window, strides, padding))


def _max_pool_forward(
    x: jax.Array, window: Pair, strides: Pair, padding: Padding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    best, place = max_and_place(x, window, strides, padding, jnp.int32)
    return best, (place, x[:, :, :, :0])  # an empty array passes on the height and width of x


def _max_pool_backward(
    window: Pair, strides: Pair, padding: Padding, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array]:
    """Returns dL/dx; element stride * a + p is at p in window a, at p + stride in a - 1, ..."""
    place, like = saved
    reach = tuple(-(-t // d) - 1 for t, d in zip(window, strides, strict=True))
    rows, columns = g.shape[1] + reach[0], g.shape[2] + reach[1]
    around = ((0, 0), (reach[0],) * 2, (reach[1],) * 2, (0, 0))
    g, place = jnp.pad(g, around), jnp.pad(place, around)
    total = None
    for i in range(reach[0] + 1):
        for j in range(reach[1] + 1):
            at = (reach[0] - i, reach[1] - j)
            rectangle = slice(None), slice(at[0], at[0] + rows), slice(at[1], at[1] + columns)
            windows_place = _places(window, strides, (i, j))[:, None, :, None]
            part = g[rectangle][:, :, None, :, None]
            part = jnp.where(place[rectangle][:, :, None, :, None] == windows_place, part, 0)
            total = part if total is None else total + part
    dx = total.reshape(len(g), rows * strides[0], columns * strides[1], -1)
    # The padding is cut off, and rows and columns of x outside all windows get zeros.
    top, left_padding, (height, width) = padding[0][0], padding[1][0], like.shape[1:3]
    ends = max(0, top + height - dx.shape[1]), max(0, left_padding + width - dx.shape[2])
    dx = jnp.pad(dx, ((0, 0), (0, ends[0]), (0, ends[1]), (0, 0)))
    return (dx[:, top : top + height, left_padding : left_padding + width],)


def _places(window: Pair, strides: Pair, windows_back: Pair) -> np.ndarray:
    """Places i32[down, across] of neighbouring pixels in the window `windows_back`; -1 outside."""
    i, j = (d * back + np.arange(d) for d, back in zip(strides, windows_back, strict=True))
    inside = (i < window[0])[:, None] & (j < window[1])
    return np.where(inside, i[:, None] * window[1] + j, -1).astype(np.int32)


shifted_max_pool.defvjp(_max_pool_forward, _max_pool_backward)
