"""How large a network's features and outputs are, read from its variables."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.models.features import shows_features
from fedjax_bn.models.masks import FEATURES, take, with_masks
from fedjax_bn.normalization import normalize_with, running_statistics
from fedjax_bn.normalization.calls import Call, intercepting
from fedjax_bn.sharing import Variables, path_names


class Sizes(NamedTuple):
    """What the classifier reads and gives.

    Attributes:
      features: F, how many values of a sample it reads.
      classes: how many it gives.
      dtype: of the model's parameters.
      path: names of the modules that lead to its dense layer, the first one where it has several.
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
      ValueError: the size of the features cannot be found.
    """
    plain, _ = take(variables)
    mask = with_masks(model, plain, (FEATURES,))["mask"][FEATURES]
    if not shows_features(model):
        leaves = jax.tree_util.tree_leaves_with_path(plain["params"])
        kernels = {path_names(path)[:-1]: k for path, k in leaves if _is_dense(path, k)}
        read = {kernel.shape[0] for kernel in kernels.values()}
        path, last = next(
            (path, k)
            for path, k in kernels.items()
            if len(k) == len(mask) and k.shape[1] not in read
        )
        return Sizes(len(mask), last.shape[1], mask.dtype, path)
    found = []

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        if call.kernel is not None and call.method == "__call__":
            found.append(call.path)
        return function(*args, **kwargs)

    def classify(variables: Variables, features: jax.Array) -> jax.Array:
        return model.apply(variables, features, method=lambda model, x: model.classify(x))

    features = jax.ShapeDtypeStruct((2, len(mask)), mask.dtype)
    with intercepting(note), normalize_with(running_statistics):
        logits = jax.eval_shape(classify, plain, features)
    return Sizes(len(mask), logits.shape[-1], mask.dtype, found[0])


def _is_dense(path: tuple, leaf: jax.Array) -> bool:
    return path_names(path)[-1] == "kernel" and leaf.ndim == 2
