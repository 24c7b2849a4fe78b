"""Perturbations `(key, x f[B, H, W, C], valid bool[B]) -> x` of what a model reads in training.

They change standardized floats, between `prepare` and the model.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_bn.arguments.ranges import OddSide, UpTo1, bounded

Perturb = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@bounded
def amplitude_mix(probability: UpTo1 = 0.5) -> Perturb:
    r"""Returns amplitude mix (Xu et al., CVPR 2021: FACT), the row AM of FedCD's Table 1.

    $x' = F^{-1}(((1 - l) |F x| + l |F x_2|) e^{i \angle F x})$ with $l \sim U(0, 1)$

    F is the Fourier transform over height and width of each channel, x2 another valid sample of the
    client's batch; l is one number for each sample.

    Differs from FACT, as FedCD's comparison does: no unchanged copy of the batch, no teacher, and
    standardized floats that are not clipped.

    Args:
      probability: the probability that a batch is mixed, in [0, 1].
    """

    def perturb(key: jax.Array, x: jax.Array, valid: jax.Array) -> jax.Array:
        partner_key, share_key, whether_key = jax.random.split(key, 3)
        share = jax.random.uniform(share_key, (len(x), 1, 1, 1), x.dtype)
        mixed = mix_amplitudes(x, x[partners(partner_key, valid)], share)
        return jnp.where(jax.random.bernoulli(whether_key, probability), mixed, x)

    return perturb


@bounded
def randconv(mix: bool = True, identity: UpTo1 = 0.0, largest: OddSide = 7) -> Perturb:
    r"""Returns random convolution (Xu et al., ICLR 2021): another texture a batch, the same shapes.

    $x' = a x + (1 - a) \mathrm{conv}(x, w)$ with $w \sim N(0, 1 / (C k^2))$ and $a \sim U(0, 1)$

    with kernels w f[k, k, C, C], k uniform in 1, 3, ..., `largest`, zeros around the images, no
    bias and no clipping; k, w and a are drawn once for each batch. Without `mix`, a is 0: RC_img of
    the paper is `randconv:mix=False:identity=0.5`, RC_mix is the default. For the paper's loss see
    `contrib.randconv`.

    Args:
      mix: whether the images are mixed with what the convolution makes of them.
      identity: probability that a batch stays as it is, in [0, 1].
      largest: side of the largest kernel, odd; 7 in the authors' script for digits.
    """
    sides = range(1, largest + 1, 2)

    def convolved(side: int, key: jax.Array, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        kernel = jax.random.normal(key, (side, side, channels, channels), x.dtype)
        kernel *= (channels * side**2) ** -0.5  # outputs keep the mean square of a patch
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)

    def perturb(key: jax.Array, x: jax.Array, valid: jax.Array) -> jax.Array:
        del valid
        side_key, kernel_key, share_key, whether_key = jax.random.split(key, 4)
        # A switch computes only the drawn side; under vmap over clients it computes all sides.
        which = jax.random.randint(side_key, (), 0, len(sides))
        changed = jax.lax.switch(which, [partial(convolved, k) for k in sides], kernel_key, x)
        if mix:
            share = jax.random.uniform(share_key, (), x.dtype)
            changed = share * x + (1 - share) * changed
        return jnp.where(jax.random.bernoulli(whether_key, identity), x, changed)

    return perturb


def mix_amplitudes(x: jax.Array, style: jax.Array, share: jax.Array) -> jax.Array:
    """Returns images f[B, H, W, C] with a share f[B, 1, 1, 1] of the amplitudes of `style`."""
    spectrum, style_spectrum = (jnp.fft.fft2(images, axes=(1, 2)) for images in (x, style))
    # Cosine and sine of the phase, not x / |x|, which is NaN at 0.
    amplitude = (1 - share) * jnp.abs(spectrum) + share * jnp.abs(style_spectrum)
    phase = jnp.angle(spectrum)
    mixed = jax.lax.complex(amplitude * jnp.cos(phase), amplitude * jnp.sin(phase))
    return jnp.fft.ifft2(mixed, axes=(1, 2)).real


def partners(key: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns another valid sample for each sample, i32[B], by a permutation of the valid ones.

    Padding, or a single valid sample, is its own partner.
    """
    size = len(valid)
    place = jnp.arange(size, dtype=jnp.int32)
    # Uniform numbers are below 1, so that 2 sorts padding after all valid samples.
    order = jnp.argsort(jnp.where(valid, jax.random.uniform(key, (size,)), 2)).astype(jnp.int32)
    count = jnp.maximum(valid.sum(dtype=jnp.int32), 1)
    following = order[jnp.where(place < count, (place + 1) % count, place)]
    return jnp.zeros(size, jnp.int32).at[order].set(following)
