"""The server's half of a round: weighs uploads, sums them, and makes the server's step.

A weighing rule is a function `(sizes i32[K], risks f[K]) -> f[K]` whose result sums to 1. A client
that does not count in a round (`state.Upload.counts`) gets weight 0. The rule sees size 0 for a
client that sits out; if it reads the risks, it sees size 0 and risk 0 for a client that failed too.
A rule with a state is a `Weighing`, and so are the rules of `engine.robust`, which compute
something else than a weighted mean.

If weights are known before training, a round holds only sums, whose size does not depend on the
number of clients. Over several devices a round has one reduction if the rule is `by_size` or
`uniform`. Any other rule needs a second one, which gathers what it reads of all clients.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.client import Client, LocalUpdate
from fedjax_bn.engine.backend import all_finite, where_tree
from fedjax_bn.engine.batches import Batches, owned_samples
from fedjax_bn.engine.devices import Meeting, sum_over
from fedjax_bn.engine.privacy import Privacy, is_known, with_noise
from fedjax_bn.engine.risk_extrapolation import risk_extrapolation as risk_extrapolation
from fedjax_bn.engine.robust import coordinate_median as coordinate_median
from fedjax_bn.engine.robust import geometric_median as geometric_median
from fedjax_bn.engine.robust import krum as krum
from fedjax_bn.engine.robust import norm_clipping as norm_clipping
from fedjax_bn.engine.robust import trimmed_mean as trimmed_mean
from fedjax_bn.engine.weighing import Weighing as Weighing
from fedjax_bn.engine.weighing import by_divergence as by_divergence
from fedjax_bn.engine.weighing import by_size as by_size
from fedjax_bn.engine.weighing import generalization_adjustment as generalization_adjustment
from fedjax_bn.engine.weighing import in_dtypes_of, normalized, relative_weights, weighted
from fedjax_bn.engine.weighing import uniform as uniform
from fedjax_bn.engine.weighing import weighted_mean as weighted_mean
from fedjax_bn.sharing import STATISTICS, path_names
from fedjax_bn.state import FederatedState, Received, Upload
from fedjax_bn.state import ServerState as ServerState

PyTree = Any
WeighingRule = Callable[[jax.Array, jax.Array], jax.Array]
_Stepped = tuple[PyTree, ServerState]


class Aggregate(NamedTuple):
    """What the server knows of a round, after one reduction over its clients.

    Attributes:
      mean: the weighted mean of the shared leaves that the clients uploaded; None elsewhere.
      message: the mean of their messages, weighted by `ServerUpdate.message_weight`.
      share: f[], the fraction of the population that counts in the round.
      count: f[], the number of clients that count.
    """

    mean: PyTree
    message: PyTree
    share: jax.Array
    count: jax.Array  # type: ignore[assignment]


# (weight f[], size i32[], counts bool[]) -> f[], the weight of a client's message in the mean.
# Over several devices weights are relative: a common factor must not change that mean.
_MessageWeight = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _as_leaves(weight: jax.Array, size: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the weight of the leaves, for a client's message too."""
    del size, counts
    return weight


def equal_messages(weight: jax.Array, size: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns 1 for a client that counts, else 0: all messages have the same weight."""
    del size
    return counts.astype(weight.dtype)


def messages_by_size(weight: jax.Array, size: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the number of samples of a client that counts, else 0, whatever the weighing rule."""
    return jnp.where(counts, size, 0).astype(weight.dtype)


class ServerUpdate(NamedTuple):
    """The server's step, as a pair of pure functions.

    Attributes:
      init: `init(shared, personal) -> ServerState`, from the common start of all clients;
        `sharing.join(shared, personal)` gives its variables.
      update: `update(shared, aggregate, state) -> (shared, ServerState)`, with the shared leaves
        as the clients received them.
      message_weight: the weights with which the clients' messages are averaged.
    """

    init: Callable[[PyTree, PyTree], ServerState]
    update: Callable[[PyTree, Aggregate, ServerState], _Stepped]
    message_weight: _MessageWeight = _as_leaves


def averaging(
    start: Callable[[PyTree, PyTree], PyTree] | None = None,
    renew: Callable[[PyTree, Aggregate], PyTree] | None = None,
    message_weight: _MessageWeight = _as_leaves,
) -> ServerUpdate:
    r"""Returns FedAvg's step: the weighted mean replaces the shared leaves.

    $x' = \sum_k p_k y_k$

    Args:
      start: `start(shared, personal) -> tree`, what the server sends in the first round in addition
        to the shared leaves; by default nothing.
      renew: `renew(sent, aggregate) -> tree`, what it sends in the next round, cast to the dtypes
        of `sent`; by default `sent` again.
      message_weight: as in `ServerUpdate`.
    """

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        return ServerState(sent=start(shared, personal) if start else ())

    def update(shared: PyTree, aggregate: Aggregate, state: ServerState) -> _Stepped:
        del shared
        if renew is None:
            return aggregate.mean, state
        renewed = renew(state.sent, aggregate)
        # What is sent keeps its dtype, else the next round would compile again.
        sent = jax.tree.map(lambda leaf, before: leaf.astype(before.dtype), renewed, state.sent)
        return aggregate.mean, state._replace(sent=sent)

    return ServerUpdate(init, update, message_weight)


class _Noise(NamedTuple):
    """The server's state for a privacy mechanism."""

    inner: PyTree  # what the method's own step keeps
    key: jax.Array  # u32[...], the words of the noise's random key
    rounds: jax.Array  # i32[], rounds that had noise


def noising(server: ServerUpdate, privacy: Privacy) -> ServerUpdate:
    """Returns the server with noise added to the mean before its step, unless clients add it.

    ValueError at `init` if running statistics or leaves that are not floats are shared.
    """

    def init(shared: PyTree, personal: PyTree) -> ServerState:
        for path, leaf in jax.tree_util.tree_leaves_with_path(shared):
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            if path_names(path)[0] == STATISTICS or not floating:
                name = "/".join(path_names(path))
                remedy = "use share=all_but_statistics or all_but_batch_norm"
                raise ValueError(f"privacy cannot noise the statistic or integer {name}: {remedy}")
        state = server.init(shared, personal)
        # Kept as words, because states are saved by NumPy, which has no dtype for typed keys.
        key = jax.random.key_data(jax.random.key(privacy.seed))
        return state._replace(kept=_Noise(state.kept, key, jnp.zeros((), jnp.int32)))

    def update(shared: PyTree, aggregate: Aggregate, state: ServerState) -> _Stepped:
        noise, mean = state.kept, aggregate.mean
        if privacy.at == "server" and not is_known(privacy.noise, 0):
            key = jax.random.fold_in(jax.random.wrap_key_data(noise.key), noise.rounds)
            # The mean is the sum divided by n: noise z C on the sum is z C / n on the mean.
            mean = with_noise(mean, key, privacy.noise * privacy.clip / aggregate.count)
        state = state._replace(kept=noise.inner)
        shared, state = server.update(shared, aggregate._replace(mean=mean), state)
        private = noise._replace(inner=state.kept, rounds=noise.rounds + 1)
        return shared, state._replace(kept=private)

    return server._replace(init=init, update=update)


def reporting(
    client: Client, server: ServerUpdate, weigh: WeighingRule | Weighing
) -> tuple[Client, ServerUpdate, WeighingRule | Weighing]:
    """Returns client, server and rule; if the rule has `report`, clients also upload its result.

    The message of an upload is then a pair: the method's message, which the server reads, and the
    result of `weigh.report`, which the rule reads.
    """
    if not isinstance(weigh, Weighing) or weigh.report is None:
        return client, server, weigh
    report = weigh.report
    # The pair is opened on both sides, so that neither the method's server nor the rule sees what
    # the client sent to the other.

    def run(received: Received, batches: Batches, key: jax.Array) -> LocalUpdate:
        update = client.run(received, batches, key)
        return update._replace(message=(update.message, report(received, update.variables)))

    def update(shared: PyTree, aggregate: Aggregate, state: ServerState) -> _Stepped:
        return server.update(shared, aggregate._replace(message=aggregate.message[0]), state)

    def weigh_reports(state: PyTree, sizes: jax.Array, risks: jax.Array, messages: tuple) -> tuple:
        return weigh.weigh(state, sizes, risks, messages[1])

    rule = weigh._replace(weigh=weigh_reports, report=None)
    return client._replace(run=run), server._replace(update=update), rule


class Sums(NamedTuple):
    """Sums over clients of w_k y_k (leaves), w_k, v_k m_k (messages) and v_k (their weights)."""

    leaves: PyTree
    weight: jax.Array
    messages: PyTree
    message_weight: jax.Array


def weighted_part(server: ServerUpdate, weight: jax.Array, upload: Upload) -> Sums:
    """Returns one client's part of the sums, with weight w_k f[]."""
    counts = upload.counts
    # Sums are in JAX's default float, float32 or float64, also for a model in bfloat16, in which a
    # sum over many clients would lose clients of small weight.
    weight = jnp.where(counts, weight, 0).astype(jnp.result_type(float))
    share = server.message_weight(weight, upload.size, counts)
    leaves = weighted(upload.shared, weight)
    return Sums(leaves, weight, weighted(upload.message, share), share)


def sum_uploads(server: ServerUpdate, weights: jax.Array, uploads: Upload) -> Sums:
    """Sums uploads stacked [C, ...] with weights f[C]."""
    return sum_over(functools.partial(weighted_part, server), weights, uploads)


def in_place_of_mean(sums: Sums, combined: PyTree) -> Sums:
    """Returns the sums with what `Weighing.combine` made; `conclude` then divides it by 1."""
    # 0, not 1, if no client counts or a weight is NaN: the round is then dropped.
    weight = (sums.weight > 0).astype(sums.weight.dtype)
    return sums._replace(leaves=combined, weight=weight)


def _needs_risks(rule: WeighingRule, num_clients: int) -> bool:
    """Returns whether a weighing rule reads the risks, which are known only after training."""
    # Only traced: the program shows whether the rule uses the input, whatever its values.
    sizes, risks = jnp.zeros(num_clients, jnp.int32), jnp.zeros(num_clients)
    jaxpr = jax.make_jaxpr(rule)(sizes, risks).jaxpr
    used = [value for equation in jaxpr.eqns for value in equation.invars] + jaxpr.outvars
    return any(value is jaxpr.invars[1] for value in used)


def early_weights(
    rule: WeighingRule | Weighing, batches: Batches, epochs: int, num_clients: int, meeting: Meeting
) -> jax.Array | None:
    """Returns the weights f[C] of a device's C clients, up to a factor common to all K clients.

    None if the rule needs uploads. A client whose update turns out not to be finite is left out of
    the sums later. The rows of the batches of all devices begin with the K clients, and the others
    are padding; `epochs` are the local epochs in them.
    """
    if isinstance(rule, Weighing) or _needs_risks(rule, num_clients):
        return None
    counted: Batches = {name: batches[name] for name in ("valid", "size") if name in batches}
    sizes = jax.vmap(functools.partial(owned_samples, epochs=epochs))(counted)
    participates = batches.get("participates", jnp.ones(sizes.shape, bool))
    sizes = jnp.where(participates, sizes, 0)
    relative = relative_weights(rule, sizes)
    if meeting.devices > 1 and relative is not None:
        # The sums of uploads are divided by the sum of these weights, so no device needs it yet.
        return relative
    _, (sizes, participates) = meeting.together((), (sizes, participates))
    weights = rule(sizes[:num_clients], jnp.zeros(num_clients))
    weights = normalized(jnp.where(participates[:num_clients], weights, 0))
    return meeting.local_rows(weights)


def weigh_uploads(
    rule: WeighingRule | Weighing, state: PyTree, uploads: Upload, start: PyTree
) -> tuple[jax.Array, PyTree, PyTree]:
    """Weighs stacked uploads; `start` are the shared leaves before the round.

    Returns weights f[C], 0 for clients that do not count; the result of the rule's `combine`, None
    without one; and the rule's new state.
    """
    counts, rows = uploads.counts, uploads.size.shape[0]
    # A rule must not see the NaN risk of a client that failed: one NaN makes all weights NaN.
    size, risk = (jnp.where(counts, x, 0) for x in (uploads.size, uploads.risk))
    combine = rule.combine if isinstance(rule, Weighing) else None
    if isinstance(rule, Weighing):
        weights, state = rule.weigh(state, size, risk, uploads.message)
    elif _needs_risks(rule, rows):
        weights = rule(size, risk)
    else:
        # As in `early_weights`: a failed client still gets a weight here, which is set to 0 below.
        weights = rule(jnp.where(uploads.participates, uploads.size, 0), jnp.zeros(rows))
    weights = jnp.where(counts, weights, 0)
    if isinstance(rule, Weighing) and rule.reweigh is not None:
        weights, state = rule.reweigh(state, uploads.shared, start, weights)
    if combine is None:
        return weights, None, state
    combined, weights = combine(uploads.shared, start, weights)
    return weights, combined, state


def conclude(
    server: ServerUpdate,
    state: FederatedState,
    sums: Sums,
    counts: jax.Array,
    population: jax.Array | int,
) -> tuple[FederatedState, jax.Array]:
    """Returns the state after the server's step, and whether this step is finite, bool[].

    A step that is not finite is dropped: the shared leaves and the server's state stay as they are.
    `state` is the state before the round, `sums` are over the clients that count (`counts`
    bool[C]), and `population` is the number of all clients.
    """
    # The division comes last, so that clients can be summed in any order and on any device.
    mean = jax.tree.map(lambda x: x / sums.weight.astype(x.dtype), sums.leaves)
    message = jax.tree.map(lambda x: x / sums.message_weight.astype(x.dtype), sums.messages)
    count = counts.sum(dtype=float)
    share = count / jnp.asarray(population, float)
    aggregate = Aggregate(in_dtypes_of(mean, state.shared), message, share, count)
    stepped = server.update(state.shared, aggregate, state.server)
    counted = sums.weight > 0
    # If no client counts, the mean is 0 / 0, which is not a failure of the server.
    finite = all_finite(stepped) | ~counted
    shared, server_state = where_tree(counted & finite, stepped, (state.shared, state.server))
    return state._replace(round=state.round + 1, shared=shared, server=server_state), finite


def server_step(
    server: ServerUpdate, weigh: WeighingRule | Weighing, state: FederatedState, uploads: Upload
) -> tuple[FederatedState, jax.Array]:
    """Returns the state after a round, and whether the server's step is finite, bool[].

    The clients' own parts of the state are unchanged. `uploads` are stacked, one for each row of
    the state or for some of them. If the rule gives NaN for a client, so does the state, and the
    shared leaves stay.
    """
    rows, uploaded = state.weights.shape[0], uploads.client.shape[0]
    population = rows if uploads.population is None else uploads.population.max()
    # Row k belongs to client k, except in a cohort's state, whose rows follow the cohort's order.
    numbered = (population == rows) & (uploads.client < rows).all()
    place = jnp.where(numbered, uploads.client, jnp.arange(uploaded, dtype=jnp.int32))
    weighing = jax.tree.map(lambda leaf: leaf[place], state.weighing)
    weights, combined, weighing = weigh_uploads(weigh, weighing, uploads, state.shared)
    if combined is None:
        sums = sum_uploads(server, weights, uploads)
    else:
        sums = sum_uploads(server, weights, uploads._replace(shared=()))
        sums = in_place_of_mean(sums, combined)
    after, finite = conclude(server, state, sums, uploads.counts, population)
    weights = jnp.zeros_like(state.weights).at[place].set(weights)
    weighing = jax.tree.map(lambda x, rows: x.at[place].set(rows), state.weighing, weighing)
    return after._replace(weights=last_weights(weights, state), weighing=weighing), finite


def last_weights(weights: jax.Array, state: FederatedState) -> jax.Array:
    """Returns the weights f[K] of a round scaled to sum 1, or those before it if no client counts.

    A server has no metrics, so NaN stays, and only where the rule gave it.
    """
    total = weights.sum()
    scaled = jnp.where(jnp.isnan(total), weights, normalized(weights))
    return jnp.where(total == 0, state.weights, scaled)
