"""Explicit dtype promotion, which also works under `jax_numpy_dtype_promotion=strict`."""

from typing import Any

import jax
import jax.numpy as jnp


def promote(*dtypes: Any) -> jnp.dtype:
    """Returns the dtype to which JAX promotes all, such as float64 for float64 and float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def parameter_dtype(variables: dict[str, Any]) -> jnp.dtype:
    """Returns the dtype of a model's parameters and of its inputs; by default JAX's float."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(variables["params"])}
    return promote(*dtypes or {jnp.result_type(float)})
