"""The one place that asks which machine a program is traced for.

Code made for CPU (`models.cpu`, `normalization.instance`, `wait_for_all`) asks here and is plain
XLA on any other backend.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from fedjax_bn.dtypes import promote

PyTree = Any


def on_cpu() -> bool:
    """Whether programs are compiled for CPU, where XLA needs other forms of some operations."""
    return jax.default_backend() == "cpu"


def computed_once(tree: PyTree) -> PyTree:
    """The same arrays; on CPU a program computes them once, not anew in every loop that reads them.

    XLA:CPU copies a chain of cheap operations into each of its readers, which takes time to compile
    where there are many, and to run where a reader's loop is longer than the arrays.
    """
    if not on_cpu():
        return tree
    with set_xla_metadata(inlineable="false"):
        return _itself(tree)


@jax.jit
def _itself(tree: PyTree) -> PyTree:
    return jax.lax.optimization_barrier(tree)


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
    never = computed_once(largest > jnp.inf)  # no compiler folds this comparison, NaN included
    return jax.tree.map(lambda g: jnp.where(never, 0, g), gradients)
