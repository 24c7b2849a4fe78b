"""FedDG's boundary part: contrast of a network's features along the borders of regions."""

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.engine.overlap import regions_of
from fedjax_bn.models.cpu import max_pool
from fedjax_bn.task import masked_mean

TEMPERATURE = 0.05
WIDTH = 5  # of the band around a region, in pixels
_NEVER = -1e30  # and not -inf, whose gradient would be NaN


def boundary_contrast(
    maps: jax.Array, mask: jax.Array, valid: jax.Array, classes: int, *, nested: bool = False
) -> jax.Array:
    r"""Returns the contrast f[] of features on borders and around them, summed over regions.

    $-\log(e^{s_{ij} / T} / (e^{s_{ij} / T} + \sum_n e^{s_{in} / T}))$

    s is the cosine of two vectors, and T = 0.05. A vector is the mean of a map's features over the
    places of one sample and kind: on a region's border, or in the band of 5 pixels around it. i and
    j are different vectors of one kind, n are those of the other kind; the contrast of a region is
    the mean over all pairs (i, j), as by NTXentLoss of pytorch_metric_learning in the authors' code
    (liuquande/FedDG-ELCFS, train_ELCFS.py). Kinds that a sample lacks, and samples that do not
    count, have no vector.

    Args:
      maps: f[M, B, H, W, F], the features of M passes over the same B samples.
      mask: u8[B, H, W], 255 for a pixel without a label, which is in no place.
      valid: bool[B].
      classes, nested: as in `segmentation.regions_of`.
    """
    dtype = promote(maps.dtype, jnp.float32)
    places = _places(mask, classes, nested, dtype) * valid.astype(dtype)[:, None, None, None]
    count = places.sum((2, 3)).transpose(2, 0, 1)[:, :, None]  # f[regions, 2, 1, B]
    sums = jnp.einsum("kbhwr,mbhwf->rkmbf", places, maps.astype(dtype))
    has_pixels = jnp.broadcast_to(count > 0, sums.shape[:-1])
    vectors = jnp.where(has_pixels[..., None], sums / jnp.maximum(count, 1)[..., None], 0)
    shape = len(sums), 2, -1  # M B vectors of each kind
    losses = jax.vmap(_contrast)(vectors.reshape(*shape, sums.shape[-1]), has_pixels.reshape(shape))
    return losses.sum()


def _places(mask: jax.Array, classes: int, nested: bool, dtype: jnp.dtype) -> jax.Array:
    """Returns f[2, B, H, W, regions], 1 on the border of a region, and 1 in the band around it.

    Neighbours are up, down, left and right. A region has no border along the image's edge or
    along pixels without a label.
    """
    inside = regions_of(mask, classes, nested=nested)
    outside = ~inside & (mask != UNLABELLED)[..., None]
    border, band = inside.astype(dtype), inside.astype(dtype)
    border *= _dilated(outside.astype(dtype))
    for _ in range(WIDTH):
        band = _dilated(band)
    return jnp.stack([border, band * outside.astype(dtype)])


def _dilated(x: jax.Array) -> jax.Array:
    """Returns the maximum of each pixel and its four neighbours, f[B, H, W, C]."""
    down = max_pool(x, (3, 1), (1, 1), ((1, 1), (0, 0)))
    return jnp.maximum(down, max_pool(x, (1, 3), (1, 1), ((0, 0), (1, 1))))


def _contrast(vectors: jax.Array, has_pixels: jax.Array) -> jax.Array:
    """Returns the contrast f[] of vectors f[2, N, F] of two kinds, of which some are known."""
    # Bounded inside the root, so that the gradient is finite where a vector is 0.
    squares = jnp.square(vectors).sum(-1, keepdims=True)
    unit = vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
    same = jnp.einsum("knf,kmf->knm", unit, unit) / TEMPERATURE
    across = jnp.einsum("knf,kmf->knm", unit, unit[::-1]) / TEMPERATURE
    across = jnp.where(has_pixels[::-1, None], across, _NEVER)
    # The logarithm above, as a function of the differences alone.
    losses = jax.nn.softplus(jax.nn.logsumexp(across, -1, keepdims=True) - same)
    pairs = has_pixels[:, None] & has_pixels[..., None] & ~jnp.eye(has_pixels.shape[-1], dtype=bool)
    return masked_mean(losses, pairs)
