"""Images with the amplitudes of a whole federation (Jiang, Wang & Dou, AAAI 2022, HarmoFL).

It is a collection of its own, `amplitude`, beside a model's, {"mean": f[C]}: every image keeps all
of its spectrum but the amplitude of its means, in whose place the federation's stand,

    x' = x - mean(x) + m,      for each channel

`models.forward.forward`, through which all methods and adaptations pass, applies it wherever the
variables hold one.
"""

import jax
import jax.numpy as jnp

from fedjax_bn.sharing import Variables

COLLECTION = "amplitude"


def take(variables: Variables, images: jax.Array) -> tuple[Variables, jax.Array]:
    """The variables without their amplitude, and the images with it; as they are for none.

    Args:
      variables: a model's, perhaps with `amplitude`.
      images: f[B, H, W, C].
    """
    if COLLECTION not in variables:
        return variables, images
    plain = {name: tree for name, tree in variables.items() if name != COLLECTION}
    return plain, harmonize(images, variables[COLLECTION]["mean"])


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
