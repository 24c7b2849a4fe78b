"""Local optimizers over rounds: rates by round, masks, response, and checks of what cannot work.

An optax transformation counts steps in its own state, which starts afresh each round unless the
client keeps it (`keep_optimizer`). Therefore every local step passes `round` i32[], `value` (the
loss f[]) and `grad` to the optimizer's update, as optax passes extra arguments.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_bn.arguments.text import one_line
from fedjax_bn.sharing import Variables, join, split_like

PyTree = Any
_Optimizer: TypeAlias = optax.GradientTransformation
# States of optax.masked and of optax.partition (multi_transform).
_BY_PARAMETER = (optax.MaskedState, optax.PartitionState)
# States that count their own steps; that of a scheduled weight decay has no public name.
_COUNTING = (
    optax.ScaleByScheduleState,
    optax.InjectStatefulHyperparamsState,
    type(jax.eval_shape(optax.add_decayed_weights(optax.constant_schedule(0.0)).init, 0.0)),
    optax.AddNoiseState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
    optax.ApplyEvery,
    optax.contrib.ReduceLROnPlateauState,
    # These begin with a tiny step size, and find a useful one only over some tens of steps.
    # (`dowg`, `cocob` and `schedule_free` train although they start again every round.)
    optax.contrib.DAdaptAdamWState,
    optax.contrib.DoGState,
    optax.contrib.MechanicState,
    optax.contrib.ProdigyState,
)


class _InRound(NamedTuple):
    """The state of `by_round`."""

    inner: PyTree  # the state of the round's optimizer


def by_round(make: Callable[[jax.Array], _Optimizer]) -> optax.GradientTransformationExtraArgs:
    """Returns a local optimizer that differs from round to round.

        by_round(lambda round: optax.sgd(optax.cosine_decay_schedule(0.1, 100)(round)))

    `make(round)` returns the optimizer of a round, i32[] from 0 and traced, so that all rounds are
    one program; the structure of its state must not depend on the round. A schedule inside counts
    steps from 0 in each round; with `keep_optimizer` all steps that the client has made.
    """

    def init(params: PyTree) -> _InRound:
        with jax.numpy_dtype_promotion("standard"):  # a schedule mixes floats and integers
            return _InRound(make(jnp.zeros((), jnp.int32)).init(params))

    def update(
        updates: PyTree, state: _InRound, params: PyTree = None, *, round: jax.Array, **extra: Any
    ) -> tuple[PyTree, _InRound]:
        with jax.numpy_dtype_promotion("standard"):
            optimizer = _taking_extra(make(round))
            updates, inner = optimizer.update(updates, state.inner, params, round=round, **extra)
        return updates, _InRound(inner)

    return optax.GradientTransformationExtraArgs(init, update)


def start(optimizer: _Optimizer, trained: Variables) -> PyTree:
    """Returns the optimizer's state before the first step over {collection: tree}."""
    return optimizer.init(_seen_by(optimizer, trained))


def descend(
    optimizer: _Optimizer,
    gradients: Variables,
    state: PyTree,
    variables: Variables,
    round: jax.Array | int,
    loss: jax.Array,
) -> tuple[Variables, PyTree]:
    """Makes one step of an optimizer; returns the collections of `gradients`, and its new state.

    `round` i32[] are the rounds finished, `loss` f[] is the batch's.
    """
    trained = {name: variables[name] for name in gradients}
    # Users' masks and labels may match the parameters alone; the engine trains collections.
    alone = _over_parameters(optimizer, trained)
    grads, params = (gradients["params"], trained["params"]) if alone else (gradients, trained)
    updates, state = _step(optimizer, grads, state, params, jnp.asarray(round), loss)
    return optax.apply_updates(trained, {"params": updates} if alone else updates), state


def check_optimizer(optimizer: object) -> None:
    """Raises ValueError unless this is an optax transformation."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(f"optimizer={optimizer!r} is not optax's: give, say, optax.sgd(0.1)")


def check_rounds(optimizer: _Optimizer, trained: Variables, keep: bool) -> None:
    """Raises ValueError if an optimizer cannot step, or counts steps that clients do not `keep`."""
    try:
        state = jax.eval_shape(lambda tree: start(optimizer, tree), trained)
        seen, count = _seen_by(optimizer, trained), jnp.zeros((), jnp.int32)
        jax.eval_shape(lambda x, state: _step(optimizer, x, state, x, count, 0.0), seen, state)
    except Exception as error:
        fault = f"the local optimizer cannot step ({one_line(error)})"
        form = f"the form of the parameters, or of {{collection: tree}} with {sorted(trained)}"
        raise ValueError(f"{fault}: masks and labels must have {form}") from error
    if not keep and _holds(state, _COUNTING, (_InRound,)):
        fault = "the local optimizer counts steps, and would start again every round"
        remedy = "set keep_optimizer=True, or write the schedule by fedjax_bn.local_step.by_round"
        raise ValueError(f"{fault}: {remedy}")


def response(
    optimizer: _Optimizer, steps: jax.Array, most_steps: int, dtype: Any, received: Any
) -> PyTree:
    r"""Returns how far a fresh optimizer moves a parameter in some steps if its gradient is 1.

    $r(\tau) = lr \sum_{j=1}^\tau (1 - \rho^j) / (1 - \rho)$ for SGD with momentum $\rho$

    SCAFFOLD and FedDC divide a client's change x - y_k by it to get its mean gradient, FedNova to
    normalize the change (Wang et al. 2020, Section 4.1). It is exact for optimizers that are linear
    in their gradients (SGD, at the rates of the round), and nominal for others (Adam). Weight decay
    is a part of gradients, and so is clipping: the gradients of the mean are clipped ones.

    `steps` is i32[], at most `most_steps`. The response is f[], or a tree of f[1, ..., 1] if masks
    or labels make the optimizer treat parameters differently.
    """
    round, trained = jnp.asarray(received.round), {"params": jnp.zeros((), dtype)}
    params = join(received.shared, received.personal)["params"]
    fresh_state = jax.eval_shape(lambda tree: start(optimizer, tree), {"params": params})
    if _holds(fresh_state, _BY_PARAMETER):
        trained = {"params": jax.tree.map(lambda x: jnp.zeros((1,) * x.ndim, dtype), params)}
    value = jnp.zeros((), dtype)
    with jax.ensure_compile_time_eval():
        size = _unclipped_size(optimizer, jax.tree.map(lambda x: np.zeros(x.shape, dtype), trained))
    gradients = jax.tree.map(lambda x: jnp.full_like(x, size), trained)

    def walk(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
        way, state = carry
        # The weight is 0 in every step: its decay adds nothing, and the new weight is the update.
        update, state_after = descend(optimizer, gradients, state, trained, round, value)
        go = step < steps
        further = jax.tree.map(lambda w, u: jnp.where(go, w - u.astype(dtype), w), way, update)
        return (further, state_after), None

    # One number for each parameter suffices: the gradient is 1 in all its entries.
    begin = (trained, start(optimizer, trained))
    (way, _), _ = jax.lax.scan(walk, begin, jnp.arange(most_steps, dtype=steps.dtype))
    return way["params"] if size == 1 else jax.tree.map(lambda w: w / size, way["params"])


def _unclipped_size(optimizer: _Optimizer, zeros: PyTree) -> float:
    """Returns the size of gradients for `response`: 1, or a smaller one if a clip changes 1."""

    def moved(size: float) -> list[np.ndarray]:
        gradients = jax.tree.map(lambda x: jnp.full_like(x, size), zeros)
        state = start(optimizer, zeros)
        step, _ = descend(optimizer, gradients, state, zeros, 0, jnp.zeros(()))
        return [np.asarray(x) / size for x in jax.tree.leaves(step)]

    # Powers of 2, so that what is linear in small gradients (SGD, not Adam) is so exactly.
    of_one, small, smaller = moved(1.0), moved(2.0**-20), moved(2.0**-21)
    is_linear = all(map(np.array_equal, small, smaller))
    return 2.0**-20 if is_linear and not all(map(np.array_equal, of_one, small)) else 1.0


def for_each(way: PyTree, like: PyTree) -> PyTree:
    """Returns the response of each leaf of `like`, the shared parameters."""
    if isinstance(way, jax.Array):
        return jax.tree.map(lambda leaf: way, like)
    return split_like(way, like)[0]


def check_fresh(method: str, optimizer: _Optimizer, options: Mapping[str, Any]) -> None:
    """Raises ValueError if clients keep a momentum, which a fresh optimizer's response lacks."""
    with suppress(Exception):  # masks may be over parameters that are not known yet
        # A state without arrays, as of plain SGD, is the same whether it is kept or made anew.
        if not jax.tree.leaves(optimizer.init(jnp.zeros(()))):
            return
    if options.get("keep_optimizer"):
        fault = f"{method} divides by the response of a fresh optimizer"
        remedy = "leave it out, or use SGD without momentum"
        raise ValueError(f"{fault}, and keep_optimizer=True keeps its momentum: {remedy}")


def _taking_extra(optimizer: _Optimizer) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with an update that takes extra arguments."""
    # MultiSteps is not a transformation: `with_extra_args_support` would drop its extra arguments.
    if isinstance(optimizer, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    return optax.with_extra_args_support(optimizer)


def _step(
    optimizer: _Optimizer,
    gradients: PyTree,
    state: PyTree,
    params: PyTree,
    round: jax.Array,
    loss: jax.Array | float,
) -> tuple[PyTree, PyTree]:
    extra = {"round": round, "value": jnp.asarray(loss), "grad": gradients}
    with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
        return _taking_extra(optimizer).update(gradients, state, params, **extra)


def _over_parameters(optimizer: _Optimizer, trained: Variables) -> bool:
    """Returns whether masks are over the parameters, not {"params": ...}; over both: the first."""
    if set(trained) != {"params"}:
        return False
    # Errors are of any kind: a mask of another structure, or a user's function.
    with suppress(Exception):
        if not _holds(jax.eval_shape(optimizer.init, trained), _BY_PARAMETER):
            return False
    with suppress(Exception):
        jax.eval_shape(optimizer.init, trained["params"])
        return True
    return False


def _seen_by(optimizer: _Optimizer, trained: Variables) -> PyTree:
    return trained["params"] if _over_parameters(optimizer, trained) else trained


def _holds(state: PyTree, kinds: tuple, but_in: tuple = ()) -> bool:
    """Returns whether a state holds one of `kinds`, outside of states of `but_in`."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, (*kinds, *but_in)))
    # If the state holds the hyperparameters, only scheduled ones count.
    return any(isinstance(x, kinds) and getattr(x, "hyperparams_states", True) for x in parts)
