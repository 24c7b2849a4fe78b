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

from fedjax_bn.models.cpu.chunks import in_chunks
from fedjax_bn.models.cpu.direct import Padding

# Evaluation points, besides infinity, in the order of use. Small fractions whose differences are
# far from 0 keep rounding small: with all seven a float32 result is within 1e-5 of the largest.
_POINTS = tuple(Fraction(p) for p in ("0", "1", "-1", "1/2", "-2", "2", "-1/2"))
CHUNK = 32  # images at a time: more no longer fit in the caches


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
    points = _POINTS[: outputs + taps - 2]

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
    axes = [
        _axis(size, taps, sides, tile)
        for size, taps, sides in zip(x.shape[1:3], kernel.shape[:2], padding, strict=True)
    ]
    filters = _transform_kernel(kernel, tile)
    return in_chunks(lambda images: _convolve(images, filters, axes), x, CHUNK)


def _convolve(x: jax.Array, filters: jax.Array, axes: list[tuple[np.ndarray, ...]]) -> jax.Array:
    """x f[B, H, W, C], filters f[n * n, C, F] -> f[B, H', W', F]."""
    (down_in, down_out), (across_in, across_out) = axes
    values = _to_points(x, down_in, across_in)
    *points, tiles_down, tiles_across, batch, channels = values.shape
    products = batched_product(values.reshape(len(filters), -1, channels), filters)
    products = products.reshape(*points, tiles_down, tiles_across, batch, -1)
    return _from_points(products, down_out, across_out)


def _axis(
    size: int, taps: int, padding: tuple[int, int], tile: int
) -> tuple[np.ndarray, np.ndarray]:
    """B and A of every tile along one axis, f64[n, tiles, size] and f64[n, tiles, outputs].

    Tiles overlap, the padding is zero and the last tile may stick out; as matrices of the whole
    axis the transforms take care of all three, and nothing is padded, gathered or cut.
    """
    a, _, b = transforms(tile, taps)
    outputs = size + sum(padding) - taps + 1
    tiles = -(-outputs // tile)
    spread = np.zeros((len(b), tiles, sum(padding) + size + tile))
    collect = np.zeros((len(b), tiles, tiles * tile))
    for t in range(tiles):
        start = t * tile
        spread[:, t, start : start + len(b)] = b
        collect[:, t, start : start + tile] = a.T
    return spread[:, :, padding[0] : padding[0] + size], collect[:, :, :outputs]


def _to_points(x: jax.Array, down: np.ndarray, across: np.ndarray) -> jax.Array:
    """B^T x B of every tile: f[B, H, W, C] -> f[points across, points down, tiles, tiles, B, C]."""
    batch, height, width, channels = x.shape
    n, tiles = across.shape[:2]
    x = constant_product(across.reshape(n * tiles, width), x.reshape(-1, width, channels))
    x = x.reshape(batch, height, n, tiles, channels).transpose(2, 1, 3, 0, 4)
    x = constant_product(down.reshape(-1, height), x.reshape(n, height, -1))
    return x.reshape(n, *down.shape[:2], tiles, batch, channels)


def _from_points(y: jax.Array, down: np.ndarray, across: np.ndarray) -> jax.Array:
    """A^T y A of every tile, the way back of `_to_points`, f[B, H', W', F]."""
    n, m, tiles_down, tiles_across, batch, features = y.shape
    high, wide = down.shape[2], across.shape[2]
    y = constant_product(down.reshape(-1, high).T, y.reshape(n, m * tiles_down, -1))
    y = y.reshape(n, high, tiles_across, batch, features).transpose(3, 1, 0, 2, 4)
    y = y.reshape(batch * high, n * tiles_across, features)
    y = constant_product(across.reshape(-1, wide).T, y)
    return y.reshape(batch, high, wide, features)


def _transform_kernel(kernel: jax.Array, tile: int) -> jax.Array:
    """G w G^T: f[r, s, C, F] -> f[points across * points down, C, F]."""
    r, s, *features = kernel.shape
    both = np.kron(transforms(tile, s)[1], transforms(tile, r)[1])
    kernel = kernel.swapaxes(0, 1).reshape(1, s * r, -1)
    return constant_product(both, kernel).reshape(-1, *features)


def constant_product(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """A constant f64[a, b] times x f[d, b, c] -> f[d, a, c] in the dtype of x."""
    return _product(jnp.asarray(matrix, x.dtype), x)


def _plain_product(matrix: jax.Array, x: jax.Array) -> jax.Array:
    if len(x) == 1:
        return (matrix @ x[0])[None]
    return jnp.matmul(jnp.broadcast_to(matrix, (len(x), *matrix.shape)), x)


# Its own gradient, because the one that autodiff makes is a product of transposed matrices, which
# XLA:CPU transposes in memory or hands to a slower library. The rules use the plain product, so
# that they can be differentiated forward too.
_product = jax.custom_vjp(_plain_product)
_product.defvjp(
    lambda matrix, x: (_plain_product(matrix, x), matrix),
    lambda matrix, g: (None, _plain_product(matrix.T, g)),
)


def batched_product(values: jax.Array, filters: jax.Array) -> jax.Array:
    """f[d, N, C] times f[d, C, F] -> f[d, N, F]."""
    return lax.dot_general(values, filters, (((2,), (1,)), ((0,), (0,))))
