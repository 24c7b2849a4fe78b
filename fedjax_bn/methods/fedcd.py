"""FedCD (Ma et al., ACM MM 2024): SCI's feature masks at the clients, REA at the server."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn import aggregation
from fedjax_bn.aggregation import Aggregate, Weighing, WeighingRule, averaging, risk_extrapolation
from fedjax_bn.arguments.choices import read_choice
from fedjax_bn.arguments.ranges import BY_KIND, Above0, AtLeast0, Range, Share, bounded
from fedjax_bn.arguments.text import names_in
from fedjax_bn.client import Trained
from fedjax_bn.engine.optimizers import check_optimizer, check_rounds, descend, start
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Gradient, LocalStep, differentiate
from fedjax_bn.methods.learning import OptionsButServer, learning, method_of
from fedjax_bn.methods.sci import Alignment, aligned_objective
from fedjax_bn.models.feature_masks import COLLECTION, Masks, with_masks
from fedjax_bn.sharing import PyTree, Variables, join
from fedjax_bn.state import Received


def _are_bounds(bounds: Sequence[float | str]) -> bool:
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError):
        return not bounds
    return all(map(BY_KIND[float].holds, (low, high))) and low < high


_BOUNDS = Range("two numbers, the lower one first, such as 0,1; empty for none", _are_bounds)


@bounded
def fedcd(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    lambda_sci: AtLeast0 = 0.7,
    eta: AtLeast0 = 0.5,
    names: str | Sequence[str] = "features",
    bounds: Annotated[Sequence[float], _BOUNDS] = (),
    mask_optimizer: optax.GradientTransformation | str = "",
    weigh: Annotated[WeighingRule | Weighing | None, risk_extrapolation] = None,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""Clients minimize their loss and the distance of their mask gradients from the global one.

    $L_e = L + \lambda \Vert g_e - g_g \Vert^2$ (SCI, Eq. 15)

    $g_e = \partial L / \partial m_e$ and $g_g = \sum_e p_e g_e$ for masks $m_e$

    $c = \mathrm{softmax}(\eta w + p)$ (REA, Eq. 18)

    A client uploads the mean of its g_e over the samples of its last local epoch. The mean of these
    uploads, weighted by the clients' shares of the samples p_e (not by c_e), is g_g in the next
    round; the first round has no penalty. Every client keeps its mask, whatever `share` is: only
    gradients of masks travel. The reported loss, and so the risk in REA, is L_e.

    The masks are the collection `mask`, which `init` adds (see `fedjax_bn.models.feature_masks`).
    Adaptations and evaluation apply the masks; an unseen client gets the mean mask. In Table 1,
    SCI alone is `weigh=by_size`, and REA alone is `fedavg(..., weigh=risk_extrapolation(eta))`.
    With lambda = 0, `mask_optimizer=optax.set_to_zero()` and `weigh=by_size` it is FedAvg. The
    paper does not state which optimizer trains the masks: here the model's.

    Args:
      lambda_sci: lambda, at least 0; the paper takes 0.5, 0.7, 0.8, 0.9 and 1.
      eta: as in `risk_extrapolation`, without effect beside `weigh`; the paper takes 0.3, 0.5 and
        0.8.
      names: what to mask: "features" (in a detector all taps, `tap0` and so on) or paths of
        modules, such as "layer4_0,layer4_1"; each gets its own mask. A name that is repeated, or
        that the model lacks, raises ValueError.
      bounds: the lowest and the highest value, to which each step clips the masks; () for any.
      mask_optimizer: the optimizer of the masks, or a text: `sgd:learning_rate=0.1`, with
        optional momentum and weight_decay, `adam:learning_rate=0.001`, with optional weight_decay,
        or `none`; "" for `optimizer`, with a separate state.
      weigh: the weighing rule; `risk_extrapolation(eta)` by default.
      model, optimizer, **options: as in `fedavg`, without `server`; `share` is `everything`.
    """
    masked = names_in(names) if isinstance(names, str) else tuple(names)
    if not masked or "" in masked or len(set(masked)) < len(masked):
        raise ValueError(f"fedcd: names={names!r} must name modules to mask, each once")
    check_optimizer(optimizer)
    of_masks = mask_optimizer or optimizer
    if isinstance(of_masks, str):
        of_masks = _mask_optimizer(of_masks)
    learned, federate_options = learning(model, **options)
    trained = ("params", COLLECTION)
    low, high = map(float, bounds or (-jnp.inf, jnp.inf))  # the configuration gives strings

    def within(masks: Masks) -> Masks:
        return jax.tree.map(lambda mask: jnp.clip(mask, low, high), masks) if bounds else masks

    def renewed(sent: Alignment, aggregate: Aggregate) -> Alignment:
        return Alignment(aggregate.message, sent.rounds + 1)

    gradient = differentiate(aligned_objective(learned, lambda_sci), trained)
    # One transformation, but each collection has its own state, even with the same optimizer.
    optimizers = {"params": optimizer, COLLECTION: of_masks}
    by_collection = optax.multi_transform(optimizers, {name: name for name in trained})
    return method_of(
        _masked_step(gradient, by_collection, within),
        keeps=COLLECTION,
        weigh=weigh or risk_extrapolation(eta),
        server=averaging(_no_gradient, renewed, aggregation.messages_by_size),
        finish=_send_gradient,
        start=lambda key, variables: with_masks(model, variables, masked),
        **federate_options,
    )


class _Progress(NamedTuple):
    """The state of the local step."""

    optimizer: PyTree  # its state for parameters and masks
    total: PyTree  # sum of g_e over the valid samples of the last local epoch so far
    count: jax.Array  # type: ignore[assignment] # i32[], the number of these samples
    rounds: jax.Array  # i32[], the server's `rounds` when the sum began


def _masked_step(
    gradient: Gradient, optimizer: optax.GradientTransformation, within: Callable[[PyTree], PyTree]
) -> LocalStep:
    """Returns a step along the gradient of L_e, which also sums g_e; `within` clips the masks."""

    def trained_of(variables: Variables) -> Variables:
        return {name: variables[name] for name in ("params", COLLECTION)}

    def init(variables: Variables) -> _Progress:
        zero = jax.tree.map(jnp.zeros_like, variables[COLLECTION])
        none = jnp.zeros((), jnp.int32)
        return _Progress(start(optimizer, trained_of(variables)), zero, none, none)

    def update(
        variables: Variables, state: _Progress, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, _Progress, jax.Array]:
        gradients, (loss, aligned) = gradient(variables, batch, received, key)
        trained, optimizer_state = descend(
            optimizer, gradients, state.optimizer, variables, received.round, loss
        )
        # Clipped after the optimizer, because its step may leave the bounds.
        trained[COLLECTION] = within(trained[COLLECTION])
        rounds = received.server.rounds
        # A client that keeps its local state still holds the sum of an earlier round: restart it.
        same_round = state.rounds == rounds
        # Earlier epochs get weight 0, not a branch, so that all steps share one program.
        count = jnp.where(batch["last_epoch"], batch["valid"].sum(dtype=jnp.int32), 0)

        def add(total: jax.Array, g: jax.Array) -> jax.Array:
            weighted = jnp.where(count > 0, g, 0) * count.astype(g.dtype)
            return jnp.where(same_round, total, 0) + weighted

        total = jax.tree.map(add, state.total, aligned.gradient)
        seen = jnp.where(same_round, state.count, 0) + count
        progress = _Progress(optimizer_state, total, seen, rounds)
        return {**variables, **aligned.moved, **trained}, progress, loss

    def check(variables: Variables, *arguments: Any) -> None:
        check_rounds(optimizer, trained_of(variables), *arguments)

    return LocalStep(init, update, check)


def _send_gradient(received: Received, trained: Trained) -> tuple[Variables, PyTree, PyTree]:
    """Makes a client's upload: the shared leaves, and its mean g_e as the message."""
    count = jnp.maximum(trained.state.count, 1)  # a client without samples sends 0
    mean = jax.tree.map(lambda total: total / count.astype(total.dtype), trained.state.total)
    return trained.variables, received.memory, mean


def _no_gradient(shared: PyTree, personal: PyTree) -> Alignment:
    # Masks are personal leaves; at the common start all clients have the same ones.
    zero = jax.tree.map(jnp.zeros_like, join(shared, personal)[COLLECTION])
    return Alignment(zero, jnp.zeros((), jnp.int32))


def _mask_optimizer(text: str) -> optax.GradientTransformation:
    """Reads `sgd:learning_rate=0.1:weight_decay=0.01`, `adam:learning_rate=0.001` or `none`."""

    def sgd(
        learning_rate: Above0, momentum: Share = 0.0, weight_decay: AtLeast0 = 0.0
    ) -> optax.GradientTransformation:
        decay = optax.add_decayed_weights(weight_decay)
        return optax.chain(decay, optax.sgd(learning_rate, momentum or None))

    def adam(learning_rate: Above0, weight_decay: AtLeast0 = 0.0) -> optax.GradientTransformation:
        return optax.chain(optax.add_decayed_weights(weight_decay), optax.adam(learning_rate))

    table = {"sgd": sgd, "adam": adam, "none": optax.set_to_zero}
    make, options = read_choice(f"fedcd: mask_optimizer={text!r}", text, table)
    return make(**options)
