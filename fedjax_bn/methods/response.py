r"""How far a local optimizer moves: its response to a constant gradient.

SCAFFOLD and FedDC divide a client's change x - y_k by tau_k times the learning rate to get its mean
gradient. FedNova divides it by the sum of the factors with which the gradients enter the change
(Wang et al. 2020, Section 4.1). An optax transformation exposes neither number, but both are its
response: the distance that a parameter moves down in tau steps if its gradient is always 1.

$r(\tau) = lr \, \tau$ for SGD

$r(\tau) = lr \sum_{j=1}^\tau (1 - \rho^j) / (1 - \rho)$ for SGD with momentum $\rho$

It is exact for every optimizer that is linear in its gradients (SGD, also with momentum, Nesterov's
momentum or schedules), at the rates of the round; for others (Adam) it is nominal. If masks or
labels treat parameters differently, each has its own response. Weight decay is a part of gradients.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.engine.optimizers import by_parameter, descend, start
from fedjax_bn.sharing import PyTree, join, split_like
from fedjax_bn.state import Received


def response(
    optimizer: optax.GradientTransformation,
    steps: jax.Array,
    most_steps: int,
    dtype: Any,
    received: Received,
) -> PyTree:
    """Returns r(steps), the distance under a constant gradient of 1 from a fresh optimizer's state.

    `steps` is i32[], at most `most_steps`, and `dtype` that of the parameters. The response is
    f[], or a tree of f[1, ..., 1] if the optimizer treats parameters differently.
    """
    round, trained = jnp.asarray(received.round), {"params": jnp.zeros((), dtype)}
    params = join(received.shared, received.personal)["params"]
    if by_parameter(optimizer, {"params": params}):
        trained = {"params": jax.tree.map(lambda x: jnp.zeros((1,) * x.ndim, dtype), params)}
    ones, value = jax.tree.map(jnp.ones_like, trained), jnp.zeros((), dtype)

    def walk(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
        way, state = carry
        # The weight is 0 in every step: its decay adds nothing, and the new weight is the update.
        update, state_after = descend(optimizer, ones, state, trained, round, value)
        go = step < steps
        further = jax.tree.map(lambda w, u: jnp.where(go, w - u.astype(dtype), w), way, update)
        return (further, state_after), None

    # One number for each parameter suffices: the gradient is 1 in all its entries.
    begin = (trained, start(optimizer, trained))
    (way, _), _ = jax.lax.scan(walk, begin, jnp.arange(most_steps, dtype=steps.dtype))
    return way["params"]


def for_each(way: PyTree, like: PyTree) -> PyTree:
    """Returns the response of each leaf of `like`, the shared parameters."""
    if isinstance(way, jax.Array):
        return jax.tree.map(lambda leaf: way, like)
    return split_like(way, like)[0]


def check_fresh(
    method: str, optimizer: optax.GradientTransformation, options: Mapping[str, Any]
) -> None:
    """Raises ValueError if clients keep a momentum, which a fresh optimizer's response lacks."""
    # A state without arrays, as of plain SGD, is the same whether it is kept or made anew.
    try:
        remembers = bool(jax.tree.leaves(optimizer.init(jnp.zeros(()))))
    except Exception:  # its masks are over parameters that are not known yet
        remembers = True
    if options.get("keep_optimizer") and remembers:
        raise ValueError(
            f"{method}: keep_optimizer=True keeps a momentum, but {method} divides by the response "
            "of a fresh optimizer: leave it out, or use SGD without momentum"
        )
