"""Perturbations: what training does to the images that a model reads, `(key, x, valid) -> x`.

They act on standardized floats, between `prepare` and the model, so that nothing is rounded to
bytes; any method takes one as `perturb=`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_bn.ranges import UpTo1, bounded

Perturb = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@bounded
def amplitude_mix(probability: UpTo1 = 0.5) -> Perturb:
    """Amplitude mix (Xu et al., CVPR 2021: FACT), the row AM of FedCD's Table 1.

        x' = F^-1( ((1 - l) |F x| + l |F x2|) e^(i angle F x) ),   l ~ U(0, 1)

    F is the Fourier transform over height and width of each channel, x2 another valid sample of the
    batch, so that the client's own; l is one number a sample. It holds for a whole batch with a
    probability, and leaves the batch as it is else.

    Differs from FACT, as FedCD's comparison does: no unchanged copy of the batch, no teacher, and
    standardized floats that are not clipped.

    Args:
      probability: of a batch, in [0, 1].

    Returns:
      `perturb(key, x f[B, H, W, C], valid bool[B]) -> f[B, H, W, C]`.

    Raises:
      ValueError: the probability is outside [0, 1]; at use, where samples are no images.
    """

    def perturb(key: jax.Array, x: jax.Array, valid: jax.Array) -> jax.Array:
        if x.ndim != 4:
            raise ValueError(f"amplitude_mix needs images f[B, H, W, C], not {x.shape}")
        partner_key, share_key, whether_key = jax.random.split(key, 3)
        share = jax.random.uniform(share_key, (len(x), 1, 1, 1), x.dtype)
        mixed = mix_amplitudes(x, x[partners(partner_key, valid)], share)
        return jnp.where(jax.random.bernoulli(whether_key, probability), mixed, x)

    return perturb


def mix_amplitudes(x: jax.Array, other: jax.Array, share: jax.Array) -> jax.Array:
    """The images with amplitudes mixed and their own phases.

    Args:
      x: f[B, H, W, C].
      other: f[B, H, W, C], whose amplitudes enter.
      share: f[B, 1, 1, 1], how much, in [0, 1].
    """
    own, theirs = (jnp.fft.fft2(images, axes=(1, 2)) for images in (x, other))
    amplitude = (1 - share) * jnp.abs(own) + share * jnp.abs(theirs)
    spectrum = jax.lax.complex(*(amplitude * part(jnp.angle(own)) for part in (jnp.cos, jnp.sin)))
    return jnp.fft.ifft2(spectrum, axes=(1, 2)).real


def partners(key: jax.Array, valid: jax.Array) -> jax.Array:
    """Another valid sample for each, i32[B], by a permutation of the valid ones.

    A padding sample, and the only valid one, are their own partners.
    """
    size = len(valid)
    place = jnp.arange(size, dtype=jnp.int32)
    order = jnp.argsort(jnp.where(valid, jax.random.uniform(key, (size,)), 2)).astype(jnp.int32)
    count = jnp.maximum(valid.sum(dtype=jnp.int32), 1)
    following = order[jnp.where(place < count, (place + 1) % count, place)]
    return jnp.zeros(size, jnp.int32).at[order].set(following)
