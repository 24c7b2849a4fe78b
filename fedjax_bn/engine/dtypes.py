"""Explicit dtype promotion, which also works under `jax_numpy_dtype_promotion=strict`."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.sharing import FROZEN


def promote(*dtypes: Any) -> jnp.dtype:
    """Returns the dtype to which JAX promotes all, such as float64 for float64 and float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def wide(leaf: jax.Array) -> jax.Array:
    """Returns a leaf in at least float32, or integers in the default float dtype."""
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(promote(leaf.dtype, jnp.float32) if floating else jnp.result_type(float))


def parameter_dtype(variables: dict[str, Any]) -> jnp.dtype:
    """Returns the dtype of a model's parameters and of its inputs; by default JAX's float."""
    frozen = (variables.get(FROZEN) or {}).get("params")
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((variables["params"], frozen))}
    return promote(*dtypes or {jnp.result_type(float)})
