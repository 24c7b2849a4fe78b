"""How large a network's features and outputs are, read from its variables."""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.models.features import classify, features_read, last_dense, shows_features
from fedjax_bn.models.masks import take
from fedjax_bn.models.sources import sources_of
from fedjax_bn.normalization.calls import name_of
from fedjax_bn.sharing import Variables


class Sizes(NamedTuple):
    """What the classifier reads and gives.

    Attributes:
      features: F, how many values of a sample it reads.
      classes: how many it gives.
      dtype: of the model's parameters.
      path: names of the modules that lead to its dense layer; () where it has several.
    """

    features: int
    classes: int
    dtype: jnp.dtype
    path: tuple[str, ...]


def sizes_of(model: Any, variables: Variables) -> Sizes:
    """The sizes of a model; nothing is computed.

    Args:
      model: a linen module, or what `from_nnx` makes.
      variables: its collections.

    Raises:
      ValueError: the classifier cannot be found, or several layers could be it.
    """
    plain, _ = take(variables)
    dtype = jax.tree.leaves(plain["params"])[0].dtype
    if not shows_features(model):
        path = last_dense(model, plain)
        features, classes = _leaf(plain["params"], path).shape
        return Sizes(features, classes, dtype, path)
    found = jax.ShapeDtypeStruct((2, features_read(model, plain)), dtype)
    sources = sources_of(model, plain, found, classify)
    if sources.shape is None:
        raise ValueError(
            f"the method classify of {name_of(model)} returns several arrays: let it return logits "
            "f[B, classes] alone"
        )
    ((path, _), *others) = sources.called
    return Sizes(found.shape[1], sources.shape[-1], dtype, () if others else path)


def _leaf(params: Any, path: tuple[str, ...]) -> jax.Array:
    return reduce(lambda tree, name: tree[name], path, params)["kernel"]
