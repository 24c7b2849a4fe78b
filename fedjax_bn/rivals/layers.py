"""Dense layers of methods, at their start and applied."""

from typing import Any

import jax

PyTree = Any


def dense(key: jax.Array, inputs: int, outputs: int, dtype: Any) -> PyTree:
    """Returns {"kernel": f[inputs, outputs], "bias": f[outputs]} as PyTorch starts a layer.

    All numbers are from U(-1/sqrt(inputs), 1/sqrt(inputs)).
    """
    kernel_key, bias_key = jax.random.split(key)
    bound = inputs**-0.5
    return {
        "kernel": jax.random.uniform(kernel_key, (inputs, outputs), dtype, -bound, bound),
        "bias": jax.random.uniform(bias_key, (outputs,), dtype, -bound, bound),
    }


def affine(layer: PyTree, x: jax.Array) -> jax.Array:
    """Returns x W + b in the dtype of x, for a `dense` layer and x f[..., inputs]."""
    return x @ layer["kernel"].astype(x.dtype) + layer["bias"].astype(x.dtype)
