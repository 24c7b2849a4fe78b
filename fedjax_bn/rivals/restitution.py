"""Style normalization and restitution inside any model (Jin, Lan, Zeng & Chen, TMM 2021, SNR).

It is a collection of its own, `restitution`, beside a model's: path of a module -> a layer. Behind
these modules a map x f[B, ..., C] loses its style, and of what is lost a gate a gives a part back:

    n = IN(x),   r = x - n,   a = sigmoid(W2 relu(W1 pool(r))),   x+ = n + a r

pool is the mean over positions. n is a sample's s x + t, and its mean the instance norm's bias: so
the gate needs no more of the map than its mean, and x+ is a sample's affine map of x.
`models.hooks` applies it in every pass whose variables hold one. x- = n + (1 - a) r, what the gate
leaves out, is for the loss alone.
"""

from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import promote
from fedjax_bn.models.hooks import Hooked
from fedjax_bn.normalization.instance import instance_moments, positioned
from fedjax_bn.normalization.layer import is_spatial
from fedjax_bn.rivals.stages import behind

PyTree = Any

COLLECTION = "restitution"
REDUCTION = 16  # channels a hidden unit of a gate has
_EPSILON = 1e-5  # PyTorch's of an instance norm


class Restored(NamedTuple):
    """What a layer makes of a map.

    Attributes:
      kept: x+ f[B, ..., C], what takes the map's place.
      means: of n, x+ and x- over positions, f[3, B, C].
    """

    kept: jax.Array
    means: jax.Array


def hook(tree: Mapping[str, PyTree], images: jax.Array, key: jax.Array | None) -> Hooked:
    """Restores the maps behind the modules that the tree names, see `models.hooks`."""
    del key
    return Hooked(images, contexts=(restoring(tree),))


def restoring(
    layers: Mapping[str, PyTree], seen: MutableMapping[str, Restored] | None = None
) -> AbstractContextManager:
    """A context in which maps behind modules are restored; it acts while they are traced.

    Args:
      layers: path of a module -> layer; outputs without positions stay as they are.
      seen: takes what each layer makes of its map, in the order of calls.
    """

    def restored(name: str, x: jax.Array) -> jax.Array:
        if not is_spatial(x):
            return x
        parts = restore(layers[name], x)
        if seen is not None:
            seen[name] = parts
        return parts.kept.astype(x.dtype)

    return behind(layers, restored)


def restore(layer: PyTree, x: jax.Array) -> Restored:
    """What a layer makes of a map f[B, ..., C], in at least float32.

    Raises:
      ValueError: the layer is one of other channels.
    """
    if len(layer["scale"]) != x.shape[-1]:
        raise ValueError(
            f"snr has a layer of {len(layer['scale'])} channels behind a module that gives "
            f"{x.shape[-1]}: name modules whose outputs are those of their last batch norm "
            "(snr.names)"
        )
    x = x.astype(promote(x.dtype, jnp.float32))
    own = jax.tree.map(lambda leaf: leaf.astype(x.dtype), layer)
    mean, var = instance_moments(x)
    scale = own["scale"] * jax.lax.rsqrt(var + _EPSILON)
    shift = own["bias"] - mean * scale
    rest = mean - own["bias"]  # of r over positions
    hidden = jax.nn.relu(rest @ own["down"] + own["down_bias"])
    gate = jax.nn.sigmoid(hidden @ own["up"] + own["up_bias"])
    scale, shift = (positioned(t, x) for t in (scale + gate * (1 - scale), shift * (1 - gate)))
    means = own["bias"] + jnp.stack([jnp.zeros_like(gate), gate, 1 - gate]) * rest
    return Restored(x * scale + shift, means)


def layer(key: jax.Array, channels: int, dtype: Any) -> PyTree:
    """A layer at its start: PyTorch's of an instance norm and of two dense layers.

    Args:
      key: random key of the gate.
      channels: C of the map; the gate has C // 16 hidden units, at least one.
      dtype: of all leaves.
    """
    hidden = max(channels // REDUCTION, 1)
    keys = jax.random.split(key, 4)

    def draw(key: jax.Array, inputs: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

    return {
        "scale": jnp.ones(channels, dtype),
        "bias": jnp.zeros(channels, dtype),
        "down": draw(keys[0], channels, (channels, hidden)),
        "down_bias": draw(keys[1], channels, (hidden,)),
        "up": draw(keys[2], hidden, (hidden, channels)),
        "up_bias": draw(keys[3], hidden, (channels,)),
    }
