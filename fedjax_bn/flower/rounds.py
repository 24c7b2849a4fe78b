"""Plays rounds over Flower: asks the clients that are connected, and collects their uploads.

Arguments of the same name mean the same in all functions: `grid` is Flower's Grid, `host` the
server's side, `met` the clients that the server has met, `kept` its state after the last round.
"""

import json
import time
from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import NamedTuple

import jax
import numpy as np
from flwr.app import Message, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedjax_bn.arguments.text import shown
from fedjax_bn.engine.named_arrays import to_named
from fedjax_bn.federation import broadcast_of
from fedjax_bn.flower import messages
from fedjax_bn.flower.accept import Accepted, Expected, accept
from fedjax_bn.flower.host import Host, Kept
from fedjax_bn.flower.messages import Hello, Order, content_of
from fedjax_bn.run.errors import ConfigError, RiskError, UserError
from fedjax_bn.run.evaluation.groups import by_client
from fedjax_bn.run.experiment.availability import draw_cohort
from fedjax_bn.run.files.finished import impossible
from fedjax_bn.run.files.workdir import FINISHED, misfit
from fedjax_bn.run.training.records import Record, round_record, warnings_of

_AGAIN = 60.0  # seconds until a refused node is asked again


class TooFewError(UserError):
    """A round got fewer good uploads than the run config asks for."""


class _Member(NamedTuple):
    """A client that has presented itself.

    Attributes:
      node: Flower's current number of the client's node.
      name: the client's name in the records.
      hello: how the client presented itself.
    """

    node: int
    name: str
    hello: Hello


class Met(NamedTuple):
    """The clients that the server has met.

    Attributes:
      members: client -> member, for clients that are connected.
      refused: node -> the time from `time.monotonic` at which it may be asked again.
      sizes: client -> the size that it reported last, also for clients that have gone.
    """

    members: Mapping[int, _Member] = {}
    refused: Mapping[int, float] = {}
    sizes: Mapping[int, int] = {}

    def name(self, client: int) -> str:
        """Returns the name of a client in the records."""
        return self.members[client].name if client in self.members else f"client-{client}"


def meet(grid: Grid, met: Met, order: Order, seconds: float) -> Met:
    """Asks new nodes to present themselves; returns the clients that are connected now.

    If a node's answer cannot be used, or another node is the same client, the log names the node,
    and it is asked again after a minute. Members whose node has gone are left out.

    Args:
      grid, met: see the module; `met` is the result of the last call.
      order: the header of the question.
      seconds: how long to wait for an answer.
    """
    nodes, now = set(grid.get_node_ids()), time.monotonic()
    found = {k: member for k, member in met.members.items() if member.node in nodes}
    refused = {node: again for node, again in met.refused.items() if node in nodes and again > now}
    new = sorted(nodes - {member.node for member in found.values()} - set(refused))
    questions = {node: messages.packed(order) for node in new}
    replies = messages.exchange(grid, questions, MessageType.QUERY, seconds)
    for node in new:
        try:
            client, hello = _presented(replies.get(node), order)
            if client in found:
                raise ValueError(f"it presents itself as client {client}, which is there already")
            # Records have an entry for each name and one for "mean", so names must be unique.
            others = {other.name for other in found.values()} | {"mean"}
            others |= {f"client-{k}" for k in range(order.population) if k != client}
            name = shown(hello.name)[:80] or f"client-{client}"
            while name in others:
                name += f"-{client}"
            found[client] = _Member(node, name, hello)
        except ValueError as error:
            log(WARNING, "node %s is left out: %s", node, shown(str(error)))
            refused[node] = time.monotonic() + _AGAIN
    sizes = {k: member.hello.size for k, member in found.items()}
    return Met(dict(sorted(found.items())), refused, {**met.sizes, **sizes})


def _presented(reply: Message | None, order: Order) -> tuple[int, Hello]:
    """Returns a client's number and its `Hello`; raises ValueError if they cannot be used."""
    content = content_of(reply, order, None)
    client = messages.record_in(content, messages.Answer).client
    hello = messages.record_in(content, Hello)
    try:
        form = json.loads(hello.form) | {"dataset": "federation", "clients": ["one"]}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its form of samples is not a JSON object: {hello.form:.80}") from error
    if wrong := misfit(form, FINISHED["form"], "its form of samples") or impossible(form):
        raise ValueError(f"no samples have the form that it gives for its own ({wrong})")
    if not 0 <= client < order.population:
        raise ValueError(
            f"it presents itself as client {client}, but there are {order.population}, from 0: see "
            "clients in the run config"
        )
    if not 0 <= hello.size < 2**31:
        raise ValueError(f"it reports {hello.size} samples")
    return client, hello


def play(grid: Grid, host: Host, met: Met, kept: Kept) -> tuple[Kept, Record, Met]:
    """Plays the next round, and repeats it if too few uploads are good.

    Returns:
      The new `Kept`, the round's record, and the clients that are connected now.

    Raises:
      TooFewError: every attempt that the run config allows got too few good uploads.
      RiskError, ConfigError: the weighing rule made weights that are not finite.
    """
    number, start = int(kept.round) + 1, time.perf_counter()
    rows, asked = _drawn(host, met, number - 1)
    least = host.run.minimum or len(asked)
    for attempt in range(1, host.run.attempts + 1):
        met = meet(grid, met, host.order, host.run.time_limit)
        accepted, left_out = _uploads(grid, host, met, kept, asked)
        for name, reason in left_out.items():
            log(WARNING, "round %s: %s is left out: %s", number, name, reason)
        if len(accepted) >= min(least, len(asked)) and (accepted or not asked):
            break
        log(WARNING, "round %s: %s of %s uploads", number, len(accepted), least)
        if attempt == host.run.attempts:
            raise TooFewError(
                f"round {number} got {len(accepted)} good uploads in each of {attempt} attempts, "
                f"fewer than {max(least, 1)} (minimum in the run config): see the log for who was "
                "left out and why, and start again to resume from the last round"
            )
    after = host.step(kept, accepted, rows)
    weights = np.asarray(after.state.weights)
    if not np.isfinite(weights).all():
        # A client that does not report its risk sends NaN, which makes the weights NaN.
        hidden = [met.name(k) for k, one in accepted.items() if np.isnan(one.upload.risk)]
        if hidden:
            raise ConfigError(
                f"round {number}: {hidden[0]} keeps its losses to itself, which the weighing rule "
                f"{host.config.weigh or 'of ' + host.config.method} needs: let it report them, or "
                "set config.weigh=by_size or uniform"
            )
        raise RiskError(f"round {number}: the weighing rule gave weights that are not finite")
    # The record becomes a line of metrics.jsonl, with the norms of the accepted updates.
    population, limit, taken = host.run.clients, host.config.clients_named, list(accepted)
    names = [*map(met.name, range(population))]
    loss, norm, weighed = (np.full(population, fill) for fill in (np.nan, np.nan, 0.0))
    loss[taken] = [one.upload.loss for one in accepted.values()]
    norm[taken] = [one.norm for one in accepted.values()]
    weighed[taken] = weights[taken]
    finite = {"finite": np.ones(population, bool), "server_finite": True}  # `accept` has checked
    metrics = {"loss": loss, "weights": weighed, "norm": norm} | finite
    seconds = time.perf_counter() - start
    record = round_record(names, metrics, number, seconds, limit)
    for warning in warnings_of(record):
        log(WARNING, "%s", shown(warning))
    log(INFO, "round %s: %s uploads, %.1f s", number, len(taken), seconds)
    return after, record | ({"left_out": left_out} if left_out else {}), met


def evaluate(grid: Grid, host: Host, met: Met, kept: Kept) -> Record:
    """Returns {"accuracy": {client: percent, "mean": ...}, "validation": ...} of reporting clients.

    If a client fails, or does not answer within the run's time limit, the log names it, and it has
    no score.
    """
    members = met.members
    # A client whose upload was never taken has no model of its own yet.
    trained = [k for k, m in members.items() if m.hello.scores and np.asarray(kept.taken)[k]]
    replies = _asked(grid, host, met, kept, trained, MessageType.EVALUATE, int(kept.round))
    found: dict[str, np.ndarray] = {}
    for k in trained:
        try:
            scores = messages.scores_in(content_of(replies.get(k), host.order, k))
        except ValueError as error:
            log(WARNING, "%s is not evaluated: %s", members[k].name, shown(str(error)))
            continue
        for name in scores.keys() & {"accuracy", "validation"}:
            found.setdefault(name, np.full(host.run.clients, np.nan))[k] = scores[name]
    names, limit = [*map(met.name, range(host.run.clients))], host.config.clients_named
    record = {}
    for name, values in sorted(found.items()):
        if len(names) <= limit:  # clients without a score have NaN; `by_client` would write None
            named = dict(zip(names, values.tolist(), strict=True))
            record[name] = named | {"mean": float(np.nanmean(values))}
        else:
            record[name] = by_client(names, values, limit)
    return record


def _drawn(host: Host, met: Met, number: int) -> tuple[np.ndarray, list[int]]:
    """Returns the clients i32[C] that the simulation would draw, and those of them that take part.

    Draws by size leave out clients that this server has never met.
    """
    population, how = host.run.clients, host.participation
    sizes = np.array([met.sizes.get(k, 0) for k in range(population)])
    if how.drawn and how.draw == "by_size" and not all(met.sizes.values()):
        hidden = next(k for k, size in met.sizes.items() if not size)
        raise ConfigError(
            f"config.participation.draw='by_size' needs the sizes of all clients, but client "
            f"{hidden} does not report its own: let it report sizes, or set "
            "participation.draw=uniform"
        )
    cohort = draw_cohort(how, sizes, host.keys.participation, np.int32(number))
    rows = np.arange(population) if cohort.client is None else np.asarray(cohort.client)
    stays = np.ones(len(rows), bool) if cohort.participates is None else cohort.participates
    return rows.astype(np.int32), [int(k) for k in rows[np.asarray(stays)]]


def _asked(
    grid: Grid, host: Host, met: Met, kept: Kept, clients: Iterable[int], kind: str, number: int
) -> dict[int, Message]:
    """Sends clients the broadcast of round `number`; returns client -> reply.

    Clients that have not trained yet also get the frozen leaves, which they keep.
    """
    sent = to_named(broadcast_of(kept.state))
    arrays = messages.recorded(sent)  # all messages share the bytes
    first = arrays
    if host.order.frozen and not all(np.asarray(kept.taken)[[*clients]]):
        first = messages.recorded(sent | to_named({"frozen": kept.state.frozen}))
    node = {k: met.members[k].node for k in clients}
    orders = {k: host.order._replace(begin=int(kept.taken[k])) for k in node}
    contents = {
        node[k]: messages.packed(order, arrays if order.begin else first)
        for k, order in orders.items()
    }
    replies = messages.exchange(grid, contents, kind, host.run.time_limit, str(number))
    return {k: replies[node[k]] for k in node if node[k] in replies}


def _uploads(
    grid: Grid, host: Host, met: Met, kept: Kept, asked: list[int]
) -> tuple[dict[int, Accepted], dict[str, str]]:
    """Returns client -> accepted upload, and client's name -> reason why it is left out."""
    members, form = met.members, host.form
    there = [k for k in asked if k in members and members[k].hello.form == form]
    replies = _asked(grid, host, met, kept, there, MessageType.TRAIN, int(kept.round) + 1)
    accepted, left_out, shared = {}, {}, jax.device_get(kept.state.shared)
    for k in asked:
        try:
            if k not in members:
                raise ValueError("it is not connected")
            hello = members[k].hello
            if hello.form != form:
                raise ValueError(f"its samples are {hello.form}, not {form} as others' are")
            content = content_of(replies.get(k), host.order, k)
            expected = Expected(
                upload=host.upload,
                personal=host.personal,
                shared=shared,
                client=k,
                population=host.run.clients,
                size=hello.size,
                losses=hello.losses,
                norm_bound=host.run.norm_bound,
            )
            accepted[k] = accept(messages.arrays_in(content), expected)
        except ValueError as error:
            left_out[met.name(k)] = shown(str(error))
    return accepted, left_out
