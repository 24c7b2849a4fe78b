"""Mixed precision: models compute in bfloat16 and are trained in float32."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.models.classifier import Wrapped
from fedjax_bn.sharing import Variables

PyTree = Any


@dataclass(frozen=True)
class _InDtype(Wrapped):
    dtype: Any

    def apply(self, variables: Variables, images: jax.Array, **options: Any) -> Any:
        """Applies the network in `dtype` and casts the outputs to the dtype of the parameters."""
        wide = parameter_dtype(variables)
        rounded = {**variables, "params": _to(self.dtype, variables["params"])}
        result = self.network.apply(rounded, _to(self.dtype, images), **options)
        if not options.get("mutable"):
            return _to(wide, result)
        # The running statistics were not rounded, so they need no cast.
        return _to(wide, result[0]), result[1]


def in_dtype(model: Any, dtype: Any) -> _InDtype:
    """Returns the model, computing in `dtype` (mixed precision; Micikevicius et al., ICLR 2018).

        method = fedbn(in_dtype(ResNet18(), jnp.bfloat16), optax.sgd(0.1))

    Every pass rounds the images and the parameters to `dtype`, in which the layers compute. The
    variables keep their own dtype, and so do gradients, optimizer states, uploads, outputs,
    features and the loss. Batch norms compute moments and normalize in at least float32; running
    statistics are not rounded. Bfloat16 has the range of float32, so the loss needs no scaling.
    """
    return _InDtype(model, jnp.dtype(dtype))


def _to(dtype: Any, tree: PyTree) -> PyTree:
    """Casts the floating leaves of a tree."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
