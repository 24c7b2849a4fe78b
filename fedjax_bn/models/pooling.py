"""Max-pooling that is fast on CPU, in a training step and inside loops.

XLA:CPU spends a third of a ResNet's step on `reduce_window` and its gradient. Here the forward pass
compares shifted copies of the map and remembers which won; the backward pass is a few selects.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

Pair = tuple[int, int]
Padding = tuple[Pair, Pair]


def max_pool(
    x: jax.Array,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[Sequence[int]] = ((0, 0), (0, 0)),
) -> jax.Array:
    """Maximum over windows; the padding never wins, and what does not fill a window is dropped.

    The gradient of a window goes whole to one element, the first of its largest in reading order,
    as in PyTorch. Differentiable twice in reverse mode, and forward over reverse.

    Args:
      x: f[B, H, W, C].
      window: (height, width) of a window.
      strides: (down, across).
      padding: ((top, bottom), (left, right)), each smaller than the window.

    Returns:
      f[B, (H + top + bottom - height) // down + 1, likewise W, C].
    """
    sides = tuple((low, high) for low, high in padding)
    return _max_pool(x, tuple(window), tuple(strides), sides)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _max_pool(x: jax.Array, window: Pair, strides: Pair, padding: Padding) -> jax.Array:
    return _largest(x, window, strides, padding)[0]


def _largest(
    x: jax.Array, window: Pair, strides: Pair, padding: Padding
) -> tuple[jax.Array, jax.Array]:
    """The maximum of each window and its place in it, row by row: f and u8 or i32[B, H', W', C]."""
    if any(map(any, padding)):
        x = jnp.pad(x, ((0, 0), *padding, (0, 0)), constant_values=-jnp.inf)
    high, wide = ((n - t) // d + 1 for n, t, d in zip(x.shape[1:3], window, strides, strict=True))
    place = None
    for k in range(window[0] * window[1]):
        i, j = divmod(k, window[1])
        rows = x[:, i : i + (high - 1) * strides[0] + 1 : strides[0]]
        value = rows[:, :, j : j + (wide - 1) * strides[1] + 1 : strides[1]]
        if place is None:
            best, place = value, jnp.zeros(value.shape, _place_dtype(window))
        else:
            wins = ~(value <= best)  # also where it is NaN, which so reaches the result
            best = jnp.where(wins, value, best)
            place = jnp.where(wins, jnp.asarray(k, place.dtype), place)
    return best, place


def _place_dtype(window: Pair) -> jnp.dtype:
    return jnp.dtype(jnp.uint8 if window[0] * window[1] <= 256 else jnp.int32)


def _max_pool_forward(
    x: jax.Array, window: Pair, strides: Pair, padding: Padding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y, place = _largest(x, window, strides, padding)
    return y, (place, x[:, :, :, :0])  # an empty array carries the size of x


def _max_pool_backward(
    window: Pair, strides: Pair, padding: Padding, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array]:
    """Gathers: an element at (s a + p) is in the windows a, a - 1, ... at places p, p + s, ..."""
    place, like = saved
    batch, high, wide, channels = g.shape
    more = tuple(-(-t // d) - 1 for t, d in zip(window, strides, strict=True))
    phases = [
        _phase(place, g, (p, q), window, strides, more)
        for p in range(strides[0])
        for q in range(strides[1])
    ]
    rows, columns = high + more[0], wide + more[1]
    dx = jnp.stack(phases).reshape(*strides, batch, rows, columns, channels)
    dx = dx.transpose(2, 3, 0, 4, 1, 5).reshape(batch, rows * strides[0], columns * strides[1], -1)
    ends = [
        (0, low + size - n)
        for n, size, (low, _) in zip(dx.shape[1:3], like.shape[1:3], padding, strict=True)
    ]
    dx = jax.lax.pad(dx, jnp.zeros((), dx.dtype), [(0, 0, 0), *((0, e, 0) for _, e in ends), (0, 0, 0)])
    return (dx[:, padding[0][0] :, padding[1][0] :],)


def _phase(
    place: jax.Array, g: jax.Array, phase: Pair, window: Pair, strides: Pair, more: Pair
) -> jax.Array:
    """Gradient at the elements (strides * index + phase), f[B, H' + more, W' + more, C]."""
    total = None
    for i in range(phase[0], window[0], strides[0]):
        for j in range(phase[1], window[1], strides[1]):
            part = jnp.where(place == i * window[1] + j, g, jnp.zeros((), g.dtype))
            down, across = i // strides[0], j // strides[1]
            shift = ((0, 0), (down, more[0] - down), (across, more[1] - across), (0, 0))
            part = jnp.pad(part, shift)
            total = part if total is None else total + part
    if total is None:  # strides larger than the window leave gaps
        rows, columns = g.shape[1] + more[0], g.shape[2] + more[1]
        return jnp.zeros((g.shape[0], rows, columns, g.shape[3]), g.dtype)
    return total


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)
