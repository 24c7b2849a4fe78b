"""Mixed precision: a model that computes in bfloat16, trained in float32."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.models.features import Wrapped
from fedjax_bn.sharing import Variables

PyTree = Any


@dataclass(frozen=True)
class _InDtype(Wrapped):
    """A model whose layers compute in another dtype than that of its parameters; see `in_dtype`."""

    dtype: Any

    def apply(self, variables: Variables, images: jax.Array, **options: Any) -> Any:
        """Applies the network in the dtype; outputs are in that of the parameters again."""
        whole = parameter_dtype(variables)
        rounded = {**variables, "params": _to(self.dtype, variables["params"])}
        result = self.network.apply(rounded, _to(self.dtype, images), **options)
        if not options.get("mutable"):
            return _to(whole, result)
        # Running statistics are not rounded, so they come back as they are.
        return _to(whole, result[0]), result[1]


def in_dtype(model: Any, dtype: Any) -> _InDtype:
    """Makes the model compute in `dtype` (mixed precision; Micikevicius et al., ICLR 2018).

        method = fedbn(in_dtype(ResNet18(), jnp.bfloat16), optax.sgd(0.1))

    Every pass rounds the images and the parameters, and layers compute with these. Variables stay
    in the dtype in which they were made, and with them gradients, optimizers, running statistics
    and what is averaged; so do outputs, features and the loss. Batch norms take moments and
    normalize in float32 at least, by running statistics that are not rounded. Bfloat16 has the
    range of float32, so that no loss needs a scale.

    Args:
      model: a linen module or `models.from_nnx` of an nnx module.
      dtype: bfloat16, or another floating dtype.

    Raises:
      ValueError: `dtype` is not floating.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"a model computes in a floating dtype such as bfloat16, not {dtype!r}")
    return _InDtype(model, jnp.dtype(dtype))


def _to(dtype: Any, tree: PyTree) -> PyTree:
    """Floating leaves in another dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
