"""What statistics rules need to know of the layer they serve: its name, a key, its axes."""

import zlib

import flax.linen as nn
import jax

from fedjax_bn.normalization.batch_norm import BatchNorm, normalize_with


def name_of(layer: BatchNorm) -> str:
    """The layer's path in its model, such as `layer1_0/norm1`."""
    return "/".join(layer.path)


def path_names(path: tuple) -> tuple[str, ...]:
    """The names along a leaf's path in a tree of dicts."""
    return tuple(str(getattr(entry, "key", entry)) for entry in path)


def key_for(layer: BatchNorm, key: jax.Array) -> jax.Array:
    """A random key of this layer, the same wherever the layer stands in the order of calls."""
    return jax.random.fold_in(key, zlib.crc32(name_of(layer).encode()))


def is_spatial(x: jax.Array) -> bool:
    """Whether `x` f[B, ..., C] has axes between the samples and the channels."""
    return x.ndim > 2


def spatial_layers(model: nn.Module, variables: dict, images: jax.Array) -> dict[str, int]:
    """Name -> channels C of every batch norm that sees spatial axes; nothing is computed.

    Args:
      model: any linen module with our `BatchNorm`.
      variables: its collections, arrays or `jax.ShapeDtypeStruct`.
      images: f[B, ...] as the model reads them, an array or a `jax.ShapeDtypeStruct`.
    """
    found = {}

    def note(layer: BatchNorm, x: jax.Array, valid: None) -> tuple[jax.Array, jax.Array]:
        del valid
        if is_spatial(x):
            found[name_of(layer)] = x.shape[-1]
        return layer.running()

    with normalize_with(note):
        jax.eval_shape(model.apply, variables, images)
    return found
