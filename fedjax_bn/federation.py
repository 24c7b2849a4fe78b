"""Rounds: a federated method is a client and a server, and `federate` joins the two.

A federation is K clients. The variables of their models are split by a sharing rule into shared
leaves (one copy) and personal leaves (stacked, leading axis K). One call of `round` broadcasts the
shared leaves, trains every client, averages the shared leaves and keeps the personal ones. Row i of
the state and row i of the batches belong to one client; the rows are all clients, or a cohort
(see `fedjax_bn.engine.batches`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_bn import aggregation
from fedjax_bn.aggregation import ServerUpdate, Sums, Weighing, WeighingRule
from fedjax_bn.client import Begun, Client, clipping, take_part, take_steps
from fedjax_bn.engine import devices
from fedjax_bn.engine.batches import Admission, Batches, Classes, check_batches
from fedjax_bn.engine.devices import Meeting
from fedjax_bn.engine.inputs import random_key
from fedjax_bn.engine.privacy import Privacy
from fedjax_bn.engine.robust import update_norms
from fedjax_bn.engine.weighing import normalized
from fedjax_bn.incremental_aggregation import Adding, adding
from fedjax_bn.sharing import FROZEN, SharingRule, Variables, everything, split, split_frozen
from fedjax_bn.state import (
    Broadcast,
    FederatedState,
    Own,
    Upload,
    broadcast_of,
    client_variables,
    global_variables,
    own_of,
    put_rows,
    stack,
    take_rows,
    traffic,
    with_own,
)

__all__ = ["Broadcast", "FederatedMethod", "FederatedState", "Own", "Upload"]
__all__ += ["broadcast_of", "client_variables", "federate", "global_variables", "own_of"]
__all__ += ["put_rows", "take_rows", "traffic", "with_own"]

PyTree = Any
Metrics = dict[str, jax.Array]


class FederatedMethod(NamedTuple):
    """A federated algorithm, as pure functions.

    Attributes:
      init: `init(key, variables, num_clients) -> FederatedState`; `variables` are the collections
        of one model, from which all clients start.
      round: `round(state, batches, key) -> (FederatedState, metrics)`, jitted; runs `client` for
        every row and then `server`. It donates the state: use the returned one.
      client: `client(broadcast, own, batches, key) -> (Own, Upload)`, jitted; one client's part of
        a round. Its batches have no axis K, and "client" is i32[]; `key` is the run's key.
      server: `server(state, uploads) -> state`, jitted; uploads are stacked along K. The clients'
        own part of the state is unchanged.
      statistics: how its clients predict, the `normalization.StatisticsRule` of their batch norms;
        None for running statistics.
      learned: `methods.learning.Learning`, with which `fedjax_bn.serving` predicts.
      serves: the adaptations that use parts which this method trains, such as `learned_alpha`.
      notes: sentences for the user, such as what travels in addition to the model.
      personalize: (labelled samples, learning rate) with which a client adapts its model before it
        is tested (`methods.perfedavg.personalize`); None if it does not adapt.
      checked_server: `checked_server(state, uploads) -> (state, finite bool[])`, jitted: `server`,
        and whether its step is finite; if not, the shared leaves and the server's state stay.
      adding: the same for uploads that arrive one after another; None if `weigh` is neither
        `by_size` nor `uniform`.
      local_epochs: the passes over its data that a client makes in a round, at least 1.
      clients, mesh: how it was told to map clients and over which devices to share them out; None
        for those of `engine.devices.over_devices`.
      combines: whether its rule reads the uploaded leaves, as every device of a mesh then does.
      train: `train(broadcast, own, batches, key, begun) -> client.Trained`, jitted; the next steps
        of a client of `methods.selection.in_pieces`. `begun` is a `client.Begun`, which `client`
        takes as its fifth argument when all steps are made.
    """

    init: Callable[[jax.Array, Any, int], FederatedState]  # Any mapping of collections
    round: Callable[[FederatedState, Batches, jax.Array], tuple[FederatedState, Metrics]]
    client: Callable[[Broadcast, Own, Batches, jax.Array], tuple[Own, Upload]]
    server: Callable[[FederatedState, Upload], FederatedState]
    statistics: Callable[..., Any] | None = None
    learned: Any = None
    serves: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    personalize: tuple[int, float] | None = None
    checked_server: Callable[..., tuple[FederatedState, jax.Array]] | None = None
    adding: Adding | None = None
    local_epochs: int = 1
    clients: str = "auto"
    mesh: Mesh | None = None
    combines: bool = False
    train: Callable[..., Any] | None = None


class _Plan(NamedTuple):
    """What defines a method; `federate` describes it."""

    client: Client
    server: ServerUpdate
    share: SharingRule
    frozen: SharingRule | None
    weigh: WeighingRule | Weighing
    clients: str
    mesh: Mesh | None
    admission: Admission


def federate(
    client: Client,
    *,
    server: ServerUpdate | None = None,
    share: SharingRule = everything,
    frozen: SharingRule | None = None,
    weigh: WeighingRule | Weighing | None = None,
    privacy: Privacy | None = None,
    clients: str = "auto",
    mesh: Mesh | None = None,
    statistics: Callable[..., Any] | None = None,
    classes: Classes | None = None,
) -> FederatedMethod:
    """Composes a federated method from independent choices.

    A client that sits out, has no samples, or whose update is not finite, has weight 0; without a
    finite update it keeps its personal leaves and memory. The shared leaves stay if no client
    counts, if `weigh` returns NaN (then the metrics' weights are NaN), or if the server's step is
    not finite. The random key of a client in a round is `fold_in(fold_in(key, round), client)`.

    A round's metrics are loss f[K] (mean over valid samples; NaN for a client that sits out),
    step_loss f[K, S], risk f[K] (mean loss of the last local epoch), weights f[K], finite
    bool[K] and server_finite bool[]; under a rule with `combine` also norm f[K], of the clients'
    updates over all shared leaves (NaN for a client that does not count).

    Args:
      client: what a client does, usually `client.train_locally(step)`.
      server: the server's step; plain averaging by default.
      share: the sharing rule, see `fedjax_bn.sharing`.
      frozen: a rule of the same form, True for leaves of `params` and `batch_stats` that nothing
        trains, such as `sharing.all_but("head")`; it takes precedence over `share`.
      weigh: the weighing rule, see `fedjax_bn.aggregation`; by default `by_size`, and `uniform`
        with privacy.
      privacy: a mechanism that clips what is shared and adds noise, see `fedjax_bn.engine.privacy`.
      clients: how each device maps its clients, see `fedjax_bn.engine.devices`.
      mesh: devices with an axis "clients", which divides the rows of a round, and optionally one
        "batch", which divides a batch's samples; None for those of `devices.over_devices`, or one.
      statistics: how the method's own clients predict, see `FederatedMethod`.
      classes: `classes(variables, batches) -> C`, the number of classes of one client's labels,
        from shapes alone; None if labels are not classes. A label outside [0, C) raises ValueError
        if its array can be read, and makes its sample invalid inside a program.

    Raises:
      ValueError: `clients`, `mesh` or `weigh` cannot be used; at `init`, `share` needs a batch norm
        and the model has none, or shares statistics in spite of privacy.
    """
    devices.clients_at_once(clients)  # raises ValueError for an unknown one
    server = server or aggregation.averaging()
    if privacy is not None:
        if weigh not in (None, aggregation.uniform):
            raise ValueError("privacy needs weigh=uniform, as its noise is made for equal clients")
        client, server = clipping(client, privacy), aggregation.noising(server, privacy)
        weigh = aggregation.uniform
    client, server, weigh = aggregation.reporting(client, server, weigh or aggregation.by_size)
    if mesh is not None:
        if devices.CLIENTS not in mesh.axis_names:
            raise ValueError(f"mesh={mesh} lacks the axis of jax.make_mesh((n,), ('clients',))")
        # The axes of `jax.make_mesh` may be explicit, those of `Mesh` are not.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    admission = Admission(classes)
    plan = _Plan(client, server, share, frozen, weigh, clients, mesh, admission)
    # The state is donated, so that XLA holds the personal leaves of K clients once.
    of_round = jax.jit(functools.partial(_round, plan), donate_argnums=0)
    of_client = jax.jit(functools.partial(_take_part, plan))
    served = functools.partial(aggregation.server_step, plan.server, plan.weigh)

    # Labels are checked outside the programs, because only there can their values be read.
    def run_round(state: FederatedState, batches: Batches, key: jax.Array) -> Any:
        count = state.round
        # A donated array is deleted: without this JAX's error would name a buffer, not the cause.
        concrete = isinstance(count, jax.Array) and not isinstance(count, jax.core.Tracer)
        if concrete and count.is_deleted():
            raise ValueError("an earlier round used up this state: go on with the one it returned")
        admission.check(state, state, batches)
        return of_round(state, batches, key)

    def run_client(broadcast: Broadcast, own: Own, batches: Batches, key: Any, *begun: Any) -> Any:
        admission.check(broadcast, own, batches)
        return of_client(broadcast, own, batches, key, *begun)

    return FederatedMethod(
        init=functools.partial(_init, plan),
        round=_like_jitted(run_round, of_round),
        client=_like_jitted(run_client, of_client),
        server=jax.jit(lambda state, uploads: served(state, uploads)[0]),
        checked_server=jax.jit(served),
        adding=adding(plan.server, plan.weigh),
        local_epochs=client.epochs,
        statistics=statistics,
        clients=clients,
        mesh=mesh,
        combines=isinstance(weigh, Weighing) and weigh.reads_leaves,
        train=jax.jit(functools.partial(_take_steps, plan)),
    )


def _like_jitted(function: Callable, program: Any) -> Any:
    """Returns a function with what callers use of a jitted one, as in `method.round.lower`."""
    called = functools.partial(function)
    for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
        setattr(called, name, getattr(program, name))
    return called


def _init(plan: _Plan, key: jax.Array, variables: Variables, num_clients: int) -> FederatedState:
    """Returns the state before the first round, in which all clients start from `variables`."""
    del key  # nothing random here; methods with random state of their own use it
    mesh = devices.current_mesh(plan.mesh)
    rows = devices.padded(num_clients, mesh)
    # Copies, because rounds donate the state and the caller keeps its variables.
    variables = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), variables)
    mask: PyTree = plan.share(variables)
    frozen: PyTree = ()
    if plan.frozen is not None:
        variables, frozen = split_frozen(variables, plan.frozen(variables))
        # Marks that a model has frozen leaves; `client.take_part` sets them here for each client.
        variables, mask = {**variables, FROZEN: None}, {**mask, FROZEN: None}
    shared, personal = split(variables, mask)
    memory = plan.client.init(shared, personal)
    weighing = plan.weigh.init(num_clients) if isinstance(plan.weigh, Weighing) else ()
    server = plan.server.init(shared, personal)
    # Copies, because a donated state must not hold one array twice.
    server, weighing = jax.tree.map(jnp.copy, (server, weighing))
    weights, count = normalized(jnp.ones(num_clients)), jnp.zeros((), jnp.int32)
    state = FederatedState(count, shared, server, weights, weighing, (), (), frozen)
    state = devices.place_on_mesh(state, mesh, by_client=False)
    client_rows = stack(personal, rows), stack(memory, rows)
    personal, memory = devices.place_on_mesh(client_rows, mesh, by_client=True)
    return state._replace(personal=personal, memory=memory)


def _take_part(
    plan: _Plan, broadcast: Broadcast, own: Own, batches: Batches, key: jax.Array, *begun: Begun
) -> tuple[Own, Upload]:
    """Trains one client as a round would, for `FederatedMethod.client`."""
    batches, key = plan.admission.admitted(broadcast, own, batches), random_key(key)
    trained, upload, _ = take_part(plan.client, broadcast, own, batches, key, False, *begun)
    return trained._replace(frozen=own.frozen), upload


def _take_steps(
    plan: _Plan, broadcast: Broadcast, own: Own, batches: Batches, key: jax.Array, begun: Any
) -> Any:
    """Makes the next steps of one client, for `FederatedMethod.train`."""
    batches, key = plan.admission.admitted(broadcast, own, batches), random_key(key)
    return take_steps(plan.client, broadcast, own, batches, key, begun)


def _round(
    plan: _Plan, state: FederatedState, batches: Batches, key: jax.Array
) -> tuple[FederatedState, Metrics]:
    """Runs one round: broadcast, local training, aggregation."""
    plan = plan._replace(mesh=devices.current_mesh(plan.mesh))
    rows = state.weights.shape[0]
    total = devices.padded(rows, plan.mesh)
    # On a mesh the caller may have padded the batches already, to place them on the devices.
    padded_rows = total if getattr(batches.get("valid"), "shape", ())[:1] == (total,) else rows
    check_batches(batches, padded_rows, plan.client.epochs)
    batches, key = plan.admission.admitted(state, state, batches), random_key(key)
    # Without a cohort, row k belongs to client k.
    batches = {"client": jnp.arange(padded_rows, dtype=jnp.int32)} | batches
    population = batches.pop("population", None)
    if total > rows:
        # Padding rows are treated as clients that sit out, and so count nowhere.
        present = jnp.arange(padded_rows) < rows
        batches["participates"] = batches.get("participates", present) & present
    before = Own(state.personal, state.memory)
    rows_before, batches = devices.pad_rows((before, batches), total)
    split_rows = rows_before, devices.split_batches(batches, plan.mesh)
    # `common` is copied to every device, so the clients' rows are left out of it.
    common = (state._replace(personal=(), memory=()), key)
    train_all = devices.on_each_device(functools.partial(_train_all, plan), plan.mesh)
    (sums, weighing, seen), rows_after = train_all(common, split_rows)
    # Cut the padding to the length of the state's rows, which on a mesh are padded themselves.
    rows_after = jax.tree.map(lambda after, start: after[: len(start)], rows_after, before)
    seen = jax.tree.map(lambda leaf: leaf[:rows], seen)
    everybody = rows if population is None else population
    # The server's step runs once, not on each device: the sums are the same on all of them.
    after, finite = aggregation.conclude(plan.server, state, sums, seen["counts"], everybody)
    weights = normalized(seen["weights"])
    # A round in which no client counts keeps the last weights; > is False for NaN too.
    last_weights = jnp.where(weights.sum() > 0, weights, state.weights)
    after = after._replace(weights=last_weights, weighing=weighing)
    after = after._replace(personal=rows_after.personal, memory=rows_after.memory)
    loss = jnp.where(seen.pop("participates"), seen["loss"], jnp.nan)
    del seen["counts"]
    return after, seen | {"loss": loss, "weights": weights, "server_finite": finite}


def _train_all(
    plan: _Plan, meeting: Meeting, common: tuple, rows: tuple
) -> tuple[tuple[Sums, PyTree, Metrics], Own]:
    """Trains the clients of one device, and sums their uploads over the clients of all devices."""
    (state, key), (rows_before, batches) = common, rows
    broadcast, num_clients = broadcast_of(state), state.weights.shape[0]
    sizes = {} if plan.mesh is None else plan.mesh.shape
    divided = min(sizes.get(devices.CLIENTS, 1), sizes.get(devices.BATCH, 1)) > 1
    # If weights are known before training, the trained models need not all be held at once.
    early = aggregation.early_weights(plan.weigh, batches, plan.client.epochs, num_clients, meeting)

    def train(row: Own, weight: jax.Array | None, batches: Batches) -> tuple[PyTree, Own, tuple]:
        row = row._replace(frozen=state.frozen)
        row, upload, losses = take_part(plan.client, broadcast, row, batches, key, divided)
        if weight is None:
            return (), row, (upload, losses)
        part = aggregation.weighted_part(plan.server, weight, upload)
        # The sum already includes the upload's leaves; stacked they would fill the memory.
        return part, row, (upload._replace(shared=(), message=()), losses)

    # The rows come before the other trees, because `map_and_sum` updates them in place.
    results = devices.map_and_sum(train, plan.clients, rows_before, early, batches)
    sums, rows_after, (uploads, losses) = results
    weights: PyTree = early
    weighing, combined, extra_metrics = state.weighing, None, {}
    if early is None:
        # Risks and messages are known only now, and the rule needs them from all devices.
        leaves = isinstance(plan.weigh, Weighing) and plan.weigh.reads_leaves
        needed = uploads if leaves else uploads._replace(shared=())
        _, everybody = meeting.together((), needed)
        # Drop the padding rows: the rule's state has rows for real clients only.
        everybody = jax.tree.map(lambda leaf: leaf[:num_clients], everybody)
        weighed = aggregation.weigh_uploads(plan.weigh, weighing, everybody, state.shared)
        weights, combined, weighing = weighed
        weights = meeting.local_rows(weights)
        if combined is not None:
            norms = update_norms(uploads.shared, state.shared, uploads.counts)
            extra_metrics["norm"] = jnp.where(uploads.counts, norms, jnp.nan)
            # Every device has combined the leaves of all clients, so they are not summed again.
            uploads = uploads._replace(shared=())
        sums = aggregation.sum_uploads(plan.server, weights, uploads)
    read, counts = ("loss", "risk", "finite", "participates"), uploads.counts
    seen = extra_metrics | {name: getattr(uploads, name) for name in read}
    seen |= {"step_loss": losses, "weights": jnp.where(counts, weights, 0), "counts": counts}
    sums, seen = meeting.together(sums, seen)
    if combined is not None:
        sums = aggregation.in_place_of_mean(sums, combined)
    return (sums, weighing, seen), rows_after
