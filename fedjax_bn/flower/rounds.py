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
from fedjax_bn.flower.records import Order, arrays_in, packed, recorded, scores_in
from fedjax_bn.run.errors import ConfigError, RiskError, UserError
from fedjax_bn.run.evaluation.groups import by_client
from fedjax_bn.run.experiment.availability import draw_cohort
from fedjax_bn.run.training.records import Record, round_record

Members = Mapping[int, Member]


class TooFewError(UserError):
    """A round did not get as many good uploads as the run config asks for."""


def play(grid: Grid, host: Host, met: Met, kept: Kept) -> tuple[Kept, Record, Met]:
    """The next round; where too few uploads are good, it is begun again.

    Args:
      grid: Flower's.
      host: the server's side.
      met: who was there in the round before.
      kept: behind the round before.

    Returns:
      What is kept, the round's record, and who is there now.

    Raises:
      TooFewError: it was begun as often as the run config says.
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
                "left out and why, and start again to go on from the last round"
            )
    after = host.step(kept, accepted, rows)
    _check_weights(host, members, accepted, np.asarray(after.state.weights), number)
    record = _record(host, members, accepted, after, time.perf_counter() - start)
    if left_out:
        record["left_out"] = {_name(members, k): reason for k, reason in left_out.items()}
    return after, record, met


def evaluate(grid: Grid, host: Host, members: Members, kept: Kept) -> Record:
    """{"accuracy": {client: percent, "mean": ...}, "validation": ...}, of those who tell them.

    A client that fails, or does not answer within the run's time limit (seconds), is named in the
    log and has no score.

    Args:
      grid: Flower's.
      host: the server's side.
      members: who is there, by number.
      kept: behind the round that is tested.
    """
    trained = {k: m for k, m in members.items() if m.scores and np.asarray(kept.taken)[k]}
    arrays = recorded(to_named(broadcast_of(kept.state)))
    contents = {m.node: packed(arrays, _order(host, kept, k)) for k, m in trained.items()}
    group = str(int(kept.round))
    replies = exchange(grid, contents, MessageType.EVALUATE, host.run.time_limit, group)
    told: dict[str, np.ndarray] = {}
    for k, member in trained.items():
        try:
            scores = scores_in(content_of(replies.get(member.node), host.order, k))
        except ValueError as error:
            log(WARNING, "%s is not evaluated: %s", member.name, shown(str(error)))
            continue
        for name in ("accuracy", "validation"):
            if name in scores:
                told.setdefault(name, np.full(host.run.clients, np.nan))[k] = scores[name]
    return {name: _scores(host, members, values) for name, values in told.items()}


def _scores(host: Host, members: Members, values: np.ndarray) -> dict[str, float]:
    """Client -> its score, NaN where it told none, and their mean."""
    names = [_name(members, k) for k in range(host.run.clients)]
    limit = host.config.clients_named
    mean = float(np.nanmean(values))
    named = dict(zip(names, values.tolist(), strict=True))
    return named | {"mean": mean} if len(names) <= limit else by_client(names, values, limit)


def _drawn(host: Host, met: Met, number: int) -> tuple[np.ndarray, list[int]]:
    """i32[C], the clients of a round as the simulation draws them, and who of them takes part.

    By size nobody is drawn whom this server has never met.
    """
    config, population = host.config, host.run.clients
    sizes = np.array([met.sizes.get(k, 0) for k in range(population)])
    by_size = config.clients_per_round and config.participation.draw == "by_size"
    if by_size and not all(met.sizes.values()):
        hidden = next(k for k, size in met.sizes.items() if not size)
        raise ConfigError(
            f"config.participation.draw='by_size' needs the sizes of all clients, but client "
            f"{hidden} does not report its own: let it report sizes, or set "
            "participation.draw=uniform"
        )
    cohort = draw_cohort(config, host.trace, sizes, host.keys.participation, np.int32(number))
    rows = np.arange(population) if cohort.client is None else np.asarray(cohort.client)
    stays = np.ones(len(rows), bool) if cohort.participates is None else cohort.participates
    return rows.astype(np.int32), [int(k) for k in rows[np.asarray(stays)]]


def _ask(
    grid: Grid, host: Host, members: Members, kept: Kept, asked: list[int]
) -> tuple[dict[int, Accepted], dict[int, str]]:
    """The uploads that are taken, and why others are not, by client."""
    arrays = recorded(to_named(broadcast_of(kept.state)))
    contents: dict[int, RecordDict] = {}
    for k in asked:
        if k in members and members[k].form == host.form:
            contents[members[k].node] = packed(arrays, _order(host, kept, k))
    group = str(int(kept.round) + 1)
    replies = exchange(grid, contents, MessageType.TRAIN, host.run.time_limit, group)
    accepted, left_out = {}, {}
    shared = jax.device_get(kept.state.shared)
    for k in asked:
        try:
            accepted[k] = _accept(host, members, replies, shared, k)
        except ValueError as error:
            left_out[k] = shown(str(error))
    return accepted, left_out


def _accept(
    host: Host, members: Members, replies: Mapping[int, Any], shared: Any, client: int
) -> Accepted:
    """The upload of a client; ValueError says why it has none that is taken."""
    member = members.get(client)
    if member is None:
        raise ValueError("it is not connected")
    if member.form != host.form:
        raise ValueError(f"its samples are {member.form}, not {host.form} as those of others")
    expected = Expected(
        upload=host.upload,
        personal=host.personal,
        shared=shared,
        client=client,
        population=host.run.clients,
        size=member.size,
        losses=member.losses,
        norm_bound=host.run.norm_bound,
    )
    content = content_of(replies.get(member.node), host.order, client)
    return accept(arrays_in(content), expected)


def _order(host: Host, kept: Kept, client: int) -> Order:
    return host.order._replace(begin=int(kept.taken[client]))


def _name(members: Members, client: int) -> str:
    return members[client].name if client in members else f"client-{client}"


def _check_weights(
    host: Host,
    members: Members,
    accepted: Mapping[int, Accepted],
    weights: np.ndarray,
    number: int,
) -> None:
    """Raises where the weighing rule gave none."""
    if np.isfinite(weights).all():
        return
    hidden = [_name(members, k) for k, one in accepted.items() if np.isnan(one.upload.risk)]
    if hidden:
        raise ConfigError(
            f"round {number}: {hidden[0]} keeps its losses to itself, which the weighing rule "
            f"{host.config.weigh or 'of ' + host.config.method} needs: let it report them, or set "
            "config.weigh=by_size or uniform"
        )
    raise RiskError(f"round {number}: the weighing rule gave weights that are not finite")


def _record(
    host: Host, members: Members, accepted: Mapping[int, Accepted], kept: Kept, seconds: float
) -> Record:
    """One line of metrics.jsonl, with the norms of the updates that were taken."""
    population = host.run.clients
    names = [_name(members, k) for k in range(population)]
    loss, norm, weights = (np.full(population, x) for x in (np.nan, np.nan, 0.0))
    for k, one in accepted.items():
        loss[k], norm[k] = one.upload.loss, one.norm
        weights[k] = kept.state.weights[k]
    metrics = {
        "loss": loss,
        "weights": weights,
        "finite": np.ones(population, bool),
        "server_finite": True,
    }
    limit = host.config.clients_named
    record = round_record(names, metrics, int(kept.round), seconds, limit)
    log(INFO, "round %s: %s uploads, %.1f s", int(kept.round), len(accepted), seconds)
    return record | {"norm": by_client(names, norm, limit, mean=False)}
