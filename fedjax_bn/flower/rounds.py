"""Plays rounds over Flower: asks the clients that are connected, and collects their uploads.

Arguments of the same name mean the same in all functions: `grid` is Flower's Grid, `host` the
server's side, `met` the clients that the server has met, `server` its state after the last round.
"""

import time
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedjax_bn.arguments.errors import ConfigError, RiskError, UserError
from fedjax_bn.arguments.text import short, shown
from fedjax_bn.data.domain import part_of_all
from fedjax_bn.engine.named_arrays import to_named
from fedjax_bn.federation import broadcast_of
from fedjax_bn.flower import messages
from fedjax_bn.flower.accept import Accepted, Expected, MisfitError, accept
from fedjax_bn.flower.host import Host, Kept
from fedjax_bn.flower.members import Met, meet
from fedjax_bn.flower.messages import Reply, content_of
from fedjax_bn.training.availability import draw_cohort
from fedjax_bn.training.records import Record, by_client, round_record, warnings_of


class TooFewError(UserError):
    """A round got fewer good uploads than the run config asks for."""


class _Uploads(NamedTuple):
    """What a round got.

    Attributes:
      accepted: client -> accepted upload without its arrays, in the order of the clients.
      total: the total of `Host.add`.
      left_out: client's name -> why it is left out.
      misfits: nodes whose answers do not fit what they said when they presented themselves.
    """

    accepted: dict[int, Accepted]
    total: Any
    left_out: dict[str, str]
    misfits: set[int]


def play(
    grid: Grid, host: Host, met: Met, server: Kept, write: Callable[[Met], Met]
) -> tuple[Kept, Record, Met]:
    """Plays the next round, and repeats it if too few uploads are good.

    `write` stores the bindings of clients to keys before any of them trains.

    Returns:
      The new `Kept`, the round's record, and the clients that are connected now.

    Raises:
      TooFewError: every attempt that the run config allows got too few good uploads.
      RiskError, ConfigError: the weighing rule made weights that are not finite.
    """
    number, start = int(server.round) + 1, time.perf_counter()
    rows, asked = _drawn(host, met, number - 1)
    minimum, misfits = host.run.minimum or len(asked), set()
    for attempt in range(1, host.run.attempts + 1):
        met = write(meet(grid, met, host.order, host.run))
        got = _uploads(grid, host, met, server, asked)
        # A node is asked to present itself again once in a round at most.
        met, misfits = met._replace(misfits=got.misfits - misfits), misfits | got.misfits
        accepted, left_out = got.accepted, got.left_out
        for name, reason in left_out.items():
            log(WARNING, "round %s: %s is left out: %s", number, name, reason)
        if len(accepted) >= min(minimum, len(asked)) and (accepted or not asked):
            break
        log(WARNING, "round %s: %s of %s uploads", number, len(accepted), minimum)
        if attempt == host.run.attempts:
            raise TooFewError(
                f"round {number} got {len(accepted)} good uploads in each of {attempt} attempts, "
                f"fewer than {max(minimum, 1)} (minimum in the run config): see the log for who "
                "was left out and why, and start again to resume from the last round"
            )
    after, seen, accepted, unweighed = _stepped(host, met, server, got, rows, max(minimum, 1))
    left_out |= unweighed
    # The record becomes a line of metrics.jsonl, with the norms of the accepted updates.
    population, limit, taken = host.run.clients, host.config.clients_named, list(accepted)
    names = [*map(met.name, range(population))]
    loss, norm = np.full((2, population), np.nan)
    loss[taken] = [upload.upload.loss for upload in accepted.values()]
    norm[taken] = [upload.norm for upload in accepted.values()]
    # `accept` has checked that uploads are finite.
    metrics = seen | {"loss": loss, "norm": norm, "finite": np.ones(population, bool)}
    seconds = time.perf_counter() - start
    record = round_record(names, metrics, number, seconds, limit)
    for warning in warnings_of(record):
        log(WARNING, "%s", shown(warning))
    if not seen["server_finite"]:
        log(WARNING, "round %s: the server's step is not finite: the shared leaves stay", number)
    log(INFO, "round %s: %s uploads, %.1f s", number, len(taken), seconds)
    for key, reasons in (("left_out", left_out), ("refused", met.refused)):
        record |= {key: dict(reasons)} if reasons else {}
    return after, record, met._replace(refused={})


def _stepped(
    host: Host, met: Met, server: Kept, got: _Uploads, rows: np.ndarray, minimum: int
) -> tuple[Kept, dict[str, np.ndarray], dict[int, Accepted], dict[str, str]]:
    """Makes the server's step, again without the clients whose weights are not finite.

    A client that hides its risk sends NaN, and REA weighs a risk that is not positive with NaN.

    Returns:
      The new `Kept`, the metrics weights f[K] and server_finite bool[] of the round, the uploads
      that were added, and name -> why a client is left out.

    Raises:
      RiskError, ConfigError: fewer than `minimum` uploads have weights that are finite.
    """
    number, rule = int(server.round) + 1, host.config.weigh or f"of {host.config.method}"
    after, weights, finite = host.step(server, got.total, rows)
    unweighable = [k for k in got.accepted if not np.isfinite(weights[k])]
    good = {k: upload for k, upload in got.accepted.items() if k not in unweighable}
    if unweighable and len(good) >= minimum:
        # Sums have finite weights, so this total has each upload.
        after, weights, finite = host.step(server, {k: got.total[k] for k in good}, rows)
    if np.isfinite(weights).all():
        reasons = dict.fromkeys(
            map(met.name, unweighable), f"the weighing rule {rule} cannot weigh its risk"
        )
        for name, reason in reasons.items():
            log(WARNING, "round %s: %s is left out: %s", number, name, reason)
        seen = {"weights": np.asarray(weights), "server_finite": np.asarray(finite)}
        return after, seen, good, reasons
    hidden = [met.name(k) for k, upload in got.accepted.items() if np.isnan(upload.upload.risk)]
    if hidden:
        raise ConfigError(
            f"round {number}: {hidden[0]} keeps its losses to itself, which the weighing rule "
            f"{rule} needs: let it report them, or set config.weigh=by_size or uniform"
        )
    raise RiskError(f"round {number}: the weighing rule gave weights that are not finite")


def evaluate(grid: Grid, host: Host, met: Met, server: Kept) -> Record:
    """Returns {"accuracy": {client: percent, "mean": ...}, "validation": ...} of reporting clients.

    "tested_on" says of which of their samples the accuracies are, see `data.domain.scored_part`.

    Clients whose samples have another form are not asked. If a client fails, or does not answer
    within the run's time limit, the log names it, and it has no score.
    """
    number = int(server.round)
    order, scores_of, parts = host.order._replace(round=number), {}, []
    # A client whose upload was never taken has no model of its own yet.
    trained = [
        k
        for k, member in met.members.items()
        if member.hello.scores and member.hello.form == host.form and np.asarray(server.taken)[k]
    ]

    def take(k: int, reply: Reply) -> None:
        try:
            scores = messages.scores_in(content_of(reply, order, k))
        except ValueError as error:
            log(WARNING, "%s is not evaluated: %s", met.name(k), short(str(error), 500))
            return
        validates = scores.get(messages.TESTED_ON_VALIDATION, 0.0) > 0
        parts.append("validation" if validates else "test")
        for name in scores.keys() & {"accuracy", "validation"}:
            scores_of.setdefault(name, np.full(host.run.clients, np.nan))[k] = scores[name]

    _asked(grid, host, met, server, trained, MessageType.EVALUATE, number, take)
    names, limit = [*map(met.name, range(host.run.clients))], host.config.clients_named
    record = {}
    for name, values in sorted(scores_of.items()):
        # Clients without a score have NaN, and groups of them no entry: a record allows no None.
        if len(names) <= limit:
            named = dict(zip(names, values.tolist(), strict=True))
            record[name] = named | {"mean": float(np.nanmean(values))}
        else:
            named_scores = by_client(names, values, limit).items()
            record[name] = {k: x for k, x in named_scores if x is not None}
    return record | ({"tested_on": {"internal": part_of_all(parts)}} if parts else {})


def _drawn(host: Host, met: Met, number: int) -> tuple[np.ndarray, list[int]]:
    """Returns the clients i32[C] that the simulation would draw, and those of them that take part.

    Draws by size take clients without a size last: they report none, or were never met.
    """
    population, participation = host.run.clients, host.participation
    sizes = np.array([met.sizes.get(k, 0) for k in range(population)])
    if participation.drawn and participation.draw == "by_size" and not all(met.sizes.values()):
        hidden = ", ".join(met.name(k) for k, size in met.sizes.items() if not size)
        log(
            WARNING,
            "config.participation.draw='by_size' draws %s last, because no size is reported: let "
            "it report sizes, or set participation.draw=uniform",
            hidden,
        )
    client, stays = draw_cohort(participation, sizes, host.keys.participation, np.int32(number))
    rows = np.arange(population) if client is None else np.asarray(client)
    stays = np.ones(len(rows), bool) if stays is None else stays
    return rows.astype(np.int32), [int(k) for k in rows[np.asarray(stays)]]


def _asked(
    grid: Grid,
    host: Host,
    met: Met,
    server: Kept,
    clients: Iterable[int],
    kind: str,
    number: int,
    read: Callable[[int, Reply], None],
) -> None:
    """Sends clients the broadcast of round `number`, and calls `read(client, reply)` for each.

    Clients that have not trained yet also get the frozen leaves, which they keep.
    """
    sent = to_named(broadcast_of(server.state))
    arrays = messages.recorded(sent)  # all messages share the bytes
    first_arrays = arrays
    if host.order.frozen and not all(np.asarray(server.taken)[[*clients]]):
        first_arrays = messages.recorded(sent | to_named({"frozen": server.state.frozen}))
    client = {met.members[k].node: k for k in clients}
    order = host.order._replace(round=number)
    orders = {node: order._replace(begin=int(server.taken[k])) for node, k in client.items()}
    contents = {
        node: messages.packed(order, arrays if order.begin else first_arrays)
        for node, order in orders.items()
    }
    seconds, group = host.run.time_limit, str(number)
    messages.exchange(
        grid, contents, kind, seconds, lambda node, reply: read(client[node], reply), group
    )


def _uploads(grid: Grid, host: Host, met: Met, server: Kept, asked: list[int]) -> _Uploads:
    """Asks clients to train, and adds their uploads one by one; `asked` are in ascending order."""
    members, form = met.members, host.form
    number, array_limit = int(server.round) + 1, len(jax.tree.leaves((host.upload, host.personal)))
    order, shared = host.order._replace(round=number), jax.device_get(server.state.shared)
    accepted, total, reasons, misfits = {}, None, {}, set()

    def take(k: int, reply: Reply) -> None:
        nonlocal total
        hello = members[k].hello
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
        try:
            upload = accept(messages.arrays_in(content_of(reply, order, k), array_limit), expected)
        except ValueError as error:
            reasons[k] = str(error)
            if isinstance(error, MisfitError):
                misfits.add(members[k].node)
            return
        total = host.add(total, upload)
        # The arrays are in the total already; without them a round holds one upload at a time.
        accepted[k] = upload._replace(
            upload=upload.upload._replace(shared=(), message=()), personal=()
        )

    for k in asked:
        if k not in members:
            reasons[k] = "it is not connected"
        elif members[k].hello.form != form:
            client_form = members[k].hello.form
            reasons[k] = f"its samples are {client_form:.200}, not {form:.200} as others' are"
            misfits.add(members[k].node)
    connected = [k for k in asked if k not in reasons]
    _asked(grid, host, met, server, connected, MessageType.TRAIN, number, take)
    left_out = {met.name(k): short(reasons[k], 500) for k in asked if k in reasons}
    return _Uploads(accepted, total, left_out, misfits)
