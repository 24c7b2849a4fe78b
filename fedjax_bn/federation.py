"""The heart: a federated method is a pair of pure functions, and `federate` makes one.

A federation is K clients. The variables of their models are split by a sharing rule into shared
leaves (one copy) and personal leaves (stacked, leading axis K). One call of `round` broadcasts the
shared leaves, trains every client, averages what is shared and leaves what is personal.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_bn import local
from fedjax_bn.aggregation import (
    ServerUpdate,
    WeighingRule,
    averaging,
    by_size,
    normalize,
    weighted_mean,
)
from fedjax_bn.clients import group_size, map_clients
from fedjax_bn.data.images import Prepare, standardize
from fedjax_bn.local import Objective, Received, cross_entropy, masked_mean, select
from fedjax_bn.sharing import SharingRule, Variables, everything, join, split, split_like

PyTree = Any
Metrics = dict[str, jax.Array]


class FederatedState(NamedTuple):
    """All that a federation remembers between rounds.

    Attributes:
      round: i32[], rounds finished.
      shared: the shared leaves, one copy; None where a leaf is personal.
      personal: the personal leaves [K, ...]; None where a leaf is shared.
      weights: f[K], aggregation weights of the last round (before the first: uniform).
      server: the server's part of the method state.
      memory: the clients' part of the method state, [K, ...].
    """

    round: jax.Array
    shared: PyTree
    personal: PyTree
    weights: jax.Array
    server: PyTree
    memory: PyTree


class FederatedMethod(NamedTuple):
    """A federated algorithm.

    Attributes:
      init: `init(key, variables, num_clients) -> FederatedState`; `variables` are one model's
        collections, the common start.
      round: `round(state, batches, key) -> (FederatedState, metrics)`, jitted; the state is
        donated: use the returned one.
    """

    init: Callable[[jax.Array, Variables, int], FederatedState]
    round: Callable[[FederatedState, dict[str, jax.Array], jax.Array], tuple]


class ClientResult(NamedTuple):
    """One client's round: its trained leaves and what is reported of it."""

    shared: PyTree
    personal: PyTree
    memory: PyTree
    losses: jax.Array
    counts: jax.Array
    finite: jax.Array


def federate(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    objective: Objective | None = None,
    share: SharingRule = everything,
    weigh: WeighingRule = by_size,
    server: ServerUpdate | None = None,
    clients: str = "auto",
    local_epochs: int = 1,
    keep_optimizer: bool = False,
    prepare: Prepare | None = None,
) -> FederatedMethod:
    """Composes a federated method from independent choices.

    `round` takes batches {"image": f|u8[K, S, B, ...], "label": i32[K, S, B],
    "valid": bool[K, S, B]}, optionally "participates": bool[K] and "size": i32[K] (samples a client
    owns; by default its valid samples of one epoch). A client that sits out, and one whose update
    is not finite, keeps its personal leaves and method state and has weight 0; where nobody counts
    the shared leaves stay as they are. Random keys are `fold_in(fold_in(key, round), client)`.

    Its metrics are loss f[K] (mean over valid samples; NaN for a client that sits out), step_loss
    f[K, S], risk f[K] (mean loss of the last local epoch), weights f[K] and finite bool[K].

    Args:
      model: linen module, images -> logits.
      optimizer: the local optimizer; it starts afresh each round.
      objective: what clients minimize; cross entropy by default.
      share: the sharing rule, see `fedjax_bn.sharing`.
      weigh: the weighing rule, see `fedjax_bn.aggregation`.
      server: the server's step; plain averaging by default.
      clients: how clients are mapped, see `fedjax_bn.clients`.
      local_epochs: S steps are this many equal epochs; at least 1.
      keep_optimizer: whether clients keep their optimizer's state between rounds.
      prepare: turns stored images into what the model reads; by default bytes are standardized
        with mean and standard deviation 0.5.

    Raises:
      ValueError: at `init`, where `share` needs a batch norm and the model has none, or `clients`
        does not suit K; at `round`, where batches do not fit.
    """
    if local_epochs < 1:
        raise ValueError(f"local_epochs={local_epochs} must be at least 1")
    objective = objective or cross_entropy(model, prepare or standardize())
    server = server or averaging()

    def init(key: jax.Array, variables: Variables, num_clients: int) -> FederatedState:
        del key  # nothing random here; methods with random state of their own use it
        if num_clients < 1:
            raise ValueError(f"a federation needs at least one client, not {num_clients}")
        group_size(clients, num_clients)
        # Copies, because rounds donate the state and the caller keeps its variables.
        variables = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), variables)
        shared, personal = split(variables, share(variables))
        memory = optimizer.init(variables["params"]) if keep_optimizer else ()
        return FederatedState(
            round=jnp.zeros((), jnp.int32),
            shared=shared,
            personal=_stack(personal, num_clients),
            weights=normalize(jnp.ones(num_clients)),
            server=server.init(shared),
            memory=_stack(memory, num_clients),
        )

    def train_client(
        shared: PyTree, personal: PyTree, memory: PyTree, batches: PyTree, key: jax.Array
    ) -> ClientResult:
        variables = join(shared, personal)
        state = memory if keep_optimizer else optimizer.init(variables["params"])
        received = Received(shared, personal, memory)
        trained = local.train(objective, optimizer, received, variables, state, batches, key)
        own_memory = trained.optimizer_state if keep_optimizer else memory
        return ClientResult(
            *split_like(trained.variables, shared),
            memory=own_memory,
            losses=trained.losses,
            counts=trained.counts,
            finite=_all_finite((trained.variables, own_memory, trained.losses)),
        )

    def one_client(shared: PyTree, participates: jax.Array | None, *client: PyTree) -> ClientResult:
        if participates is None:
            return train_client(shared, *client)
        like = jax.eval_shape(train_client, shared, *client)
        personal, memory, *_ = client
        idle = ClientResult(
            shared,
            personal,
            memory,
            losses=jnp.zeros(like.losses.shape, like.losses.dtype),
            counts=jnp.zeros(like.counts.shape, like.counts.dtype),
            finite=jnp.ones((), bool),
        )
        return jax.lax.cond(participates, lambda: train_client(shared, *client), lambda: idle)

    @functools.partial(jax.jit, donate_argnums=0)
    def round(
        state: FederatedState, batches: dict[str, jax.Array], key: jax.Array
    ) -> tuple[FederatedState, Metrics]:
        num_clients = state.weights.shape[0]
        check_batches(batches, num_clients, local_epochs)
        steps = blank_padding(batches)
        participates = batches.get("participates")
        round_key = jax.random.fold_in(key, state.round)
        keys = jax.vmap(lambda k: jax.random.fold_in(round_key, k))(jnp.arange(num_clients))
        result = map_clients(
            lambda *client: one_client(state.shared, *client),
            clients,
            participates,
            state.personal,
            state.memory,
            steps,
            keys,
        )

        took_part = jnp.ones(num_clients, bool) if participates is None else participates
        counts_now = took_part & result.finite
        sizes = batches.get("size")
        if sizes is None:
            sizes = steps["valid"].sum((1, 2), dtype=jnp.int32) // local_epochs
        last = slice(-(steps["valid"].shape[1] // local_epochs), None)
        risks = jax.vmap(masked_mean)(result.losses[:, last], result.counts[:, last])
        weights = weigh(jnp.where(counts_now, sizes, 0), jnp.where(counts_now, risks, 0))
        weights = normalize(jnp.where(counts_now, weights, 0))

        real_steps = (result.counts > 0).sum(1, dtype=jnp.int32)
        updated = server.update(state.shared, result.shared, weights, real_steps, state.server)
        shared, server_state = select(weights.sum() > 0, updated, (state.shared, state.server))
        new = FederatedState(
            round=state.round + 1,
            shared=shared,
            personal=_select_clients(counts_now, result.personal, state.personal),
            weights=jnp.where(weights.sum() > 0, weights, state.weights),
            server=server_state,
            memory=_select_clients(counts_now, result.memory, state.memory),
        )
        loss = jax.vmap(masked_mean)(result.losses, result.counts)
        metrics = {
            "loss": jnp.where(took_part, loss, jnp.nan),
            "step_loss": result.losses,
            "risk": risks,
            "weights": weights,
            "finite": result.finite,
        }
        return new, metrics

    return FederatedMethod(init, round)


def client_variables(state: FederatedState) -> Variables:
    """The model that each internal client would use now: collections with leading axis K."""
    num_clients = state.weights.shape[0]
    return join(_stack(state.shared, num_clients), jax.tree.map(jnp.copy, state.personal))


def global_variables(state: FederatedState) -> Variables:
    """The model that an unseen client receives: one copy of the collections.

    Personal leaves enter as their mean with the last round's weights, so that batch norm is
    averaged too (FedBN, Appendix G); the clients' own are not touched.
    """
    personal = weighted_mean(state.personal, state.weights)
    return join(jax.tree.map(jnp.copy, state.shared), personal)


def check_batches(batches: dict[str, jax.Array], num_clients: int, local_epochs: int) -> None:
    """Checks keys and shapes of a round's batches.

    Raises:
      ValueError: a key is missing or unknown, or a shape does not fit; the message names it.
    """
    missing = {"image", "label", "valid"} - set(batches)
    unknown = set(batches) - {"image", "label", "valid", "participates", "size"}
    if missing or unknown:
        raise ValueError(
            f"batches lack {sorted(missing)} and have unknown {sorted(unknown)}: give 'image', "
            "'label' and 'valid', optionally 'participates' and 'size'"
        )
    shape = batches["label"].shape
    if len(shape) != 3 or shape[0] != num_clients:
        raise ValueError(f"batches['label'] has shape {shape}, not [K={num_clients}, S, B]")
    for name in ("image", "valid"):
        if batches[name].shape[:3] != shape:
            raise ValueError(
                f"batches['{name}'] has shape {batches[name].shape}, which does not begin with "
                f"that of 'label', {shape}"
            )
    for name in ("participates", "size"):
        if name in batches and batches[name].shape != (num_clients,):
            raise ValueError(
                f"batches['{name}'] has shape {batches[name].shape}, not [K={num_clients}]"
            )
    if shape[1] % local_epochs:
        raise ValueError(
            f"{shape[1]} steps are not {local_epochs} equal local epochs: pad every epoch to the "
            "same number of steps with valid=False"
        )


def blank_padding(batches: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Image, label and valid, with zeros where `valid` is False.

    Whatever padding holds, NaN included, cannot reach a gradient: 0 times NaN would be NaN there.
    """
    image, label, valid = (batches[name] for name in ("image", "label", "valid"))
    mask = valid.reshape(*valid.shape, *(1,) * (image.ndim - valid.ndim))
    zero = jnp.zeros((), image.dtype)
    return {
        "image": jnp.where(mask, image, zero),
        "label": jnp.where(valid, label, 0),
        "valid": valid,
    }


def _stack(tree: PyTree, num_clients: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], num_clients, axis=0), tree)


def _select_clients(chosen: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.vmap(select)(chosen, new, old)


def _all_finite(tree: PyTree) -> jax.Array:
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in floating]).all()
