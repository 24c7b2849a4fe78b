"""Local optimizers over rounds: rates by round, masks, and checks of what cannot work.

An optax transformation counts steps in its own state. A client's state starts afresh each round,
unless the client keeps it (`keep_optimizer`). The federation therefore gives it the round: every
local step passes `round` i32[], `value` (the loss f[]) and `grad` to the optimizer's update, as
optax passes extra arguments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.text import one_line
from fedjax_bn.engine.keys import stream
from fedjax_bn.sharing import Variables, path_names

PyTree = Any
# States of optax.masked and of optax.partition (multi_transform).
_BY_PARAMETER = (optax.MaskedState, optax.PartitionState)
_SCHEDULED = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)
# Others that count their own steps; the state of a scheduled weight decay has no public name.
_COUNTING = (
    *_SCHEDULED,
    type(jax.eval_shape(optax.add_decayed_weights(optax.constant_schedule(0.0)).init, 0.0)),
    optax.AddNoiseState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
)
# These act only once in several steps.
_GATHERING = (optax.MultiStepsState, optax.ApplyEvery, optax.contrib.ReduceLROnPlateauState)
# These begin with a tiny step size, and find a useful one only over some tens of steps. (`dowg`,
# `cocob` and `schedule_free` train although they start again every round.)
_ESTIMATING = (
    optax.contrib.DAdaptAdamWState,
    optax.contrib.DoGState,
    optax.contrib.MechanicState,
    optax.contrib.ProdigyState,
)


class _InRound(NamedTuple):
    """The state of `by_round`, which is the state of the round's optimizer."""

    inner: PyTree


def by_round(
    make: Callable[[jax.Array], optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Returns a local optimizer that differs from round to round.

        by_round(lambda round: optax.sgd(optax.cosine_decay_schedule(0.1, 100)(round)))

    For a rate that depends on the round and on its step, use a schedule inside: `by_round(lambda
    round: optax.sgd(lambda step: rate(round * steps + step)))`. There `step` counts from 0 in each
    round; with `keep_optimizer` it counts all steps that the client has made. The round is compiled
    once for all rounds.

    Args:
      make: `make(round)` returns the optimizer of a round, i32[] from 0 and traced. The structure
        of its state must not depend on the round.
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


def start(optimizer: optax.GradientTransformation, trained: Variables) -> PyTree:
    """Returns the optimizer's state before the first step over {collection: tree}."""
    return optimizer.init(_seen_by(optimizer, trained))


def descend(
    optimizer: optax.GradientTransformation,
    gradients: Variables,
    state: PyTree,
    variables: Variables,
    round: jax.Array | int,
    loss: jax.Array,
) -> tuple[Variables, PyTree]:
    """Makes one step of an optimizer; returns the moved collections, and its new state.

    Args:
      optimizer, state: the local optimizer and its state before the step.
      gradients: {collection: tree}; these collections of `variables` move.
      variables: the model's collections.
      round: i32[], rounds finished.
      loss: f[], the loss of the batch.
    """
    trained = {name: variables[name] for name in gradients}
    # Users' masks and labels may match the parameters alone; the engine trains collections.
    alone = _over_parameters(optimizer, trained)
    grads, params = (gradients["params"], trained["params"]) if alone else (gradients, trained)
    with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes floats and integers
        extra = {"round": jnp.asarray(round), "value": loss, "grad": grads}
        updates, state = _taking_extra(optimizer).update(grads, state, params, **extra)
    return optax.apply_updates(trained, {"params": updates} if alone else updates), state


def with_keys_of(state: PyTree, key: jax.Array) -> PyTree:
    """Returns an optimizer's state whose random keys are those of a client and round.

    Without this all clients would draw the same noise, because their states start alike.

    Args:
      state: its typed keys, and the raw ones (u32[..., 2 or 4] in a field with "key" in its name,
        as in `optax.AddNoiseState.rng_key`), are mixed with random words; other leaves stay.
      key: random key of the client and round.
    """

    def mixed(number: int, path: tuple, leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
        named = dtype == jnp.uint32 and bool(path) and "key" in path_names(path)[-1]
        if not typed and not (named and leaf.shape[-1:] in ((2,), (4,))):
            return leaf
        words = jax.random.key_data(leaf) if typed else leaf
        part_key = jax.random.fold_in(stream(key, "local optimizer"), number)
        words ^= jax.random.bits(part_key, words.shape, words.dtype)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf)) if typed else words

    leaves, form = jax.tree_util.tree_flatten_with_path(state)
    mixed_leaves = [mixed(number, *leaf) for number, leaf in enumerate(leaves)]
    return jax.tree.unflatten(form, mixed_leaves)


def by_parameter(optimizer: optax.GradientTransformation, trained: Variables) -> bool:
    """Returns whether masks or labels make the optimizer treat parameters differently."""
    state = jax.eval_shape(lambda tree: start(optimizer, tree), trained)
    return _holds(state, _BY_PARAMETER)


def scheduled(optimizer: optax.GradientTransformation) -> bool:
    """Returns whether rates change by a schedule; False if the state cannot be made here."""
    # A state's type shows schedules; a number replaces the parameters, which are unknown here.
    try:
        return _holds(optimizer.init(jnp.zeros(())), (*_SCHEDULED, _InRound))
    except Exception:  # its masks are over the parameters
        return False


def check_optimizer(optimizer: object) -> None:
    """Raises ValueError unless this is an optax transformation that a local step can call."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer={optimizer!r} is not an optax transformation: give one with its learning "
            "rate, such as optax.sgd(0.1)"
        )
    value = jnp.zeros(())
    try:
        state = optimizer.init(value)
        jax.eval_shape(lambda x: _step(optimizer, x, state), value)
    except TypeError as error:
        if "keyword" in str(error):
            raise ValueError(
                f"the local optimizer cannot be used here ({error}): a local step gives it value, "
                "grad and round; choose one that needs nothing else"
            ) from error
    except Exception:  # a mask that does not fit one number; `check_rounds` has the parameters
        pass


def check_rounds(
    optimizer: optax.GradientTransformation,
    trained: Variables,
    keep: bool,
    steps: int | None = None,
) -> None:
    """Checks that a local optimizer can work over rounds of `steps` steps.

    Args:
      optimizer, trained: the optimizer, and the {collection: tree} that it trains, or its shapes.
      keep: whether clients keep its state between rounds.
      steps: S of a round; None if not known yet.

    Raises:
      ValueError: masks fit neither the parameters nor {collection: tree}; a step needs an argument
        that local steps do not pass; a schedule, a counter or the search of a step size would start
        again every round; or the optimizer gathers gradients or losses over more steps than a round
        has.
    """
    try:
        state = jax.eval_shape(lambda tree: start(optimizer, tree), trained)
    except Exception as error:
        reason = one_line(error)
        raise ValueError(
            f"the local optimizer does not take these variables ({reason}): its masks and labels "
            "must have the form of the parameters, or of {collection: tree} with "
            f"{', '.join(sorted(trained))}"
        ) from error
    try:
        jax.eval_shape(
            lambda *arguments: _step(optimizer, *arguments), _seen_by(optimizer, trained), state
        )
    except Exception as error:
        reason = one_line(error)
        raise ValueError(
            f"the local optimizer cannot make a local step ({reason}): it gets the gradient, the "
            "parameters, value, grad and round; choose one that needs nothing else"
        ) from error
    if keep:
        return
    if _holds(state, _COUNTING, (_InRound,)):
        raise ValueError(
            "a schedule or a counter inside the local optimizer counts its own steps and starts "
            "again every round: write it over rounds with fedjax_bn.local_step.by_round, or "
            "let clients keep its state (keep_optimizer=True)"
        )
    if _holds(state, _ESTIMATING):
        raise ValueError(
            "the local optimizer (prodigy, dadapt_adamw, mechanize or dog) finds its step "
            "size from the steps that it has made and starts again every round, so that it "
            "would hardly move: let clients keep its state (keep_optimizer=True), or give a rate "
            "yourself, as in optax.adam(1e-3)"
        )
    if steps and _holds(state, _GATHERING) and not _acts(optimizer, trained, steps):
        raise ValueError(
            "the local optimizer gathers gradients or losses over more steps than the "
            f"{steps} of a round and starts again every round, so that it would never act: gather "
            f"over at most {steps} steps, or let clients keep its state (keep_optimizer=True)"
        )


def _taking_extra(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with an update that takes extra arguments."""
    # MultiSteps is not a transformation: `with_extra_args_support` would drop its extra arguments.
    if isinstance(optimizer, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    return optax.with_extra_args_support(optimizer)


def _over_parameters(optimizer: optax.GradientTransformation, trained: Variables) -> bool:
    """Returns whether the optimizer's masks are over the parameters, not {"params": ...}.

    A mask function that fits both gets the parameters.
    """
    if set(trained) != {"params"}:
        return False
    try:
        if not _holds(jax.eval_shape(optimizer.init, trained), _BY_PARAMETER):
            return False
    except Exception:  # of any kind: a mask of another structure, or a user's function
        pass
    try:
        jax.eval_shape(optimizer.init, trained["params"])
    except Exception:
        return False
    return True


def _seen_by(optimizer: optax.GradientTransformation, trained: Variables) -> PyTree:
    return trained["params"] if _over_parameters(optimizer, trained) else trained


def _holds(state: PyTree, kinds: tuple, but_in: tuple = ()) -> bool:
    """Returns whether a state holds one of `kinds`, outside of states of `but_in`."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, (*kinds, *but_in)))
    # If the state holds the hyperparameters, only scheduled ones count.
    return any(isinstance(x, kinds) and getattr(x, "hyperparams_states", True) for x in parts)


def _step(optimizer: optax.GradientTransformation, x: PyTree, state: PyTree) -> tuple:
    with jax.numpy_dtype_promotion("standard"):
        extra = {"round": jnp.zeros((), jnp.int32), "value": jnp.zeros(()), "grad": x}
        return _taking_extra(optimizer).update(x, state, x, **extra)


def _acts(optimizer: optax.GradientTransformation, trained: Variables, steps: int) -> bool:
    """Returns whether each gathering part acts within `steps` steps, with one number for a leaf.

    The gradient is 1 and the loss stays 0, so that it never gets better.
    """

    def acted(part: PyTree) -> bool:
        if isinstance(part, optax.MultiStepsState):
            return bool(part.gradient_step > 0)
        if isinstance(part, optax.contrib.ReduceLROnPlateauState):
            return bool(part.scale < 1)
        return moved

    moved = False
    # Evaluated at once, even while a round is traced: the result decides whether to raise an error.
    with jax.ensure_compile_time_eval():
        ones = jax.tree.map(lambda leaf: jnp.ones((1,) * leaf.ndim, leaf.dtype), trained)
        ones = _seen_by(optimizer, ones)
        state = optimizer.init(ones)
        for _ in range(steps):
            updates, state = _step(optimizer, ones, state)
            moved = moved or any(bool(jnp.any(x != 0)) for x in jax.tree.leaves(updates))
        parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, _GATHERING))
        return all(acted(part) for part in parts if isinstance(part, _GATHERING))
