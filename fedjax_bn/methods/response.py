"""How far a local optimizer walks: its response to a constant gradient.

SCAFFOLD and FedDC divide a client's way x - y_k by tau_k times the learning rate to get its mean
gradient, FedNova by the sum of the factors with which its gradients entered (Wang et al. 2020,
Section 4.1). An optax transformation tells neither, but both are its response: the way that one
parameter goes down in tau steps under a gradient that is always 1.

    SGD                          r(tau) = lr tau
    SGD with momentum rho        r(tau) = lr sum_{j=1..tau} (1 - rho^j) / (1 - rho)

It is exact for every optimizer that is linear in its gradients (SGD with momentum, Nesterov's too,
schedules). Weight decay counts as part of the gradient. For others (Adam) it is the nominal way.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.dtypes import promote


def response(
    optimizer: optax.GradientTransformation, steps: jax.Array, most: int, dtype: Any
) -> jax.Array:
    """r(steps) f[], the way under a constant gradient of 1 from a fresh optimizer's state.

    Args:
      optimizer: the local optimizer.
      steps: i32[], from 0 to `most`.
      most: the largest number of steps.
      dtype: floating dtype of the parameters.
    """
    weight, one = jnp.zeros((), dtype), jnp.ones((), dtype)

    def walk(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
        way, state = carry
        with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
            # The weight is held at 0, so that its decay adds nothing.
            update, new = optimizer.update(one, state, weight)
        go = step < steps
        return (jnp.where(go, way - update.astype(dtype), way), new), None

    start = (jnp.zeros((), dtype), optimizer.init(weight))
    (way, _), _ = jax.lax.scan(walk, start, jnp.arange(most, dtype=steps.dtype))
    return way


def check_fresh(method: str, optimizer: optax.GradientTransformation, options: dict) -> None:
    """Raises ValueError where a response would be that of another optimizer's state.

    Args:
      method: for the message.
      optimizer: the local optimizer.
      options: those of `federation.federate`.
    """
    if options.get("keep_optimizer") and jax.tree.leaves(optimizer.init(jnp.zeros(()))):
        raise ValueError(
            f"{method}: keep_optimizer=True lets clients keep momentum between rounds, but "
            f"{method} divides by the way of an optimizer that starts afresh: leave it out, or use "
            "SGD without momentum"
        )


def dtype_of(tree: Any) -> Any:
    """The dtype that holds all leaves of a tree; the default float where there is none."""
    return promote(*{leaf.dtype for leaf in jax.tree.leaves(tree)} or {jnp.result_type(float)})
