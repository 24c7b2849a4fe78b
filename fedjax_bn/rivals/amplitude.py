"""Images with the amplitudes of a whole federation (Jiang, Wang & Dou, AAAI 2022, HarmoFL).

It is a collection of its own, `amplitude`, beside a model's, {"mean": f[C]}: every image keeps all
of its spectrum but the amplitude of its means, in whose place the federation's stand,

    x' = x - mean(x) + m,      for each channel

`models.hooks` applies it in every pass whose variables hold one.
"""

import jax
import jax.numpy as jnp

from fedjax_bn.models.hooks import Hooked
from fedjax_bn.sharing import Variables

COLLECTION = "amplitude"


def hook(tree: Variables, images: jax.Array, key: jax.Array | None) -> Hooked:
    """Returns the images f[B, H, W, C] with the federation's means, see `models.hooks`."""
    del key
    return Hooked(harmonize(images, tree["mean"]))


def harmonize(images: jax.Array, mean: jax.Array) -> jax.Array:
    """f[B, H, W, C] with the means f[C] over height and width.

    Raises:
      ValueError: they are no images of so many channels.
    """
    if images.ndim != 4 or images.shape[-1] != len(mean):
        raise ValueError(
            f"harmofl harmonizes images f[B, H, W, C={len(mean)}], not {images.shape}: give it "
            "their number of channels (harmofl.channels)"
        )
    return images - images.mean((1, 2), keepdims=True) + mean.astype(images.dtype)


def mean_of(images: jax.Array, valid: jax.Array) -> jax.Array:
    """Mean f[C] over the valid images f[B, H, W, C] and their pixels; 0 where there is none."""
    means = images.mean((1, 2))
    count = jnp.maximum(valid.sum(dtype=means.dtype), 1)
    return jnp.where(valid[:, None], means, 0).sum(0) / count
