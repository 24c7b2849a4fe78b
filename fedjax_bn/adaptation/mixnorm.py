"""MixNorm (Hu et al. 2021): statistics over augmented views of the sample."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.adaptation.adaptation import Adaptation
from fedjax_bn.arguments.ranges import Seed, UpTo1, Views, bounded
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.instance import positioned
from fedjax_bn.normalization.layer import Layer, Statistics, is_spatial, moments, running_statistics
from fedjax_bn.sharing import Variables


@bounded
def mixnorm(
    model: Any,
    weight: UpTo1 = 0.05,
    *,
    views: Views = 5,
    view: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    seed: Seed = 0,
) -> Adaptation:
    """The sample's statistics over itself and its augmented views, mixed into the running ones.

    Mean and variance are m of those over the positions of all views plus 1 - m of the running ones.
    The prediction is the original's. One pass over `views` times as many images.

    Differs from the paper: the running statistics do not move with the stream, so that samples are
    independent of each other, as FedIG's comparison (Table 3c) needs.

    Args:
      model: as in `adaptation.stateless`, images f[B, H, W, C] -> logits.
      weight: m, weight of the sample's own statistics, in [0, 1].
      views: number of views with the original; FedIG takes 5.
      view: (key, images) -> augmented images of the same shape; by default a random square crop of
        0.7 to 1 of the side, resized to the whole, and a flip half of the time.
      seed: of the random key that the carry holds.
    """
    view = view or _crop_and_flip

    def rule(layer: Layer, x: jax.Array, valid: jax.Array | None) -> Statistics:
        del valid
        if not is_spatial(x):
            return running_statistics(layer, x)
        # The batch is all first views, then all second ones, and so on.
        samples = x.reshape(views, -1, *x.shape[1:]).swapaxes(0, 1)
        own_mean, own_var, _ = jax.vmap(moments)(samples)
        mean = weight * own_mean + (1 - weight) * layer.mean.astype(own_mean.dtype)
        var = weight * own_var + (1 - weight) * layer.var.astype(own_var.dtype)
        mean, var = (positioned(jnp.tile(one, (views, 1)), x) for one in (mean, var))
        return Statistics(mean, var)

    def predict(
        variables: Variables, key: jax.Array, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        del valid  # no sample's statistics depend on another's
        key, *keys = jax.random.split(key, views)
        stacked = jnp.concatenate([images, *(view(now, images) for now in keys)])
        outputs = forward(model, variables, stacked, statistics=rule).outputs
        return jax.tree.map(lambda leaf: leaf[: len(images)], outputs), key

    return Adaptation(lambda variables: jax.random.key(seed), predict)


def _crop_and_flip(key: jax.Array, images: jax.Array, smallest: float = 0.7) -> jax.Array:
    """A random square crop of each image, resized to the whole, and a flip half of the time.

    Args:
      key: random key.
      images: f[B, H, W, C].
      smallest: least side of a crop, as a share of the image's, in (0, 1].
    """
    side_key, corner_key, flip_key = jax.random.split(key, 3)
    count, height, width, _ = images.shape
    dtype = images.dtype
    side = jax.random.uniform(side_key, (count, 1), dtype, smallest, 1)
    corner = (1 - side) * jax.random.uniform(corner_key, (count, 2), dtype)
    size = jnp.asarray((height, width), dtype)

    def crop(image: jax.Array, side: jax.Array, corner: jax.Array) -> jax.Array:
        scale = jnp.broadcast_to(1 / side, (2,))
        return jax.image.scale_and_translate(
            image, image.shape, (0, 1), scale, -corner * size * scale, "linear", antialias=False
        )

    cropped = jax.vmap(crop)(images, side, corner)
    flips = jax.random.bernoulli(flip_key, shape=(count, 1, 1, 1))
    return jnp.where(flips, cropped[:, :, ::-1], cropped)
