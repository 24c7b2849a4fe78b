"""A round over Flower: who is asked, whose upload is taken, who is left out and why."""

import time
from collections.abc import Mapping
from logging import INFO, WARNING
from typing import Any

import jax
import numpy as np
from flwr.app import MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedjax_bn.arguments.text import shown
from fedjax_bn.engine.named_arrays import to_named
from fedjax_bn.federation import broadcast_of
from fedjax_bn.flower.accept import Accepted, Expected, accept
from fedjax_bn.flower.host import Host, Kept
from fedjax_bn.flower.members import Member, Met, content_of, exchange, meet
from fedjax_bn.flower.records import arrays_in, packed, recorded, scores_in
from fedjax_bn.run.errors import ConfigError, RiskError, UserError
from fedjax_bn.run.evaluation.groups import by_client
from fedjax_bn.run.experiment.availability import draw_cohort
from fedjax_bn.run.training.records import Record, round_record

Members = Mapping[int, Member]


class TooFewError(UserError):
    """A round did not get as many good uploads as the run config asks for."""


def play(grid: Grid, host: Host, met: Met, kept: Kept) -> tuple[Kept, Record, Met]:
    """Plays the next round; where too few uploads are good, it is begun again.

    Args:
      grid: Flower's.
      host: the server's side.
      met: who was there in the round before.
      kept: after the round before.

    Returns:
      What is kept, the round's record, and who is there now.

    Raises:
      TooFewError: it was begun as often as the run config allows.
      RiskError, ConfigError: the weighing rule cannot use what clients report.
    """
    number, start = int(kept.round) + 1, time.perf_counter()
    rows, asked = _drawn(host, met, number - 1)
    least = host.run.minimum or len(asked)
    for attempt in range(1, host.run.attempts + 1):
        met = meet(grid, met, host.order, host.run.time_limit)
        members = met.members
        accepted, left_out = _ask(grid, host, members, kept, asked)
        for client, reason in left_out.items():
            log(WARNING, "round %s: %s is left out: %s", number, _name(members, client), reason)
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
        hidden = [_name(members, k) for k, one in accepted.items() if np.isnan(one.upload.risk)]
        if hidden:
            raise ConfigError(
                f"round {number}: {hidden[0]} keeps its losses to itself, which the weighing rule "
                f"{host.config.weigh or 'of ' + host.config.method} needs: let it report them, or "
                "set config.weigh=by_size or uniform"
            )
        raise RiskError(f"round {number}: the weighing rule gave weights that are not finite")
    record = _record(host, members, accepted, weights, number, time.perf_counter() - start)
    if left_out:
        record["left_out"] = {_name(members, k): reason for k, reason in left_out.items()}
    return after, record, met


def evaluate(grid: Grid, host: Host, members: Members, kept: Kept) -> Record:
    """Returns {"accuracy": {client: percent, "mean": ...}, "validation": ...} of those who report.

    A client that fails, or does not answer within the run's time limit (seconds), is named in the
    log and has no score.

    Args:
      grid: Flower's.
      host: the server's side.
      members: who is there, by number.
      kept: after the round that is tested.
    """
    trained = [k for k, m in members.items() if m.scores and np.asarray(kept.taken)[k]]
    replies = _exchange(grid, host, members, kept, trained, MessageType.EVALUATE, int(kept.round))
    found: dict[str, np.ndarray] = {}
    for k in trained:
        try:
            scores = scores_in(content_of(replies.get(members[k].node), host.order, k))
        except ValueError as error:
            log(WARNING, "%s is not evaluated: %s", members[k].name, shown(str(error)))
            continue
        for name in ("accuracy", "validation"):
            if name in scores:
                found.setdefault(name, np.full(host.run.clients, np.nan))[k] = scores[name]
    names, limit = [_name(members, k) for k in range(host.run.clients)], host.config.clients_named
    record = {}
    for name, values in found.items():
        if len(names) <= limit:  # unlike `by_client` NaN, not None, of clients without a score
            named = dict(zip(names, values.tolist(), strict=True))
            record[name] = named | {"mean": float(np.nanmean(values))}
        else:
            record[name] = by_client(names, values, limit)
    return record


def _drawn(host: Host, met: Met, number: int) -> tuple[np.ndarray, list[int]]:
    """i32[C], the clients of a round as the simulation draws them, and who of them takes part.

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


def _exchange(
    grid: Grid,
    host: Host,
    members: Members,
    kept: Kept,
    clients: list[int],
    kind: str,
    number: int,
) -> dict[int, Any]:
    """Sends clients the broadcast; returns node -> reply. `number` is the round's."""
    arrays = recorded(to_named(broadcast_of(kept.state)))  # all messages share these bytes
    contents: dict[int, RecordDict] = {}
    for k in clients:
        order = host.order._replace(begin=int(kept.taken[k]))
        contents[members[k].node] = packed(order, arrays)
    return exchange(grid, contents, kind, host.run.time_limit, str(number))


def _ask(
    grid: Grid, host: Host, members: Members, kept: Kept, asked: list[int]
) -> tuple[dict[int, Accepted], dict[int, str]]:
    """The uploads that are taken, and why others are not, by client."""
    there = [k for k in asked if k in members and members[k].form == host.form]
    number = int(kept.round) + 1
    replies = _exchange(grid, host, members, kept, there, MessageType.TRAIN, number)
    accepted, left_out, shared = {}, {}, jax.device_get(kept.state.shared)
    for k in asked:
        try:
            if k not in members:
                raise ValueError("it is not connected")
            member = members[k]
            if member.form != host.form:
                raise ValueError(f"its samples are {member.form}, not {host.form} as others' are")
            content = content_of(replies.get(member.node), host.order, k)
            expected = Expected(
                upload=host.upload,
                personal=host.personal,
                shared=shared,
                client=k,
                population=host.run.clients,
                size=member.size,
                losses=member.losses,
                norm_bound=host.run.norm_bound,
            )
            accepted[k] = accept(arrays_in(content), expected)
        except ValueError as error:
            left_out[k] = shown(str(error))
    return accepted, left_out


def _name(members: Members, client: int) -> str:
    return members[client].name if client in members else f"client-{client}"


def _record(
    host: Host,
    members: Members,
    accepted: Mapping[int, Accepted],
    weights: np.ndarray,
    number: int,
    seconds: float,
) -> Record:
    """One line of metrics.jsonl, with the norms of the updates that were taken."""
    population, limit = host.run.clients, host.config.clients_named
    names, taken = [_name(members, k) for k in range(population)], list(accepted)
    loss, norm = np.full(population, np.nan), np.full(population, np.nan)
    loss[taken] = [one.upload.loss for one in accepted.values()]
    norm[taken] = [one.norm for one in accepted.values()]
    metrics = {
        "loss": loss,
        "weights": np.where(np.isin(np.arange(population), taken), weights, 0.0),
        "finite": np.ones(population, bool),
        "server_finite": True,
    }
    record = round_record(names, metrics, number, seconds, limit)
    log(INFO, "round %s: %s uploads, %.1f s", number, len(accepted), seconds)
    return record | {"norm": by_client(names, norm, limit, mean=False)}
