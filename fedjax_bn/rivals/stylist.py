"""Images in random styles, of which a part is learned (Wang et al., ICCV 2021, L2D).

    g(x) = sum_i w_i tanh(branch_i(x)) / sum_i w_i,   w_i ~ N(0, 1)
    x' = share (2 sigmoid(g(x)) - 1) + (1 - share) x

The first branch is a random 1x1 convolution with dropout 0.2; the others are random k x k
convolutions, k = 5, 9, 13, 17, whose maps are normalized by sample and channel, get a learned scale
and shift, and go back through random transposed k x k convolutions. Those larger than an image are
left out.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.models import cpu
from fedjax_bn.normalization.instance import instance_moments

PyTree = Any

SIDES = (5, 9, 13, 17)
_DROPPED = 0.2
_EPSILON = 1e-5  # PyTorch's of an instance norm
_FIXED = 2021  # seed of the kernels of a fixed pass


def start(key: jax.Array, channels: int, dtype: Any) -> PyTree:
    """{"scale", "shift"} f[branches, C], from N(1, 0.1) and N(0, 0.1), deviations."""
    scale_key, shift_key = jax.random.split(key)
    shape = (len(SIDES), channels)
    return {
        "scale": 1 + 0.1 * jax.random.normal(scale_key, shape, dtype),
        "shift": 0.1 * jax.random.normal(shift_key, shape, dtype),
    }


def stylize(layers: PyTree, x: jax.Array, share: float, key: jax.Array | None = None) -> jax.Array:
    """x' f[B, H, W, C] of images as the model reads them.

    Args:
      layers: scale and shift, see `start`.
      x: f[B, H, W, C].
      share: of the new style, in [0, 1].
      key: of kernels, dropout and weights, drawn anew for every pass; None for kernels that are
        always the same, no dropout, and equal weights.

    Raises:
      ValueError: they are no images of so many channels.
    """
    channels = layers["scale"].shape[1]
    if x.ndim != 4 or x.shape[-1] != channels:
        raise ValueError(
            f"l2d gives styles to images f[B, H, W, C={channels}], not {x.shape}: give it their "
            "number of channels (l2d.channels)"
        )
    sides = [side for side in SIDES if side <= min(x.shape[1:3])]
    drawn = jax.random.key(_FIXED) if key is None else key
    color_key, drop_key, weight_key, *keys = jax.random.split(drawn, 3 + 2 * len(sides))
    color = _convolved(color_key, 1, x, 0)
    if key is not None:
        kept = jax.random.bernoulli(drop_key, 1 - _DROPPED, x.shape)
        color = jnp.where(kept, color / (1 - _DROPPED), 0)
    branches = [color]
    for i, side in enumerate(sides):
        down = _styled(_convolved(keys[2 * i], side, x, 0), layers["scale"][i], layers["shift"][i])
        branches.append(_convolved(keys[2 * i + 1], side, down, side - 1))
    weights = jnp.ones(len(branches), x.dtype)
    if key is not None:
        weights = jax.random.normal(weight_key, weights.shape, x.dtype)
    weights /= jnp.where(weights.sum() == 0, 1, weights.sum())
    total = sum(w * jnp.tanh(branch) for w, branch in zip(weights, branches, strict=True))
    return share * (2 * jax.nn.sigmoid(total) - 1) + (1 - share) * x


def _convolved(key: jax.Array, side: int, x: jax.Array, padding: int) -> jax.Array:
    """A random convolution, PyTorch's at its start but for the bias; padded it is a transposed."""
    channels = x.shape[-1]
    bound = (channels * side**2) ** -0.5
    kernel = jax.random.uniform(key, (side, side, channels, channels), x.dtype, -bound, bound)
    return cpu.convolve(x, kernel, (1, 1), [(padding, padding)] * 2)


def _styled(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """The maps normalized by sample and channel, with a scale and shift f[C]."""
    dtype = promote(x.dtype, jnp.float32)
    mean, var = (moment[:, None, None] for moment in instance_moments(x))
    normalized = (x.astype(dtype) - mean) * jax.lax.rsqrt(var + _EPSILON)
    return (normalized * scale.astype(dtype) + shift.astype(dtype)).astype(x.dtype)
