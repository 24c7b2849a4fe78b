"""Low frequencies of images, and images with those of others (Liu et al., CVPR 2021, FedDG).

A window of half side b holds the (2 b + 1)^2 lowest frequencies of each channel. Its amplitudes are
|F x|, but for the frequency 0, which is real, the sum of the pixels, and keeps its sign: so the
values do not depend on where the standardized zero lies.
"""

import jax
import jax.numpy as jnp


def amplitudes(x: jax.Array, half: int) -> jax.Array:
    """Of the window, f[B, 2 b + 1, 2 b + 1, C].

    Args:
      x: f[B, H, W, C].
      half: b, from 0 on.

    Raises:
      ValueError: they are no images of at least 2 b + 1 pixels a side.
    """
    return _signed(_window(_spectrum(x, half), half), half)


def with_amplitudes(x: jax.Array, other: jax.Array, share: jax.Array, half: int) -> jax.Array:
    """x' = F^-1( (share |F x| + (1 - share) other) e^(i angle F x) ) within the window.

    Args:
      x: f[B, H, W, C].
      other: f[B, 2 b + 1, 2 b + 1, C], amplitudes of other images.
      share: f[B, 1, 1, 1] or f[], what stays of its own, in [0, 1].
      half: b.

    Raises:
      ValueError: as `amplitudes`.
    """
    spectrum = _spectrum(x, half)
    low = _window(spectrum, half)
    own, size = _signed(low, half), jnp.abs(low)
    length = jnp.where(size > 0, size, 1)
    cosine = jnp.where(size > 0, low.real / length, 1).at[:, half, half].set(1)
    sine = (low.imag / length).at[:, half, half].set(0)
    change = (1 - share) * (other - own)
    rows, columns = (_places(length, half) for length in x.shape[1:3])
    added = (
        jnp.zeros_like(spectrum)
        .at[:, rows[:, None], columns]
        .set(jax.lax.complex(change * cosine, change * sine))
    )
    return x + jnp.fft.ifft2(added, axes=(1, 2)).real


def _spectrum(x: jax.Array, half: int) -> jax.Array:
    if x.ndim != 4 or min(x.shape[1:3]) < 2 * half + 1:
        raise ValueError(
            f"feddg exchanges {2 * half + 1}x{2 * half + 1} frequencies of images "
            f"f[B, H, W, C] of at least so many pixels a side, not {x.shape}: set feddg.half lower"
        )
    return jnp.fft.fft2(x, axes=(1, 2))


def _places(length: int, half: int) -> jax.Array:
    return jnp.arange(-half, half + 1, dtype=jnp.int32) % length


def _window(spectrum: jax.Array, half: int) -> jax.Array:
    rows, columns = (_places(length, half) for length in spectrum.shape[1:3])
    return spectrum[:, rows[:, None], columns]


def _signed(low: jax.Array, half: int) -> jax.Array:
    return jnp.abs(low).at[:, half, half].set(low[:, half, half].real)
