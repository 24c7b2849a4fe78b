"""The one place that asks which machine a program is traced for.

Code made for CPU (`models.cpu`, `normalization.instance`, `wait_for_all`) asks here and is plain
XLA on any other backend.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_bn.dtypes import promote

PyTree = Any


def on_cpu() -> bool:
    """Whether programs are compiled for CPU, where XLA needs other forms of some operations."""
    return jax.default_backend() == "cpu"


def wait_for_all(gradients: PyTree) -> PyTree:
    """The same gradients; on CPU none of them is ready before all are.

    Without it XLA:CPU copies a large weight in every step, because its update might run before the
    last reader of the old value (10 % of a step of DigitCNN, and 51 MB).
    """
    floating = [g for g in jax.tree.leaves(gradients) if g.size]
    if not floating or not on_cpu():
        return gradients
    dtype = promote(*{g.dtype for g in floating})
    largest = jnp.stack([g.ravel()[0].astype(dtype) for g in floating]).max()
    never = largest > jnp.inf  # a comparison that no compiler folds, NaN included
    return jax.tree.map(lambda g: jnp.where(never, 0, g), gradients)
