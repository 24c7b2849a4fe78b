"""Convolutions with few multiplications, as plain matrix products: minimal filtering and Fourier.

Both are bilinear algorithms. In one dimension, with inputs x, a filter w and outputs y:

    y = A^T [(G w) * (B^T x)]

In two dimensions the matrices act on rows and on columns, and a sum over channels turns the
pointwise products into matrix products. Every step, including the transforms and all gradients, is
a product of two row-major matrices. XLA:CPU runs this operation at full speed everywhere, even
inside `scan` and `map`.

*Minimal filtering* (Winograd 1980; Lavin & Gray 2016) computes m outputs of an r-tap filter at a
time. A product of polynomials is a pointwise product of their values at n = m + r - 1 points, and a
correlation is its transpose. So n multiplications replace m r, and in two dimensions n^2 replace
m^2 r^2.

*Fourier's transform* suits large kernels on small maps. A cyclic convolution of length N is a
pointwise product of Fourier coefficients. Two dimensions need P N complex products, with
P = N // 2 + 1 rows of coefficients; the other rows are conjugates. Each complex product takes three
real ones (Gauss): with coefficients X of the images and K of the kernel,

    a = (Kr + Ki) Xi,   b = (Ki - Kr) Xr,   c = Kr (Xr + Xi),   K X = (c - a) + (c + b) i

and the transforms include the sums. A 5x5 kernel on 14x14 takes 432 products, instead of 1024 by
minimal filtering and 4900 by the definition.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Pair = tuple[int, int]
Strides = Pair
Padding = tuple[Pair, Pair]
TILE = 4  # m, the side of a tile of outputs; 6 would save little more and lose half a digit
# The finite evaluation points, in the order of use; infinity is always the last point. Small
# fractions with differences far from 0 keep rounding errors small: with all seven points the error
# of a float32 result is within 1e-5 of the largest output.
_POINTS = tuple(Fraction(p) for p in ("0", "1", "-1", "1/2", "-2", "2", "-1/2"))
_TILED_IMAGES, _TRANSFORMED_IMAGES = 32, 64  # in a chunk; more would not fit in the caches


def _tiled(x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding) -> jax.Array:
    """Convolves with strides of 1 and at most 5 taps a side."""
    del strides
    axes = map(_tiles, x.shape[1:3], kernel.shape[:2], padding)
    (down_in, down_out), (across_in, across_out) = axes
    r, s, channels, features = kernel.shape
    transform = np.kron(_winograd_transforms(TILE, s)[1], _winograd_transforms(TILE, r)[1])
    filters = _constant_product(transform, kernel.swapaxes(0, 1).reshape(1, s * r, -1))
    filters = filters.reshape(-1, channels, features)

    def convolve(images: jax.Array) -> jax.Array:
        values = _to_points(images, down_in, across_in)
        products = _batched_product(values.reshape(len(filters), -1, channels), filters)
        return _from_points(products.reshape(*values.shape[:-1], -1), down_out, across_out)

    return in_chunks(convolve, x, _TILED_IMAGES)


@cache
def _winograd_transforms(outputs: int, taps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrices A f64[m, n], G f64[n, r] and B f64[n, n], n = m + r - 1, of `F(m, r)`."""
    # With Vandermonde matrices V_k[i, j] = point_i ** j (infinity: 1 in the last column), A^T =
    # V_m^T and G = V_r evaluate polynomials, and B^T = V_n^-T contains the coefficients of
    # Lagrange's polynomials. All are computed in fractions, without rounding; m + r - 2 is at most
    # 7.
    points = _POINTS[: outputs + taps - 2]

    def vandermonde(columns: int) -> list[list[Fraction]]:
        infinity = [Fraction(j == columns - 1) for j in range(columns)]
        return [[p**j for j in range(columns)] for p in points] + [infinity]

    def polynomial(skip: Fraction | None = None) -> list[Fraction]:
        """Coefficients of the product of (x - point) over all points but `skip`, lowest first."""
        coefficients = [Fraction(1)]
        for root in points:
            if root != skip:
                times_x, times_root = [Fraction(0), *coefficients], [*coefficients, Fraction(0)]
                coefficients = [a - root * b for a, b in zip(times_x, times_root, strict=True)]
        return coefficients

    lagrange = [
        [c / prod(p - q for q in points if q != p) for c in polynomial(skip=p)] + [0]
        for p in points
    ]
    matrices = (vandermonde(outputs), vandermonde(taps), [*lagrange, polynomial()])
    a, g, b = (np.array(matrix, dtype=np.float64) for matrix in matrices)
    return a.T, g, b


def _tiles(size: int, taps: int, padding: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """B and A for all tiles along an axis, f64[n, tiles, size] and f64[n, tiles, outputs]."""
    # Tiles overlap, the padding is zero, and the last tile may be incomplete. Matrices over the
    # whole axis handle all three, so that nothing is padded, gathered or cut at run time.
    a, _, b = _winograd_transforms(TILE, taps)
    outputs = size + sum(padding) - taps + 1
    tiles = -(-outputs // TILE)
    spread = np.zeros((len(b), tiles, sum(padding) + size + TILE))
    collect = np.zeros((len(b), tiles, tiles * TILE))
    for t in range(tiles):
        start = t * TILE
        spread[:, t, start : start + len(b)] = b
        collect[:, t, start : start + TILE] = a.T
    return spread[:, :, padding[0] : padding[0] + size], collect[:, :, :outputs]


def _to_points(x: jax.Array, down: np.ndarray, across: np.ndarray) -> jax.Array:
    """B^T x B of every tile: f[B, H, W, C] -> f[points across, points down, tiles, tiles, B, C]."""
    batch, height, width, channels = x.shape
    n, tiles = across.shape[:2]
    x = _constant_product(across.reshape(n * tiles, width), x.reshape(-1, width, channels))
    # Batch and channels are moved to the end, so that the second product has few, long rows.
    x = x.reshape(batch, height, n, tiles, channels).transpose(2, 1, 3, 0, 4)
    x = _constant_product(down.reshape(-1, height), x.reshape(n, height, -1))
    return x.reshape(n, *down.shape[:2], tiles, batch, channels)


def _from_points(y: jax.Array, down: np.ndarray, across: np.ndarray) -> jax.Array:
    """A^T y A of every tile: the outputs f[B, H', W', F] from their values at the points."""
    n, m, tiles_down, tiles_across, batch, features = y.shape
    high, wide = down.shape[2], across.shape[2]
    y = _constant_product(down.reshape(-1, high).T, y.reshape(n, m * tiles_down, -1))
    y = y.reshape(n, high, tiles_across, batch, features).transpose(3, 1, 0, 2, 4)
    y = y.reshape(batch * high, n * tiles_across, features)
    y = _constant_product(across.reshape(-1, wide).T, y)
    return y.reshape(batch, high, wide, features)


def _transformed(x: jax.Array, kernel: jax.Array, strides: Strides, padding: Padding) -> jax.Array:
    """Convolves with strides of 1, with rounding errors as small as XLA's."""
    del strides
    waves = _waves(x.shape[1:3], kernel.shape[:2], padding)
    r, s, channels, features = kernel.shape
    filters = _constant_product(waves.kernel, kernel.reshape(1, r * s, -1))
    filters = filters.reshape(-1, channels, features)
    rows, wide = len(waves.down) // 2, len(waves.back_across) // 2

    def convolve(images: jax.Array) -> jax.Array:
        batch, height, width, _ = images.shape
        y = images.transpose(1, 2, 0, 3).reshape(1, height, -1)
        y = _constant_product(waves.down, y).reshape(rows, 2 * width, -1)
        y = _constant_product(waves.across, y)
        y = _batched_product(y.reshape(-1, batch, channels), filters)
        y = _constant_product(waves.back_across, y.reshape(rows, len(waves.across), -1))
        y = _constant_product(waves.back_down, y.reshape(1, 2 * rows, -1))
        return y.reshape(-1, wide, batch, features).transpose(2, 0, 1, 3)

    return in_chunks(convolve, x, _TRANSFORMED_IMAGES)


ALGORITHMS = {"tiled": _tiled, "transformed": _transformed}


class _Waves(NamedTuple):
    """The transforms for one shape, with P x Q coefficients and H' x W' outputs."""

    down: np.ndarray  # f64[2 P, H], real and imaginary parts of the coefficients of columns
    across: np.ndarray  # f64[3 Q, 2 W], from (re, im) of a row to Xi, Xr and Xr + Xi
    kernel: np.ndarray  # f64[3 P Q, r s], from the kernel to Kr + Ki, Ki - Kr and Kr
    back_across: np.ndarray  # f64[2 W', 3 Q], from the products a, b, c to (re, im) of a row
    back_down: np.ndarray  # f64[H', 2 P], from (re, im) of the coefficients to outputs


@cache
def _waves(size: tuple[int, int], taps: tuple[int, int], padding: Padding) -> _Waves:
    """The transforms for convolutions of maps f[H, W] with kernels f[r, s]."""

    def cycle(size: int, taps: int, padding: tuple[int, int]) -> tuple[int, int]:
        """The length N at which only zeros wrap around, and the number of outputs."""
        low, high = padding
        outputs = low + size + high - taps + 1
        return max(size + low, outputs + taps - 1 - low, size), outputs

    def real_matrix(z: np.ndarray) -> np.ndarray:
        """c128[a, b] as f64[2 a, 2 b], which multiplies rows (re, im) from the right."""
        return np.block([[z.real, z.imag], [-z.imag, z.real]])

    lengths, outputs = zip(*map(cycle, size, taps, padding), strict=True)
    rows, columns = np.arange(lengths[0] // 2 + 1), np.arange(lengths[1])

    def wave(frequencies: np.ndarray, axis: int, positions: np.ndarray) -> np.ndarray:
        return np.exp(-2j * np.pi * np.outer(frequencies, positions) / lengths[axis])

    down = wave(rows, 0, np.arange(size[0]))
    across = wave(columns, 1, np.arange(size[1]))
    # A correlation needs the conjugate. Positions count from the top left pixel, not the padding.
    kernel = np.einsum(
        "pi,qj->pqij",
        wave(rows, 0, np.arange(taps[0]) - padding[0][0]).conj(),
        wave(columns, 1, np.arange(taps[1]) - padding[1][0]).conj(),
    )
    real, imaginary = real_matrix(across.T).T.reshape(2, len(columns), -1)
    factors = [kernel.real + kernel.imag, kernel.imag - kernel.real, kernel.real]
    back = real_matrix(wave(columns, 1, np.arange(outputs[1])).conj() / lengths[1])
    back = back.reshape(2, len(columns), 2 * outputs[1])
    products = [-back[0], back[1], back[0] + back[1]]
    # Each row counts twice, once for its conjugate, except rows that are their own conjugates: the
    # first one, and the last one if the length is even.
    times = np.where((rows == 0) | (2 * rows == lengths[0]), 1.0, 2.0)
    back_down = wave(rows, 0, np.arange(outputs[0])).conj() * times[:, None]
    back_down = np.stack([back_down.real, -back_down.imag], 1) / lengths[0]
    return _Waves(
        down=np.stack([down.real, down.imag], 1).reshape(-1, size[0]),
        across=np.stack([imaginary, real, real + imaginary], 1).reshape(-1, 2 * size[1]),
        kernel=np.stack(factors, 2).reshape(-1, taps[0] * taps[1]),
        back_across=np.stack(products, 1).reshape(-1, 2 * outputs[1]).T,
        back_down=back_down.reshape(-1, outputs[0]).T,
    )


def _constant_product(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """Multiplies a constant f64[a, b] by x f[d, b, c] -> f[d, a, c] in the dtype of x."""
    return _product(jnp.asarray(matrix, x.dtype), x)


def _plain_product(matrix: jax.Array, x: jax.Array) -> jax.Array:
    if len(x) == 1:
        return (matrix @ x[0])[None]
    return jnp.matmul(jnp.broadcast_to(matrix, (len(x), *matrix.shape)), x)


# The gradient is our own: autodiff's is a product of transposed matrices, which XLA:CPU transposes
# in memory or passes to a slower library. The rules use the plain product, so that forward mode can
# differentiate them.
_product = jax.custom_vjp(_plain_product)
_product.defvjp(
    lambda matrix, x: (_plain_product(matrix, x), matrix),
    lambda matrix, g: (None, _plain_product(matrix.T, g)),
)


def in_chunks(function: Callable[[jax.Array], Any], x: jax.Array, size: int) -> Any:
    """Returns `function(x)`, computed in one loop over chunks of at most `size` samples.

    `function` maps f[b, ...] to arrays [b, ...] for any b, and its samples are independent.
    """
    count = -(-len(x) // size)
    if count <= 1:
        return function(x)
    rows = -(-len(x) // count)
    # Zeros fill the last chunk, so that one program serves all.
    filled = jnp.pad(x, [(0, count * rows - len(x))] + [(0, 0)] * (x.ndim - 1))
    chunks = lax.map(function, filled.reshape(count, rows, *x.shape[1:]))
    return jax.tree.map(lambda y: y.reshape(count * rows, *y.shape[2:])[: len(x)], chunks)


def _batched_product(values: jax.Array, filters: jax.Array) -> jax.Array:
    """Multiplies f[d, N, C] by f[d, C, F] -> f[d, N, F]."""
    return lax.dot_general(values, filters, (((2,), (1,)), ((0,), (0,))))
