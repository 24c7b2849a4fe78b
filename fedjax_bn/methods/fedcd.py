"""FedCD (Ma et al., ACM MM 2024): SCI's feature masks at the clients, REA at the server."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import (
    Aggregate,
    ServerState,
    ServerUpdate,
    Weighing,
    WeighingRule,
    averaging,
    cast_like,
    messages_by_size,
    risk_extrapolation,
)
from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.client import Trained
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_optimizer import check_rounds, start
from fedjax_bn.local_step import Batch, Gradient, LocalStep, check_optimizer, descend, differentiate
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of
from fedjax_bn.methods.mask_training import Bounds, keep_within, mask_names, mask_optimizer_of
from fedjax_bn.methods.sci import Alignment, aligned_objective
from fedjax_bn.models.masks import COLLECTION, keep_masks, with_masks
from fedjax_bn.sharing import Variables, everything, join
from fedjax_bn.state import Received

PyTree = Any


@bounded
def fedcd(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    lambda_sci: AtLeast0 = 0.7,
    eta: AtLeast0 = 0.5,
    names: str | Sequence[str] = "features",
    bounds: Bounds | Sequence[float] = "",
    mask_optimizer: optax.GradientTransformation | str = "",
    weigh: Annotated[WeighingRule | Weighing | None, risk_extrapolation] = None,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    """Clients minimize L_e = L + lambda ||g_e - g_g||^2 (SCI, Eq. 15), averaged by their risks.

        g_e = dL / dmask_e,    g_g = sum_e p_e g_e,    c = softmax(eta w + p)   (REA, Eq. 18)

    A client uploads the mean of its g_e over the samples of its last local epoch, and their mean
    with the sizes' shares p_e (not c_e) is g_g in the next round; the first round has no penalty.
    Every client keeps its mask, whatever `share` says: only gradients of masks travel. The
    reported loss, and so the risk in REA, is L_e.

    The masks are the collection `mask`, which `init` adds (see `fedjax_bn.models.masks`);
    adaptations and evaluation apply it, with the mean mask for an unseen client. The rows of Table
    1 are `weigh=by_size` (SCI alone) and `fedavg(..., weigh=risk_extrapolation(eta))` (REA alone).
    With lambda = 0, `mask_optimizer=optax.set_to_zero()` and `weigh=by_size` it is FedAvg.

    The paper does not say what trains the masks. Here the model's optimizer does, and they grow,
    where those of its Fig. 3 shrink; a weight decay of 0.01 shrinks them (docs/results.md).

    Args:
      model: images -> outputs; `fedjax_bn.models.features` says what its features are.
      optimizer: the local optimizer.
      lambda_sci: lambda, at least 0; the paper takes 0.5, 0.7, 0.8, 0.9 and 1.
      eta: as in `risk_extrapolation`; the paper takes 0.3, 0.5 and 0.8.
      names: what is masked, "features" (of a detector all its taps, `tap0` and so on) or paths of
        modules, "layer4_0,layer4_1"; each has a mask.
      bounds: "LOW,HIGH", within which each step leaves the masks; "" for any values.
      mask_optimizer: that of the masks, or what spells it, see `mask_training.mask_optimizer_of`;
        "" for `optimizer`, with a state of its own.
      weigh: the weighing rule; `risk_extrapolation(eta)` by default.
      **options: those of `fedavg` but `server`; `share` is `everything` by default.

    Raises:
      ValueError: an argument is out of its range, nothing is named, or both `weigh` and another
        `eta` are given; at `init`, where the model
        has no intermediate of a name.
    """
    if weigh is not None and eta != inspect.signature(fedcd).parameters["eta"].default:
        raise ValueError(
            f"fedcd.eta={eta:g} is of no use beside weigh, which replaces it: give it to the rule "
            f"(weigh=risk_extrapolation:eta={eta:g}), or leave out one of them"
        )
    names, within = mask_names(names), keep_within(bounds)
    check_optimizer(optimizer)
    of_masks = mask_optimizer or optimizer
    if isinstance(of_masks, str):
        of_masks = mask_optimizer_of(of_masks)
    learned, rest = learning(model, **options)
    trained = ("params", COLLECTION)
    gradient = differentiate(aligned_objective(learned, lambda_sci), trained)
    optimizers = {"params": optimizer, COLLECTION: of_masks}
    each = optax.multi_transform(optimizers, {name: name for name in trained})
    method = method_of(
        masked_step(gradient, each, within),
        share=keep_masks(rest.pop("share", everything)),
        weigh=weigh or risk_extrapolation(eta),
        server=_averaging_gradients(),
        finish=_send_gradient,
        **rest,
    )

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        return method.init(key, with_masks(model, variables, names), num_clients)

    return method._replace(init=init)


class Progress(NamedTuple):
    """The state of the local step.

    Attributes:
      optimizer: that of parameters and masks.
      total: sum of g_e over the valid samples of the last local epoch so far.
      count: i32[], how many these are.
      rounds: i32[], the server's `rounds` when the sum began.
    """

    optimizer: PyTree
    total: PyTree
    count: jax.Array  # type: ignore[assignment]
    rounds: jax.Array


def masked_step(
    gradient: Gradient,
    optimizer: optax.GradientTransformation,
    within: Callable[[PyTree], PyTree] = lambda masks: masks,
) -> LocalStep:
    """One step of parameters and masks along the gradient of L_e; it sums up g_e.

    Args:
      gradient: that of L_e, of parameters and masks.
      optimizer: of both.
      within: what follows a step of the masks, such as `keep_within("0,1")`.
    """

    def trained_of(variables: Variables) -> Variables:
        return {name: variables[name] for name in ("params", COLLECTION)}

    def init(variables: Variables) -> Progress:
        zero = jax.tree.map(jnp.zeros_like, variables[COLLECTION])
        none = jnp.zeros((), jnp.int32)
        return Progress(start(optimizer, trained_of(variables)), zero, none, none)

    def update(
        variables: Variables, state: Progress, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, Progress, jax.Array]:
        gradients, (loss, aligned) = gradient(variables, batch, received, key)
        trained, kept = descend(
            optimizer, gradients, state.optimizer, variables, received.round, loss
        )
        trained[COLLECTION] = within(trained[COLLECTION])
        rounds = received.server.rounds
        total, count = _add_gradient(state, aligned.gradient, batch, rounds)
        return {**variables, **aligned.moved, **trained}, Progress(kept, total, count, rounds), loss

    def check(variables: Variables, *rest: Any) -> None:
        check_rounds(optimizer, trained_of(variables), *rest)

    return LocalStep(init, update, check)


def _add_gradient(
    state: Progress, gradient: PyTree, batch: Batch, rounds: jax.Array
) -> tuple[PyTree, jax.Array]:
    """The sum of g_e over valid samples of the last local epoch, and their number.

    A sum that another round began, of a client that keeps its local state, starts anew.
    """
    old = state.rounds == rounds
    count = jnp.where(batch["last_epoch"], batch["valid"].sum(dtype=jnp.int32), 0)

    def add(total: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.where(old, total, 0) + jnp.where(count > 0, g, 0) * count.astype(g.dtype)

    return jax.tree.map(add, state.total, gradient), jnp.where(old, state.count, 0) + count


def _send_gradient(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """A client's last act: it sends its mean g_e beside the shared leaves."""
    count = jnp.maximum(trained.state.count, 1)
    mean = jax.tree.map(lambda total: total / count.astype(total.dtype), trained.state.total)
    return trained.variables, received.memory, mean


def _averaging_gradients() -> ServerUpdate:
    """Averaging that sends g_g, the mean of the clients' g_e with the shares of their sizes."""
    plain = averaging()

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        own = join(shared, personal)[COLLECTION]
        zero = jax.tree.map(jnp.zeros_like, own)
        return ServerState(sent=Alignment(zero, jnp.zeros((), jnp.int32)))

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        mean, _ = plain.update(shared, aggregate, state)
        gradient = cast_like(aggregate.message, state.sent.gradient)
        return mean, ServerState(sent=Alignment(gradient, state.sent.rounds + 1))

    return ServerUpdate(init, update, message_weight=messages_by_size)
