"""Convolution with few multiplications: Cook-Toom minimal filtering as plain matrix products.

One dimension, m outputs of an r-tap filter at a time (Winograd 1980; Lavin & Gray 2016): both are
polynomials' coefficients, a product of polynomials is a pointwise product of their values at
n = m + r - 1 points, and a correlation is its transpose:

    y = A^T [(G w) * (B^T x)],   x f[n], w f[r], y f[m]

so n multiplications do the work of m r; in two dimensions n^2 that of m^2 r^2, and summing over
channels turns them into n^2 matrix products. Every step, transforms included, is a product of two
row-major matrices, the one operation that XLA:CPU does at full speed everywhere, also inside
`scan` and `map`; and so is every step of its gradients of any order.
"""

from fractions import Fraction
from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Evaluation points, besides infinity, in the order of use. Small fractions whose differences are
# far from 0 keep rounding small: with all seven a float32 result is within 1e-5 of the largest.
POINTS = tuple(Fraction(p) for p in ("0", "1", "-1", "1/2", "-2", "2", "-1/2"))
Padding = tuple[tuple[int, int], tuple[int, int]]


@cache
def transforms(outputs: int, taps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrices A f64[m, n], G f64[n, r] and B f64[n, n], n = m + r - 1, of `F(m, r)`.

    With Vandermonde matrices V_k[i, j] = point_i ** j (infinity: 1 in the last column), A^T = V_m^T
    and G = V_r evaluate, and B^T = V_n^-T holds the coefficients of Lagrange's polynomials. Exact
    in fractions before the conversion.

    Args:
      outputs: m, outputs a tile; m + r - 2 is at most 7.
      taps: r, length of the filter.
    """
    points = POINTS[: outputs + taps - 2]

    def vandermonde(columns: int) -> list[list[Fraction]]:
        infinity = [Fraction(j == columns - 1) for j in range(columns)]
        return [[p**j for j in range(columns)] for p in points] + [infinity]

    lagrange = [
        [c / prod(p - q for q in points if q != p) for c in _polynomial(points, skip=p)] + [0]
        for p in points
    ]
    matrices = (vandermonde(outputs), vandermonde(taps), [*lagrange, _polynomial(points)])
    a, g, b = (np.array(matrix, dtype=np.float64) for matrix in matrices)
    return a.T, g, b


def _polynomial(roots: tuple[Fraction, ...], skip: Fraction | None = None) -> list[Fraction]:
    """Coefficients, lowest first, of the product of (x - root) over all roots but `skip`."""
    coefficients = [Fraction(1)]
    for root in roots:
        if root != skip:
            times_x, times_root = [Fraction(0), *coefficients], [*coefficients, Fraction(0)]
            coefficients = [a - root * b for a, b in zip(times_x, times_root, strict=True)]
    return coefficients


def winograd_convolution(
    x: jax.Array, kernel: jax.Array, padding: Padding, tile: int = 4
) -> jax.Array:
    """Convolution with stride 1, `tile` x `tile` outputs at a time.

    Args:
      x: f[B, H, W, C].
      kernel: f[r, s, C, F]; `tile` + max(r, s) is at most 9.
      padding: zeros ((top, bottom), (left, right)), not negative.
      tile: outputs of a tile in each direction, m above.

    Returns:
      f[B, H + top + bottom - r + 1, W + left + right - s + 1, F].
    """
    batch, *_, channels = x.shape
    (n, tiles_high, high), (p, tiles_wide, wide) = (
        _tiles(size, taps, sum(sides), tile)
        for size, taps, sides in zip(x.shape[1:3], kernel.shape[:2], padding, strict=True)
    )
    values = _transform_images(x, kernel.shape[:2], padding, tile, (tiles_high, tiles_wide))
    filters = _transform_kernel(kernel, tile)
    products = _batched_product(values.reshape(n * p, -1, channels), filters)
    inverse = np.kron(transforms(tile, kernel.shape[0])[0], transforms(tile, kernel.shape[1])[0])
    y = _apply(inverse, products.reshape(n * p, -1))
    y = y.reshape(tile, tile, tiles_wide, tiles_high, batch, -1).transpose(4, 3, 0, 2, 1, 5)
    return y.reshape(batch, tiles_high * tile, tiles_wide * tile, -1)[:, :high, :wide]


def _tiles(size: int, taps: int, padding: int, tile: int) -> tuple[int, int, int]:
    """Points, tiles and outputs along one axis."""
    outputs = size + padding - taps + 1
    return tile + taps - 1, -(-outputs // tile), outputs


def _transform_images(
    x: jax.Array, taps: tuple[int, int], padding: Padding, tile: int, tiles: tuple[int, int]
) -> jax.Array:
    """B^T x B of every tile: f[B, H, W, C] -> f[n, n, tiles_wide * tiles_high * B * C].

    The tiles overlap and the padding is zero, so the transform of a whole axis is one banded
    matrix: nothing is padded, cut out or gathered.
    """
    batch, height, width, channels = x.shape
    down = _banded(height, taps[0], padding[0][0], tile, tiles[0])
    across = _banded(width, taps[1], padding[1][0], tile, tiles[1])
    n = tile + taps[0] - 1
    x = x.transpose(1, 2, 0, 3).reshape(height, -1)
    x = _apply(down, x).reshape(n, tiles[0], width, batch * channels)
    x = x.swapaxes(1, 2).reshape(n, width, -1)
    return _apply(across, x)


def _banded(size: int, taps: int, before: int, tile: int, tiles: int) -> np.ndarray:
    """B^T at every tile of one axis, f64[n * tiles, size]; columns in the padding are left out."""
    b = transforms(tile, taps)[2]
    n = len(b)
    matrix = np.zeros((n, tiles, before + size + tile * tiles + n))
    for t in range(tiles):
        matrix[:, t, t * tile : t * tile + n] = b
    return matrix[:, :, before : before + size].reshape(n * tiles, size)


def _transform_kernel(kernel: jax.Array, tile: int) -> jax.Array:
    """G w G^T: f[r, s, C, F] -> f[n * n, C, F]."""
    r, s, *features = kernel.shape
    both = np.kron(transforms(tile, r)[1], transforms(tile, s)[1])
    return _apply(both, kernel.reshape(r * s, -1)).reshape(-1, *features)


def _apply(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """matrix f64[a, b] times x f[..., b, c] -> f[..., a, c] in the dtype of x."""
    return _left_product(jnp.asarray(matrix, x.dtype), x)


@jax.custom_vjp
def _left_product(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """A constant f[a, b] times x f[b, c] or f[d, b, c].

    Its own gradient, because the one autodiff makes is a product of transposed matrices, which
    XLA:CPU transposes in memory or hands to a slower library.
    """
    if x.ndim == 2:
        return matrix @ x
    return jnp.matmul(jnp.broadcast_to(matrix, (len(x), *matrix.shape)), x)


def _left_product_forward(matrix: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _left_product(matrix, x), matrix


def _left_product_backward(matrix: jax.Array, g: jax.Array) -> tuple[None, jax.Array]:
    return None, _left_product(matrix.T, g)


_left_product.defvjp(_left_product_forward, _left_product_backward)


def _batched_product(values: jax.Array, filters: jax.Array) -> jax.Array:
    """f[d, N, C] times f[d, C, F] -> f[d, N, F]."""
    return lax.dot_general(values, filters, (((2,), (1,)), ((0,), (0,))))
