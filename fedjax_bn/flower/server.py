"""Makes the ServerApp, which meets the clients, plays the rounds, and saves each of them.

For unseen clients it writes WORKDIR/served, which `fedjax-bn serve` and `evaluate` read. This
folder has the form of a finished run of one client. If the clients sent their personal leaves, it
has their mean (`global_variables` of the simulation).

Arguments of the same name mean the same in all functions: `host` is the server's side, `members`
the clients that the server has met, `server` its state after the last round.
"""

import json
import logging
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedjax_bn.arguments.errors import ConfigError, RiskError, UserError
from fedjax_bn.arguments.text import short, shown
from fedjax_bn.data.domain import part_of_all
from fedjax_bn.engine.named_arrays import names_of, to_named
from fedjax_bn.federation import broadcast_of
from fedjax_bn.flower import messages
from fedjax_bn.flower.host import Host, Kept
from fedjax_bn.flower.members import Accepted, Members, accept
from fedjax_bn.flower.messages import MisfitError, Order, Reply, content_of, digest_of
from fedjax_bn.flower.settings import Run, config_of, run_of
from fedjax_bn.flower.site import adds_noise, deployed, sent_personal
from fedjax_bn.run.config import check, flatten
from fedjax_bn.run.experiment.build import describe_privacy
from fedjax_bn.run.experiment.method import follows_rounds, method_maker
from fedjax_bn.run.files.ownership import claim, owned, resume
from fedjax_bn.sharing import OWN
from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.availability import draw_cohort
from fedjax_bn.training.callbacks.checkpoints import Checkpoints, Lines
from fedjax_bn.training.callbacks.evaluation import Patience, Scores
from fedjax_bn.training.experiment import privacy_notes
from fedjax_bn.training.loop import train
from fedjax_bn.training.records import (
    Record,
    by_client,
    out_of_patience,
    round_record,
    select_round,
    warnings_of,
)
from fedjax_bn.training.workdir import CLAIM, describe_machine

_Read = Callable[[int, Reply], None]
_SAME = ("clients", "serve_unseen")  # keys of the run config that a restart must not change
_POLL = 2.0  # seconds between two searches for clients that are not connected yet
_ABOUT = (*CLAIM, "sizes", "samples")  # of config.json


class TooFewError(UserError):
    """A round got fewer good uploads than the run config asks for."""


def server_app(folder: str | Path = ".") -> ServerApp:
    """Returns a ServerApp of the method that the run config's `config` names; see `settings`.

    The app uses Flower's Grid directly, without a Strategy: weights, server optimizers and messages
    are the method's own. Its workdir is like one of `fedjax-bn`; the same command continues from
    the last round. `folder` is the app's, in which the config file is looked for first.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        # Importing Orbax adds absl's handler, which would print Flower's lines a second time.
        for handler in logging.root.handlers:
            handler.addFilter(lambda record: record.name != "flwr")
        serve(grid, run_of(context.run_config), folder)

    return app


def serve(grid: Grid, run: Run, folder: str | Path = ".") -> tuple[Kept, list[Record]]:
    """Plays the rounds that are left; returns the server's last state, and all rounds' records.

    Raises what `play` raises, ConfigError for a wrong configuration, and WorkdirError or
    CheckpointError if the workdir belongs to another federation, or is damaged.
    """
    config = config_of(run.config, run.changes, folder)
    # The configuration is checked before the server waits for clients.
    check(config)
    method_maker(config)
    promised = describe_privacy(deployed(config), run.clients, config.rounds)
    place = Path(run.workdir).expanduser()
    with owned(place):
        order, form = _facts_of(place, run, config.method)
        members = Members(grid, run, place)
        if not form or workdir.rounds_recorded(place / "metrics.jsonl") < config.rounds:
            _gather(members, order)
        if not form:  # the first clients of a new federation determine the longest and the form
            order = order._replace(longest=max(members.sizes.values()))
            form = _form_of_most(members)
        with_noise = config.copy_and_resolve_references()
        if adds_noise(config, "server"):
            with_noise.privacy.seed = secrets.randbits(32)
        host = Host(with_noise, order, form)
        # It is written and sent, and the seed of the server's noise must not be.
        host.config = config
        flat = dict(flatten(config)) | {f"flower.{k}": getattr(run, k) for k in _SAME}
        about = {"data": order.federation, "sizes": {"longest": order.longest}, "samples": form}
        claim(place, flat, about | promised | describe_machine(), follows_rounds(config))
        members.save()
        server, records = resume(place, host.start)
        digest = digest_of(to_named({"frozen": server.state.frozen}))
        host.order = order._replace(frozen=digest)
        _log_start(host, records, promised)
        if not out_of_patience(records, config.patience):
            callbacks = (
                Scores(partial(evaluate, host, members), config.eval_every, config.rounds),
                Patience(config.patience, records),
                Lines(place, records, {}),
                # On the disk before the next round, in which clients delete what they had before.
                Checkpoints(place, 1, records, wait=True),
            )
            options = {"rounds": config.rounds, "records": records, "callbacks": callbacks}
            server = train(lambda server: play(host, members, server), server, **options)
            checkpoint.delete_earlier(place)
        summary = _summary(host, records)
        log(INFO, _write_served(host, place, folder, server, summary))
        # Last, because a folder with summary.json counts as finished; `fedjax-bn report` reads it.
        workdir.write_json(place / "summary.json", summary)
        return server, records


def _facts_of(place: Path, run: Run, method: str) -> tuple[Order, str]:
    """Returns the header of the server's messages with begin=0, and the form of samples as JSON."""
    # They come from the server's workdir. A new federation gets its name here, and the form "".
    about = {"data": f"{method}-{secrets.token_hex(8)}", "sizes": {"longest": 0}, "samples": ""}
    if (path := place / "config.json").exists():
        about = workdir.read_json(path, _ABOUT)
    longest = about["sizes"]["longest"]
    order = Order(about["data"], method, 0, run.clients, longest, run.serve_unseen)
    return order, about["samples"]


def _form_of_most(members: Members) -> str:
    """Returns the form of samples that more clients state than any other.

    Raises ConfigError if two forms are equally frequent, so that neither can be trusted.
    """
    forms = {members.name(k): member.hello.form for k, member in members.connected.items()}
    (form, count), *rarer_forms = Counter(forms.values()).most_common(2)
    if rarer_forms and rarer_forms[0][1] == count:
        named = "; ".join(f"{name} has {form_text:.200}" for name, form_text in forms.items())
        raise ConfigError(
            f"no form of samples is that of most clients ({named:.2000}): correct the data or "
            "data.classes of those that differ, or leave them out, and start again"
        )
    return form


def _gather(members: Members, order: Order) -> None:
    """Waits for all clients or, after the time limit, for as many as a round needs."""
    run, start = members.run, time.monotonic()
    minimum = run.minimum or run.clients
    while True:
        members.meet(order)
        count, waited = len(members.connected), time.monotonic() - start
        if count == run.clients or (count >= minimum and waited > run.time_limit):
            return
        if waited > run.attempts * run.time_limit:
            raise TooFewError(
                f"{count} of {run.clients} clients are there, fewer than {minimum} (minimum in the "
                "run config): start their SuperNodes, or see the log for why they are left out"
            )
        time.sleep(_POLL)


def _log_start(host: Host, records: list[Record], promised: Record) -> None:
    """Logs what privacy promises, what travels, what stays, and the round to continue from."""
    for note in (*privacy_notes(promised), *host.notes):
        log(INFO, note)
    privacy = host.config.privacy
    if privacy.clip and privacy.noise and privacy.seed is not None:
        said = (
            "anybody who has the run config can repeat the noise of privacy.seed=%s and remove it: "
            "leave privacy.seed empty where the noise is to protect clients"
        )
        log(WARNING, said, privacy.seed)
    if host.order.serve_unseen:
        names = ", ".join(names_of({"personal": host.personal}))
        log(INFO, "serve-unseen: clients send their personal leaves too: %s", names or "none")
    if records:
        log(INFO, "continuing from round %s of %s", len(records), host.config.rounds)


def _summary(host: Host, records: list[Record]) -> Record:
    """Returns the content of summary.json: the scores of the selected round, or the last one."""
    evaluated = any("accuracy" in record for record in records)
    number = select_round(records) if evaluated else len(records)
    selected, last = (
        {"internal": record.get("accuracy", {"mean": float("nan")}), "unseen": {}}
        for record in (records[number - 1], records[-1])
    )
    config = host.config
    return {
        "method": config.method,
        "dataset": host.order.federation,
        "seed": config.seed,
        "rounds": len(records),
        "selected_round": number,
        "tested_on": records[number - 1].get("tested_on", {}),
        "accuracy": selected,
        "last_round": last,
        "seconds_per_round": median(record["seconds"] for record in records),
        # The server does not know the clients' compile times and numbers of samples.
        "compile_seconds": float("nan"),
        "samples_per_second": float("nan"),
        **({} if host.task.classifies else {"score": host.task.score.name}),
        **describe_privacy(deployed(config), host.order.population, len(records)),
    }


def _write_served(host: Host, place: Path, app: str | Path, server: Kept, summary: Record) -> str:
    """Writes WORKDIR/served from the round that `summary` names; returns a note for the log."""
    # `app` is the app's folder, which may hold a user's own modules.
    personal = sent_personal(jax.eval_shape(host.alone).personal)
    if jax.tree.leaves(personal) and not jax.tree.leaves(server.served):
        return (
            "an unseen client cannot be served, because personal leaves stayed with the clients: "
            "serve-unseen=true in the run config and in each node config would send them"
        )
    number = summary["selected_round"]
    with checkpoint.open_folder(place / "checkpoints" / "selected", keep=1) as manager:
        if number in checkpoint.steps(manager):
            server = checkpoint.restore(manager, jax.eval_shape(host.start), number)
    # The server's part stays that of the start: only the next round would read it.
    state = host.alone()
    mean = dict(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], server.served))
    # Zeros, so that the shared model predicts and not the own model of the start.
    own_model = {name: tree for name, tree in state.personal.items() if name == OWN}
    personal = {**state.personal, **jax.tree.map(jnp.zeros_like, own_model), **mean}
    sent = {name: getattr(server.state, name) for name in ("round", "shared", "frozen")}
    state = state._replace(personal=personal, **sent)
    config, name = deployed(host.config), host.order.federation
    config.target = ""
    about = {
        "config": dict(flatten(config)),
        "data": name,
        "form": {"dataset": name, "clients": ["federation"]} | json.loads(host.form),
        "started_in": str(Path(app).resolve()),
    }
    folder = place / "served"
    workdir.write_json(folder / "config.json", about)
    with checkpoint.open_folder(folder / "checkpoints" / "latest", keep=1) as manager:
        checkpoint.save(manager, number, state)
        checkpoint.settle(manager)
    # Last, because a folder with summary.json counts as finished.
    workdir.write_json(folder / "summary.json", summary)
    command = shlex.join(("fedjax-bn", "serve", "--workdir", str(folder), "--export", "FOLDER"))
    return f"round {number} can be served: {command}"


def play(host: Host, members: Members, server: Kept) -> tuple[Kept, Record]:
    """Plays the next round, and repeats it if too few uploads are good; returns also its record.

    Raises:
      TooFewError: every attempt that the run config allows got too few good uploads.
      RiskError, ConfigError: the weighing rule made weights that are not finite.
    """
    number, start, run = int(server.round) + 1, time.perf_counter(), members.run
    rows, asked = _drawn(host, members, number - 1)
    minimum = min(run.minimum or len(asked), len(asked))
    for _ in range(run.attempts):
        members.meet(host.order)
        members.save()  # bindings to keys, before any client trains
        accepted, total, left_out = _uploads(host, members, server, asked)
        if len(accepted) >= minimum:
            break
        log(WARNING, "round %s: %s of %s uploads", number, len(accepted), minimum)
    else:
        raise TooFewError(
            f"round {number} got {len(accepted)} good uploads in the last of {run.attempts} "
            f"attempts, fewer than {minimum} (minimum in the run config): see the log for who was "
            "left out and why, and start again to resume from the last round"
        )
    server, metrics, unweighed = _stepped(host, members, server, accepted, total, rows, minimum)
    left_out |= _log_left_out(members, number, unweighed)
    metrics |= {name: np.full(run.clients, np.nan) for name in ("loss", "norm")}
    for k in accepted.keys() - unweighed:
        metrics["loss"][k], metrics["norm"][k] = accepted[k].upload.loss, accepted[k].norm
    metrics["finite"] = np.ones(run.clients, bool)  # `accept` has checked the uploads
    names, seconds = [*map(members.name, range(run.clients))], time.perf_counter() - start
    record = round_record(names, metrics, number, seconds, host.config.clients_named)
    for warning in warnings_of(record):
        log(WARNING, "%s", shown(warning))
    if not metrics["server_finite"]:
        log(WARNING, "round %s: the server's step is not finite: the shared leaves stay", number)
    count = len(accepted) - len(unweighed)
    log(INFO, "round %s: %s uploads, %.1f s", number, count, seconds)
    refused, members.refused = members.refused, {}
    reasons = {"left_out": left_out, "refused": refused}
    return server, record | {key: value for key, value in reasons.items() if value}


def _stepped(
    host: Host,
    members: Members,
    server: Kept,
    accepted: dict[int, Accepted],
    total: Any,
    rows: np.ndarray,
    minimum: int,
) -> tuple[Kept, dict[str, np.ndarray], dict[int, str]]:
    """Makes the server's step, again without the clients whose weights are not finite.

    REA weighs a hidden risk (NaN), or one that is not positive, with NaN. Returns the new state,
    metrics of the round, and client -> why its upload is left out. Raises RiskError or ConfigError
    if fewer than `minimum` uploads have weights that are finite.
    """
    number, rule = int(server.round) + 1, host.config.weigh or f"of {host.config.method}"
    after, weights, finite = host.step(server, total, rows)
    reason = f"the weighing rule {rule} cannot weigh its risk"
    unweighed = {k: reason for k in accepted if not np.isfinite(weights[k])}
    if unweighed and len(accepted) - len(unweighed) >= minimum:
        # Sums have finite weights, so this total has each upload.
        weighed_total = {k: total[k] for k in accepted if k not in unweighed}
        after, weights, finite = host.step(server, weighed_total, rows)
    if np.isfinite(weights).all():
        metrics = {"weights": np.asarray(weights), "server_finite": np.asarray(finite)}
        return after, metrics, unweighed
    for k, upload in accepted.items():
        if np.isnan(upload.upload.risk):
            raise ConfigError(
                f"round {number}: {members.name(k)} keeps its losses to itself, which the weighing "
                f"rule {rule} needs: let it report them, or set config.weigh=by_size or uniform"
            )
    raise RiskError(f"round {number}: the weighing rule gave weights that are not finite")


def _log_left_out(members: Members, number: int, reasons: Mapping[int, str]) -> dict[str, str]:
    """Logs client -> why it is left out of a round; returns the same by names, shortened."""
    named = {members.name(k): short(reason, 500) for k, reason in sorted(reasons.items())}
    for name, reason in named.items():
        log(WARNING, "round %s: %s is left out: %s", number, name, reason)
    return named


def evaluate(host: Host, members: Members, server: Kept) -> Record:
    """Returns {"accuracy": {client: percent, "mean": ...}, "validation": ...} of reporting clients.

    "tested_on" says of which of their samples the accuracies are, see `data.domain.scored_part`.

    Clients whose samples have another form are not asked. If a client fails, or does not answer
    within the run's time limit, the log names it, and it has no score.
    """
    order, count = host.order._replace(round=int(server.round)), host.order.population
    scores_of, parts = {}, []
    # A client whose upload was never taken has no model of its own yet.
    trained = [
        k
        for k, member in members.connected.items()
        if member.hello.scores and member.hello.form == host.form and np.asarray(server.taken)[k]
    ]

    def take(k: int, reply: Reply) -> None:
        try:
            scores = _scores_in(content_of(reply, order, k))
        except ValueError as error:
            log(WARNING, "%s is not evaluated: %s", members.name(k), short(str(error), 500))
            return
        validates = scores.get(messages.TESTED_ON_VALIDATION, 0.0) > 0
        parts.append("validation" if validates else "test")
        for name in scores.keys() & {"accuracy", "validation"}:
            scores_of.setdefault(name, np.full(count, np.nan))[k] = scores[name]

    _ask(members, server, order, trained, MessageType.EVALUATE, take)
    names, record = [*map(members.name, range(count))], {}
    for name, values in sorted(scores_of.items()):
        named_scores = by_client(names, values, host.config.clients_named)
        named_scores["mean"] = float(np.nanmean(values))
        # Clients without a score, and groups of them, have NaN: a record allows no None.
        record[name] = {k: np.nan if x is None else x for k, x in named_scores.items()}
    return record | ({"tested_on": {"internal": part_of_all(parts)}} if parts else {})


def _scores_in(content: RecordDict) -> dict[str, float]:
    """Returns the scores in a message, name -> percent; raises ValueError for others."""
    record = content.get(messages.SCORES)
    scores = dict(record) if isinstance(record, MetricRecord) else {}
    percent = all(isinstance(x, int | float) and 0 <= x <= 100 for x in scores.values())
    if "accuracy" not in scores or not percent:
        raise ValueError("it must send scores from 0 to 100, with an accuracy among them")
    return scores


def _drawn(host: Host, members: Members, number: int) -> tuple[np.ndarray, list[int]]:
    """Returns the clients i32[C] that the simulation would draw, and those of them that take part.

    Draws by size take clients without a size last: they report none, or were never met.
    """
    participation = host.participation
    sizes = np.array([members.sizes.get(k, 0) for k in range(host.order.population)])
    hidden = [members.name(k) for k, size in members.sizes.items() if not size]
    if hidden and participation.drawn and participation.draw == "by_size":
        said = (
            "config.participation.draw='by_size' draws %s last, because no size is reported: let "
            "it report sizes, or set participation.draw=uniform"
        )
        log(WARNING, said, ", ".join(hidden))
    client, stays = draw_cohort(participation, sizes, host.keys.participation, np.int32(number))
    rows = np.arange(len(sizes)) if client is None else np.asarray(client)
    stays = np.ones(len(rows), bool) if stays is None else stays
    return rows.astype(np.int32), [int(k) for k in rows[np.asarray(stays)]]


def _ask(
    members: Members, server: Kept, order: Order, clients: Sequence[int], kind: str, read: _Read
) -> None:
    """Sends clients a round's broadcast, and calls `read(client, reply)` for each reply."""
    # Clients that have not trained yet also get the frozen leaves, which they keep.
    sent, taken = to_named(broadcast_of(server.state)), np.asarray(server.taken)
    arrays = first_arrays = messages.recorded(sent)  # all messages share the bytes
    if order.frozen and not all(taken[[*clients]]):
        first_arrays = messages.recorded(sent | to_named({"frozen": server.state.frozen}))
    client = {members.connected[k].node: k for k in clients}
    contents = {
        node: messages.packed(
            order._replace(begin=int(taken[k])), arrays if taken[k] else first_arrays
        )
        for node, k in client.items()
    }

    def take(node: int, reply: Reply) -> None:
        read(client[node], reply)

    seconds, group = members.run.time_limit, str(order.round)
    messages.exchange(members.grid, contents, kind, seconds, take, group)


def _uploads(
    host: Host, members: Members, server: Kept, asked: Sequence[int]
) -> tuple[dict[int, Accepted], Any, dict[str, str]]:
    """Asks clients to train, and adds their uploads one by one; `asked` are in ascending order."""
    # Returns client -> accepted upload without its arrays, the total of `Host.add`, and client's
    # name -> why it is left out. Nodes whose answers do not fit what they said become misfits.
    connected, forms = members.connected, (host.upload, host.personal)
    order, array_limit = (
        host.order._replace(round=int(server.round) + 1),
        len(jax.tree.leaves(forms)),
    )
    shared = jax.device_get(server.state.shared)
    accepted, total, reasons = {}, None, {}

    def take(k: int, reply: Reply) -> None:
        nonlocal total
        hello, bound = connected[k].hello, members.run.norm_bound
        try:
            arrays = messages.arrays_in(content_of(reply, order, k), array_limit)
            upload = accept(arrays, forms, shared, k, order.population, hello, bound)
        except ValueError as error:
            reasons[k] = str(error)
            if isinstance(error, MisfitError):
                members.misfits.add(connected[k].node)
            return
        total = host.add(total, upload)
        # The arrays are in the total already; without them a round holds one upload at a time.
        scalars = upload.upload._replace(shared=(), message=())
        accepted[k] = upload._replace(upload=scalars, personal=())

    for k in asked:
        if k not in connected:
            reasons[k] = "it is not connected"
        elif (form := connected[k].hello.form) != host.form:
            reasons[k] = f"its samples are {form:.200}, not {host.form:.200} as others' are"
            members.misfits.add(connected[k].node)
    trains = [k for k in asked if k not in reasons]
    _ask(members, server, order, trains, MessageType.TRAIN, take)
    return accepted, total, _log_left_out(members, order.round, reasons)
