"""Convolution of large kernels on small maps: a real Fourier transform as plain matrix products.

A cyclic convolution of length N is a pointwise product of Fourier coefficients. In two dimensions,
with P = N // 2 + 1 rows of coefficients (the others are their conjugates) and a sum over channels,
that is P N complex matrix products. Each complex product is three real ones (Gauss): with X the
coefficients of the images and K those of the kernel,

    a = (Kr + Ki) Xi,   b = (Ki - Kr) Xr,   c = Kr (Xr + Xi),   K X = (c - a) + (c + b) i

and the sums belong to the matrices that transform, so that all in all it is a bilinear algorithm

    y = A^T [(G w) * (B^T x)]

as in `winograd`, whose remarks on speed hold here too. A 5x5 kernel on 14x14 takes 432 products
instead of the 1024 of tiles and the 4900 of the definition.
"""

from functools import cache
from typing import NamedTuple

import jax
import numpy as np

from fedjax_bn.models.cpu.chunks import in_chunks
from fedjax_bn.models.cpu.direct import Padding
from fedjax_bn.models.cpu.winograd import batched_product, constant_product

CHUNK = 64  # images at a time: more no longer fit in the caches


class _Matrices(NamedTuple):
    """The transforms for one shape; P, Q: coefficients down and across, H', W': outputs.

    down: f64[2 P, H], real and imaginary parts of the coefficients of columns.
    across: f64[3 Q, 2 W], from (re, im) of a row to Xi, Xr and Xr + Xi.
    kernel: f64[3 P Q, r s], from the kernel to Kr + Ki, Ki - Kr and Kr.
    back_across: f64[2 W', 3 Q], from the products a, b, c to (re, im) of a row.
    back_down: f64[H', 2 P].
    """

    down: np.ndarray
    across: np.ndarray
    kernel: np.ndarray
    back_across: np.ndarray
    back_down: np.ndarray


@cache
def matrices(size: tuple[int, int], taps: tuple[int, int], padding: Padding) -> _Matrices:
    """All transforms of a convolution of maps f[H, W] with kernels f[r, s]."""
    (lengths, outputs) = zip(*map(_cycle, size, taps, padding), strict=True)
    rows = np.arange(lengths[0] // 2 + 1)
    columns = np.arange(lengths[1])
    lows = padding[0][0], padding[1][0]

    def wave(frequencies: np.ndarray, axis: int, positions: np.ndarray) -> np.ndarray:
        return np.exp(-2j * np.pi * np.outer(frequencies, positions) / lengths[axis])

    down = wave(rows, 0, np.arange(size[0]))
    across = wave(columns, 1, np.arange(size[1]))
    # A correlation needs the conjugate; its zero position is the top left pixel, not the padding.
    kernel = np.einsum(
        "pi,qj->pqij",
        wave(rows, 0, np.arange(taps[0]) - lows[0]).conj(),
        wave(columns, 1, np.arange(taps[1]) - lows[1]).conj(),
    )
    real, imaginary = _real_matrix(across.T).T.reshape(2, len(columns), -1)
    factors = [kernel.real + kernel.imag, kernel.imag - kernel.real, kernel.real]
    back = _real_matrix(wave(columns, 1, np.arange(outputs[1])).conj() / lengths[1])
    back = back.reshape(2, len(columns), 2 * outputs[1])
    products = [-back[0], back[1], back[0] + back[1]]
    back_down = wave(rows, 0, np.arange(outputs[0])).conj() * _multiplicity(lengths[0])[:, None]
    back_down = np.stack([back_down.real, -back_down.imag], 1) / lengths[0]
    return _Matrices(
        down=np.stack([down.real, down.imag], 1).reshape(-1, size[0]),
        across=np.stack([imaginary, real, real + imaginary], 1).reshape(-1, 2 * size[1]),
        kernel=np.stack(factors, 2).reshape(-1, taps[0] * taps[1]),
        back_across=np.stack(products, 1).reshape(-1, 2 * outputs[1]).T,
        back_down=back_down.reshape(-1, outputs[0]).T,
    )


def _cycle(size: int, taps: int, padding: tuple[int, int]) -> tuple[int, int]:
    """The length N of the cycle, so long that nothing but zeros comes round, and the outputs."""
    low, high = padding
    outputs = low + size + high - taps + 1
    return max(size + low, outputs + taps - 1 - low, size), outputs


def _real_matrix(z: np.ndarray) -> np.ndarray:
    """c128[a, b] as f64[2 a, 2 b], by which rows (re, im) are multiplied from the right."""
    return np.block([[z.real, z.imag], [-z.imag, z.real]])


def _multiplicity(length: int) -> np.ndarray:
    """How often each of N // 2 + 1 coefficients occurs among all N: once, or with a conjugate."""
    rows = np.arange(length // 2 + 1)
    return np.where((rows == 0) | (2 * rows == length), 1.0, 2.0)


def fourier_convolution(x: jax.Array, kernel: jax.Array, padding: Padding) -> jax.Array:
    """Convolution with stride 1; its rounding error is that of the definition.

    Args:
      x: f[B, H, W, C].
      kernel: f[r, s, C, F].
      padding: zeros ((top, bottom), (left, right)), not negative.

    Returns:
      f[B, H + top + bottom - r + 1, W + left + right - s + 1, F].
    """
    transforms = matrices(x.shape[1:3], kernel.shape[:2], padding)
    r, s, channels, features = kernel.shape
    filters = constant_product(transforms.kernel, kernel.reshape(1, r * s, -1))
    filters = filters.reshape(-1, channels, features)
    return in_chunks(lambda images: _convolve(images, filters, transforms), x, CHUNK)


def _convolve(x: jax.Array, filters: jax.Array, transforms: _Matrices) -> jax.Array:
    """x f[B, H, W, C], filters f[3 P Q, C, F] -> f[B, H', W', F]."""
    batch, height, width, channels = x.shape
    rows, wide = len(transforms.down) // 2, len(transforms.back_across) // 2
    x = x.transpose(1, 2, 0, 3).reshape(1, height, -1)
    x = constant_product(transforms.down, x).reshape(rows, 2 * width, -1)
    x = constant_product(transforms.across, x)
    y = batched_product(x.reshape(-1, batch, channels), filters)
    y = constant_product(transforms.back_across, y.reshape(rows, len(transforms.across), -1))
    y = constant_product(transforms.back_down, y.reshape(1, 2 * rows, -1))
    return y.reshape(-1, wide, batch, filters.shape[2]).transpose(2, 0, 1, 3)
