"""Rounds: a federated method is a client and a server, and `federate` joins the two.

A federation is K clients. The variables of their models are split by a sharing rule into shared
leaves (one copy) and personal leaves (stacked, leading axis K). One call of `round` broadcasts the
shared leaves, trains every client, averages the shared leaves and keeps the personal ones. The rows
of the state are the rows of the batches: all clients, or a cohort. `take_rows` and `put_rows`
gather and scatter rows of the state (see `fedjax_bn.engine.batches`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_bn.aggregation import (
    ServerUpdate,
    Sums,
    Weighing,
    WeighingRule,
    averaging,
    by_size,
    conclude,
    early_weights,
    noising,
    part_of,
    reporting,
    serve,
    sum_uploads,
    uniform,
    weigh_uploads,
)
from fedjax_bn.client import Client, clipping, take_part
from fedjax_bn.engine.batches import Admission, Batches, Classes, check_batches
from fedjax_bn.engine.devices import (
    Meeting,
    check_strategy,
    checked_mesh,
    divides_clients,
    map_and_sum,
    on_each_device,
    pad_rows,
    padded,
    place,
    split_batches,
)
from fedjax_bn.engine.inputs import random_key
from fedjax_bn.engine.privacy import Privacy
from fedjax_bn.engine.weighing import normalize
from fedjax_bn.sharing import SharingRule, Variables, everything, split
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
    with_own,
)
from fedjax_bn.task import Task

__all__ = [
    "Broadcast", "FederatedMethod", "FederatedState", "Own", "Upload", "broadcast_of",
    "client_variables", "federate", "global_variables", "own_of", "put_rows", "take_rows",
    "traffic", "with_own",
]  # fmt: skip

PyTree = Any
Metrics = dict[str, jax.Array]


class FederatedMethod(NamedTuple):
    """A federated algorithm, as pure functions.

    Attributes:
      init: `init(key, variables, num_clients) -> FederatedState`; `variables` are one model's
        collections, the common start.
      round: `round(state, batches, key) -> (FederatedState, metrics)`, jitted; the state is
        donated: use the returned one. It is `client` for all rows and `server`.
      client: `client(broadcast, own, batches, key) -> (Own, Upload)`, jitted: one client's part,
        with batches without the axis K and with "client" i32[]; `key` is the run's.
      server: `server(state, uploads) -> state`, jitted, with uploads stacked along K; the clients'
        own part of the state stays as it is.
      statistics: how its own clients predict, the `normalization.StatisticsRule` of their batch
        norms; None for their running statistics.
      learned: the model, its task and the preprocessing of its images
        (`methods.learning.Learning`), with which `fedjax_bn.serving` predicts; None if unknown.
      serves: the adaptations that need something trained and that this method trains.
      notes: sentences for the user, such as what travels in addition to the model.
      personalize: (labelled samples, learning rate) with which a client adapts its model before it
        is tested (`methods.perfedavg.personalize`); None where it does not.
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


class _Plan(NamedTuple):
    """The choices that make a method; see `federate` for each."""

    client: Client
    server: ServerUpdate
    share: SharingRule
    weigh: WeighingRule | Weighing
    clients: str
    mesh: Mesh | None
    admission: Admission


def federate(
    client: Client,
    *,
    server: ServerUpdate | None = None,
    share: SharingRule = everything,
    weigh: WeighingRule | Weighing | None = None,
    privacy: Privacy | None = None,
    clients: str = "auto",
    mesh: Mesh | None = None,
    statistics: Callable[..., Any] | None = None,
    classes: Classes | None = None,
) -> FederatedMethod:
    """Composes a federated method from independent choices.

    A client that sits out, or whose update is not finite, has weight 0 and keeps its personal
    leaves and memory. The shared leaves keep their values if no client counts, if `weigh` returns
    NaN (then the metrics' weights are NaN), or if the server's step is not finite (then
    server_finite is False). A client with fewer local epochs has valid=False in the missing ones.
    The random key of a client in a round is `fold_in(fold_in(key, round), client)`.

    A round's metrics are loss f[K] (mean over valid samples; NaN for a client that sits out),
    step_loss f[K, S], risk f[K] (mean loss of the last local epoch), weights f[K], finite
    bool[K] and server_finite bool[].

    Args:
      client: what a client does, usually `client.train_locally(step)`.
      server: the server's step; plain averaging by default.
      share: the sharing rule, see `fedjax_bn.sharing`.
      weigh: the weighing rule, see `fedjax_bn.aggregation`; by default `by_size`, and `uniform`
        where there is privacy.
      privacy: a mechanism that clips and noises what is shared, see `fedjax_bn.engine.privacy`.
      clients: how clients are mapped, see `fedjax_bn.engine.devices`; with a mesh, those of each
        device.
      mesh: devices with an axis "clients", which divides the rows of a round, and optionally one
        "batch", which divides the samples of a batch; None for one device. Results equal those of
        one device up to the order of sums.
      statistics: how the method's own clients predict, see `FederatedMethod`.
      classes: `classes(variables, batches) -> C`, the number of classes of one client's labels,
        from shapes alone; None if labels are not classes. A label outside [0, C) raises ValueError
        if its array can be read, and makes its sample invalid inside a program.

    Raises:
      ValueError: a choice has the wrong type, such as a name instead of a function; the mesh has
        no axis "clients"; `weigh` cannot be used with privacy; at `init`, `share` needs a batch
        norm and the model has none, or shares statistics in spite of privacy, or `clients` asks for
        more than K; at `round`, batches do not fit.
    """
    check_choices(share=share, weigh=weigh, server=server, privacy=privacy, clients=clients)
    server = server or averaging()
    if privacy is not None:
        if weigh not in (None, uniform):
            raise ValueError(
                "privacy needs weigh=uniform, which it takes by default: under another rule one "
                "client would count more than the noise is made for"
            )
        client, server, weigh = clipping(client, privacy), noising(server, privacy), uniform
    client, server, weigh = reporting(client, server, weigh or by_size)
    admission = Admission(classes)
    plan = _Plan(client, server, share, weigh, clients, checked_mesh(mesh), admission)

    def check_round(state: FederatedState, batches: Batches, key: jax.Array) -> None:
        count = state.round
        # A donated array is deleted; without this JAX would name a buffer and not the cause.
        concrete = isinstance(count, jax.Array) and not isinstance(count, jax.core.Tracer)
        if concrete and count.is_deleted():
            raise ValueError(
                "this state was given to an earlier round, which used up its arrays: continue with "
                "the state that the round returned, as in `state, metrics = "
                "method.round(state, ...)`"
            )
        random_key(key)
        admission.check(state.shared, state.personal, batches)

    def check_client(broadcast: Broadcast, own: Own, batches: Batches, key: jax.Array) -> None:
        random_key(key)
        admission.check(broadcast.shared, own.personal, batches)

    # The state is donated: XLA writes the new personal leaves over the old ones, so that a
    # federation of K clients needs their memory once.
    return FederatedMethod(
        init=functools.partial(_init, plan),
        round=_checked(jax.jit(functools.partial(_round, plan), donate_argnums=0), check_round),
        client=_checked(jax.jit(functools.partial(_take_part, plan)), check_client),
        server=jax.jit(functools.partial(serve, plan.server, plan.weigh)),
        statistics=statistics,
    )


def _or_none(kind: type | None = None) -> Callable[[Any], bool]:
    """Returns the check for None, a function, or an instance of `kind`."""
    return lambda x: x is None or (isinstance(x, kind) if kind else callable(x))


# Options that a name or a number is easily given for: what fits, and what to give.
_CHOICES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "share": (callable, "a sharing rule: give a function variables -> booleans, such as "
              "everything, nothing or all_but_batch_norm of fedjax_bn.sharing"),
    "weigh": (lambda x: isinstance(x, Weighing) or _or_none()(x), "a weighing rule: give a "
              "function (sizes, risks) -> weights, such as by_size or uniform of "
              "fedjax_bn.aggregation"),
    "server": (_or_none(ServerUpdate), "a server's step: give a ServerUpdate, such as averaging() "
               "of fedjax_bn.aggregation"),
    "privacy": (_or_none(Privacy), "a mechanism: give engine.privacy.gaussian(clip, noise)"),
    "load": (_or_none(), "a function: give load(source, batch, key) -> batch, such as "
             "fedjax_bn.client.augmenting(augment)"),
    "prepare": (_or_none(), "a function: give one, such as "
                "fedjax_bn.data.pixels.images.standardize()"),
    "perturb": (_or_none(), "a function: give one, such as fedjax_bn.engine.perturb.randconv()"),
    "task": (_or_none(Task), "a task: give a Task, such as fedjax_bn.task.classification()"),
}  # fmt: skip


def check_choices(**options: Any) -> None:
    """Raises ValueError for an option of a wrong type, such as a name instead of a function."""
    check_strategy(
        options.get("clients", "auto"), 2**31
    )  # the number of clients is known at `init`
    for name, (fits, wanted) in _CHOICES.items():
        if name in options and not fits(options[name]):
            raise ValueError(f"{name}={options[name]!r} is not {wanted}")


def _checked(program: Any, check: Callable[..., None]) -> Any:
    """Returns the jitted program as a function that checks its arguments first."""

    def called(*args: Any, **kwargs: Any) -> Any:
        # Outside of the program, where values of labels can be read.
        check(*args, **kwargs)
        return program(*args, **kwargs)

    # What callers use of a jitted function, such as `method.round.lower(...)` in run/.
    for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
        setattr(called, name, getattr(program, name))
    return called


def _init(plan: _Plan, key: jax.Array, variables: Variables, num_clients: int) -> FederatedState:
    """Returns the state before the first round, in which all clients start from `variables`."""
    del key  # nothing random here; methods with random state of their own use it
    if num_clients < 1:
        raise ValueError(f"a federation needs at least one client, not {num_clients}")
    rows = padded(num_clients, plan.mesh)
    check_strategy(plan.clients, num_clients)
    # Copies, because rounds donate the state and the caller keeps its variables.
    variables = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), variables)
    shared, personal = split(variables, plan.share(variables))
    memory = plan.client.init(shared, personal)
    weighing = plan.weigh.init(num_clients) if isinstance(plan.weigh, Weighing) else ()
    state = FederatedState(
        round=jnp.zeros((), jnp.int32),
        shared=shared,
        # Copies, because a state must hold no array twice: all of it is donated.
        server=jax.tree.map(jnp.copy, plan.server.init(shared, personal)),
        weights=normalize(jnp.ones(num_clients)),
        weighing=jax.tree.map(jnp.copy, weighing),
        personal=(),
        memory=(),
    )
    own = Own(stack(personal, rows), stack(memory, rows))
    own = place(own, plan.mesh, by_client=True)
    state = place(state, plan.mesh, by_client=False)
    return state._replace(personal=own.personal, memory=own.memory)


def _take_part(
    plan: _Plan, broadcast: Broadcast, own: Own, batches: Batches, key: jax.Array
) -> tuple[Own, Upload]:
    """Trains one client as a round would, for `FederatedMethod.client`."""
    batches = plan.admission.admitted(broadcast.shared, own.personal, batches)
    return take_part(plan.client, broadcast, own, batches, random_key(key))[:2]


def _round(
    plan: _Plan, state: FederatedState, batches: Batches, key: jax.Array
) -> tuple[FederatedState, Metrics]:
    """Makes one round: broadcast, local training, aggregation."""
    rows = state.weights.shape[0]
    total = padded(rows, plan.mesh)
    # A caller on a mesh may have padded the batches already, to place them on its devices.
    there = total if getattr(batches.get("valid"), "shape", ())[:1] == (total,) else rows
    check_batches(batches, there, plan.client.epochs)
    batches, key = plan.admission.admitted(state.shared, state.personal, batches), random_key(key)
    # Where no cohort is named, a row's number is its client's.
    batches = {"client": jnp.arange(there, dtype=jnp.int32)} | batches
    population = batches.pop("population", None)
    if total > rows:
        # Rows of padding train like clients that sit out, and so count nowhere.
        present = jnp.arange(there) < rows
        batches["participates"] = batches.get("participates", present) & present
    # Weights known before training spare holding all trained models at once.
    weighed = ("valid", "size", "participates")
    known = {name: x[:rows] for name, x in batches.items() if name in weighed}
    early = early_weights(plan.weigh, known, plan.client.epochs)
    before = Own(state.personal, state.memory)
    early, old, batches = pad_rows((early, before, batches), total)
    given = early, old, split_batches(batches, plan.mesh)
    # Every device gets the common part whole: rows of clients would be copied.
    common = (state._replace(personal=(), memory=()), key)
    train_all = on_each_device(functools.partial(_train_all, plan), plan.mesh)
    (sums, weighing, seen), own = train_all(common, given)
    # Padding is cut off where the state has none; on a mesh the state's own rows are padded too.
    own = jax.tree.map(lambda new, old: new[: old.shape[0]], own, before)
    seen = jax.tree.map(lambda leaf: leaf[:rows], seen)
    everybody = rows if population is None else population
    # Once for all devices: the sums are the same everywhere.
    after, finite = conclude(plan.server, state, sums, seen["counts"], everybody)
    weights = normalize(seen["weights"])
    # A round in which no client counts keeps the last weights; > is False for NaN too.
    after = after._replace(
        weights=jnp.where(weights.sum() > 0, weights, state.weights),
        weighing=weighing,
        personal=own.personal,
        memory=own.memory,
    )
    return after, {
        "loss": jnp.where(seen["participates"], seen["loss"], jnp.nan),
        "step_loss": seen["step_loss"],
        "risk": seen["risk"],
        "weights": weights,
        "finite": seen["finite"],
        "server_finite": finite,
    }


def _train_all(
    plan: _Plan, meeting: Meeting, common: tuple, rows: tuple
) -> tuple[tuple[Sums, PyTree, Metrics], Own]:
    """Trains the clients of one device, and sums their uploads over the clients of all devices."""
    (state, key), (early, old, batches) = common, rows
    broadcast, divided = broadcast_of(state), divides_clients(plan.mesh)

    def one(own: Own, weight: jax.Array | None, batches: Batches) -> tuple[PyTree, Own, tuple]:
        own, upload, losses = take_part(plan.client, broadcast, own, batches, key, divided)
        if weight is None:
            return (), own, (upload, losses)
        part = part_of(plan.server, weight, upload)
        # The upload's leaves are in the sum already: stacked they would fill the memory.
        return part, own, (upload._replace(shared=(), message=()), losses)

    # Rows first: `map_and_sum` renews them in place, and hands the others out one client at a time.
    sums, own, (uploads, losses) = map_and_sum(one, plan.clients, old, early, batches)
    weights, weighing = early, state.weighing
    if early is None:
        # Risks and messages are known only now, and a rule sees those of all devices' clients.
        leaves = isinstance(plan.weigh, Weighing) and plan.weigh.by_leaf is not None
        needed = uploads if leaves else uploads._replace(shared=())
        _, everybody = meeting.together((), needed)
        num_clients = state.weights.shape[0]
        # Without rows of padding: a rule's state has a row for each real client alone.
        known = jax.tree.map(lambda leaf: leaf[:num_clients], everybody)
        *both, weighing = weigh_uploads(plan.weigh, weighing, known)
        weights, by_leaf = meeting.mine(pad_rows(tuple(both), everybody.size.shape[0]))
        sums = sum_uploads(plan.server, weights, uploads, by_leaf)
    counts = uploads.counts
    seen = {
        "loss": uploads.loss,
        "step_loss": losses,
        "risk": uploads.risk,
        "weights": jnp.where(counts, weights, 0),
        "finite": uploads.finite,
        "participates": uploads.participates,
        "counts": counts,
    }
    sums, seen = meeting.together(sums, seen)
    return (sums, weighing, seen), own


def traffic(method: FederatedMethod, state: FederatedState, batches: Batches) -> dict[str, int]:
    """Returns {"down": bytes of a broadcast, "up": bytes of an upload} of one client and round.

    Args:
      method: the method.
      state: its state; only shapes count, here and in the batches.
      batches: a round's, without the axis K.
    """
    # From shapes alone: nothing is trained, and a state of shapes is enough.
    sent = jax.eval_shape(broadcast_of, state)
    own = jax.eval_shape(lambda state: own_of(state, 0), state)
    batches = batches | {"client": jax.ShapeDtypeStruct((), jnp.int32)}
    key = jax.eval_shape(jax.random.key, 0)
    _, upload = jax.eval_shape(method.client, sent, own, batches, key)
    down, up = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        for tree in (sent, upload)
    )
    return {"down": down, "up": up}
