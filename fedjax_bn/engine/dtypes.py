"""Explicit dtype promotion, which also holds under `jax_numpy_dtype_promotion=strict`."""

from typing import Any

import jax
import jax.numpy as jnp


def promote(*dtypes: Any) -> jnp.dtype:
    """Returns the smallest dtype that holds all of them, such as float64 of float64 and float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def parameter_dtype(variables: dict[str, Any]) -> jnp.dtype:
    """Returns the dtype of a model's parameters, in which it is fed; without any the default."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(variables["params"])}
    return promote(*dtypes or {jnp.result_type(float)})
