"""Code for XLA:CPU, and the one place that determines the platform of a traced program.

It is asked while a program is traced, before JAX knows for which platform it lowers the program.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from fedjax_bn.engine.dtypes import promote

PyTree = Any
_SMALL = 2**18  # numbers of a leaf that a GPU tests together with others
_LANES = 128  # of a TPU; a narrower matrix gains nothing by a product
# Part of the keys of JAX's trace cache, so that a trace is never reused for another platform.
_traced_for = jax.make_user_context(None)


def traced_for(platform: str) -> AbstractContextManager[None]:
    """Returns a context in which programs are traced for a platform such as "cuda" or "tpu".

        with traced_for("cuda"):
            exported = jax.export.export(method.round, platforms=("cuda",))(state, batches, key)

    Without it a program exported on a machine without accelerator has the kernels for CPU.
    """
    return _traced_for(platform)


def on_cpu() -> bool:
    """Returns whether programs are traced for CPU, where some operations need other forms."""
    return _platform() == "cpu"


def on_tpu() -> bool:
    """Returns whether programs are traced for TPU."""
    return _platform() == "tpu"


def on_gpu() -> bool:
    """Returns whether programs are traced for a GPU, by CUDA or ROCm."""
    return _platform() in ("gpu", "cuda", "rocm")


def _platform() -> str:
    """Returns the platform of `traced_for`, else of `jax.default_device`, else JAX's default."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined,unused-ignore]
    default = getattr(device, "platform", device) or jax.default_backend()
    return _traced_for.value or default


def computed_once(tree: PyTree) -> PyTree:
    """Returns the same arrays; on CPU a program computes them once, not again for each reader."""
    # XLA:CPU copies a chain of cheap operations into each of its readers, which takes longer to
    # compile and, if a reader's loop is longer than the arrays, to run.
    if not on_cpu():
        return tree
    with set_xla_metadata(inlineable="false"):
        return _itself(tree)


@jax.jit
def _itself(tree: PyTree) -> PyTree:
    return jax.lax.optimization_barrier(tree)


def for_one_run(function: Callable[..., PyTree], **options: Any) -> Callable[..., PyTree]:
    """Returns `jax.jit` of a function that runs once: on CPU it compiles in a third of the time."""
    options = {"compiler_options": less_optimized() or None} | options
    compiled = jax.jit(function, **options)

    def call(*arguments: PyTree) -> PyTree:
        # Inside another program, such as under `jax.eval_shape`, that program's options apply.
        inside = isinstance(jnp.zeros(()), jax.core.Tracer)
        return (function if inside else compiled)(*arguments)

    return call


def less_optimized() -> dict[str, Any]:
    """Returns XLA's options for CPU; {} elsewhere, or if JAX's optimizations are switched off."""
    if on_cpu() and not jax.config.read("jax_disable_most_optimizations"):
        return {"xla_backend_optimization_level": 1}
    return {}


def wait_for_all(gradients: PyTree) -> PyTree:
    """Returns the same gradients; on CPU none of them is ready before all are."""
    # Otherwise XLA:CPU copies a large weight in every step, because its update might run before the
    # last reader of the old value (10 % of a step of DigitCNN, and 51 MB).
    floating = [g for g in jax.tree.leaves(gradients) if g.size]
    if not floating or not on_cpu():
        return gradients
    dtype = promote(*{g.dtype for g in floating})
    largest = jnp.stack([g.ravel()[0].astype(dtype) for g in floating]).max()
    never = computed_once(largest > jnp.inf)  # never True, even for NaN, and not folded by XLA
    return jax.tree.map(lambda g: jnp.where(never, 0, g), gradients)


def where_tree(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """Returns `yes` if the condition bool[] holds, else `no`, leaf by leaf."""
    # Without this XLA:CPU computes the condition again for each leaf.
    condition = computed_once(condition)
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _finite(leaf: jax.Array) -> jax.Array:
    """Returns whether all numbers are finite, by a matrix product where that is faster."""
    rows = leaf.reshape(-1, leaf.shape[-1] if leaf.ndim else 1)
    if on_cpu():
        # The product of a row with zeros is NaN, which is not 0, if a number is not finite.
        return (rows @ jnp.zeros(rows.shape[1], leaf.dtype) == 0).all()
    if not on_tpu() or min(rows.shape) < _LANES:
        return jnp.isfinite(leaf).all()
    # Sums of numbers so small that finite ones cannot overflow. Eight times the same sums, because
    # XLA does not multiply by a single row.
    small = rows * jnp.asarray(1e-30, leaf.dtype)
    return jnp.isfinite(jnp.ones((8, rows.shape[0]), leaf.dtype) @ small).all()


def _finite_on_gpu(leaves: list[jax.Array]) -> list[jax.Array]:
    """Returns whether all numbers are finite of each large leaf, and of 64 small ones together."""
    # A convolution's kernel is in memory by output channel; in this order it needs no transpose.
    ordered = [jnp.moveaxis(leaf, -1, 0) if leaf.ndim > 2 else leaf for leaf in leaves]
    small = [jnp.isfinite(leaf).ravel() for leaf in ordered if leaf.size <= _SMALL]
    groups = [jnp.concatenate(small[start : start + 64]) for start in range(0, len(small), 64)]
    large = [jnp.isfinite(leaf).all() for leaf in leaves if leaf.size > _SMALL]
    # Without the barrier XLA would reduce every small leaf by itself, in a kernel of its own.
    return large + [jax.lax.optimization_barrier(answers).all() for answers in groups]


def all_finite(tree: PyTree) -> jax.Array:
    """Returns whether all floating numbers of a tree are finite, bool[]."""
    leaves = [x for x in jax.tree.leaves(tree) if x.size]
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    answers = _finite_on_gpu(floating) if on_gpu() else [_finite(leaf) for leaf in floating]
    stacked = jnp.stack(answers or [jnp.array(True)])
    # Without the barrier XLA combines the answers again for each leaf that is selected by them:
    # with the 600 leaves of DenseNet121 this was 4/5 of a round's compilation.
    return jax.lax.optimization_barrier(stacked).all()
