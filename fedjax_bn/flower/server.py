"""Makes the ServerApp, which meets the clients, plays the rounds, and saves each of them.

For unseen clients it writes WORKDIR/served, which `fedjax-bn serve` and `evaluate` read. This
folder has the form of a finished run of one client. If the clients sent their personal leaves, it
has their mean (`global_variables` of the simulation).

Arguments of the same name mean the same in all functions: `grid` is Flower's Grid, `host` the
server's side, `met` the clients that the server has met, `server` its state after the last round.
"""

import json
import logging
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import ConfigError, RiskError, UserError
from fedjax_bn.arguments.text import short, shown
from fedjax_bn.data.domain import part_of_all
from fedjax_bn.engine.named_arrays import names_of, to_named
from fedjax_bn.federation import broadcast_of
from fedjax_bn.flower import messages
from fedjax_bn.flower.host import Host, Kept
from fedjax_bn.flower.members import Accepted, Met, accept, meet, read_clients, write_clients
from fedjax_bn.flower.messages import MisfitError, Order, Reply, content_of, digest_of
from fedjax_bn.flower.settings import Run, config_of, run_of
from fedjax_bn.flower.site import adds_noise, deployed, sent_personal
from fedjax_bn.run.config import check, flatten
from fedjax_bn.run.experiment.build import describe_privacy
from fedjax_bn.run.experiment.method import follows_rounds, method_maker
from fedjax_bn.run.files.ownership import claim, owned
from fedjax_bn.run.train import resume
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
        finished = form and workdir.rounds_recorded(place / "metrics.jsonl") >= config.rounds
        met = read_clients(place, run.clients)
        met = met if finished else _gather(grid, met, order, run)
        if not form:  # the first clients of a new federation determine the longest and the form
            order = order._replace(longest=max(met.sizes.values()))
            form = _form_of_most(met)
        host = Host(_with_own_noise(config), run, order, form)
        # It is written and sent, and the seed of the server's noise must not be.
        host.config = config
        flat = dict(flatten(config)) | {f"flower.{k}": getattr(run, k) for k in _SAME}
        about = {"data": order.federation, "sizes": {"longest": order.longest}, "samples": form}
        claim(place, flat, about | promised | describe_machine(), follows_rounds(config))
        met = write_clients(place, met, run.clients)
        server, records = resume(place, host.start)
        digest = digest_of(to_named({"frozen": server.state.frozen}))
        host.order = order._replace(frozen=digest)
        _log_start(host, records, promised)
        if not out_of_patience(records, config.patience):
            server = _play_rounds(grid, host, place, met, server, records)
        summary = _summary(host, records)
        log(INFO, _write_served(host, place, folder, server, summary))
        # Last, because a folder with summary.json counts as finished; `fedjax-bn report` reads it.
        workdir.write_json(place / "summary.json", summary)
        return server, records


def _facts_of(place: Path, run: Run, method: str) -> tuple[Order, str]:
    """Returns the header of the server's messages with begin=0, and the form of samples as JSON.

    They come from the server's workdir. A new federation gets its name here, and the form "".
    """
    path = place / "config.json"
    about = {"data": f"{method}-{secrets.token_hex(8)}", "sizes": {"longest": 0}, "samples": ""}
    if path.exists():
        about = workdir.read_json(path, _ABOUT)
    longest = about["sizes"]["longest"]
    order = Order(about["data"], method, 0, run.clients, longest, run.serve_unseen)
    return order, about["samples"]


def _form_of_most(met: Met) -> str:
    """Returns the form of samples that more clients state than any other.

    Raises ConfigError if two forms are equally frequent, so that neither can be trusted.
    """
    hellos = {met.name(k): member.hello.form for k, member in met.members.items()}
    (form, count), *rarer_forms = Counter(hellos.values()).most_common(2)
    if rarer_forms and rarer_forms[0][1] == count:
        named = "; ".join(f"{name} has {form_text:.200}" for name, form_text in hellos.items())
        raise ConfigError(
            f"no form of samples is that of most clients ({named:.2000}): correct the data or "
            "data.classes of those that differ, or leave them out, and start again"
        )
    return form


def _with_own_noise(config: ConfigDict) -> ConfigDict:
    """Returns a copy with a fresh seed if the server's step adds noise, see `site.adds_noise`."""
    config = config.copy_and_resolve_references()
    if adds_noise(config, "server"):
        config.privacy.seed = secrets.randbits(32)
    return config


def _gather(grid: Grid, met: Met, order: Order, run: Run) -> Met:
    """Waits for all clients or, after the time limit, for as many as a round needs."""
    start, minimum = time.monotonic(), run.minimum or run.clients
    while True:
        met = meet(grid, met, order, run)
        count, waited = len(met.members), time.monotonic() - start
        if count == run.clients or (count >= minimum and waited > run.time_limit):
            return met
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
        log(
            WARNING,
            "anybody who has the run config can repeat the noise of privacy.seed=%s and remove it: "
            "leave privacy.seed empty where the noise is to protect clients",
            privacy.seed,
        )
    if host.run.serve_unseen:
        names = ", ".join(names_of({"personal": host.personal}))
        log(INFO, "serve-unseen: clients send their personal leaves too: %s", names or "none")
    if records:
        log(INFO, "continuing from round %s of %s", len(records), host.config.rounds)


def _play_rounds(
    grid: Grid, host: Host, place: Path, met: Met, server: Kept, records: list[Record]
) -> Kept:
    """Plays the rounds that are left, whose records are appended; returns the last state."""
    config, write = host.config, lambda met: write_clients(place, met, host.run.clients)

    def round(server: Kept) -> tuple[Kept, Record]:
        nonlocal met
        server, record, met = play(grid, host, met, server, write)
        return server, record

    callbacks = (
        Scores(lambda server: evaluate(grid, host, met, server), config.eval_every, config.rounds),
        Patience(config.patience, records),
        Lines(place, records, {}),
        # On the disk before the next round, in which clients delete what they had before this one.
        Checkpoints(place, 1, records, wait=True),
    )
    server = train(round, server, rounds=config.rounds, records=records, callbacks=callbacks)
    checkpoint.delete_earlier(place)
    return server


def _summary(host: Host, records: Sequence[Record]) -> Record:
    """Returns the content of summary.json: the scores of the selected round, or the last one."""
    evaluated = any("accuracy" in record for record in records)
    number = select_round(list(records)) if evaluated else len(records)
    selected, last = (
        {"internal": record.get("accuracy", {"mean": float("nan")}), "unseen": {}}
        for record in (records[number - 1], records[-1])
    )
    config = deployed(host.config)
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
        **describe_privacy(config, host.run.clients, len(records)),
    }


def _write_served(host: Host, place: Path, app: str | Path, server: Kept, summary: Record) -> str:
    """Writes WORKDIR/served from the round that `summary` names; returns a note for the log.

    `app` is the app's folder, which may hold a user's own modules.
    """
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
    personal_model = {name: tree for name, tree in state.personal.items() if name == OWN}
    zeros = jax.tree.map(jnp.zeros_like, personal_model)
    state = state._replace(
        round=server.state.round,
        shared=server.state.shared,
        frozen=server.state.frozen,
        personal={**state.personal, **zeros, **mean},
    )
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


def play(
    grid: Grid, host: Host, met: Met, server: Kept, write: Callable[[Met], Met]
) -> tuple[Kept, Record, Met]:
    """Plays the next round, and repeats it if too few uploads are good.

    `write` stores the bindings of clients to keys before any of them trains. Returns the new
    `Kept`, the round's record, and the clients that are connected now.

    Raises:
      TooFewError: every attempt that the run config allows got too few good uploads.
      RiskError, ConfigError: the weighing rule made weights that are not finite.
    """
    number, start = int(server.round) + 1, time.perf_counter()
    rows, asked = _drawn(host, met, number - 1)
    minimum, misfits = min(host.run.minimum or len(asked), len(asked)), set()
    for attempt in range(1, host.run.attempts + 1):
        met = write(meet(grid, met, host.order, host.run))
        accepted, total, left_out, strange = _uploads(grid, host, met, server, asked)
        # A node is asked to present itself again once in a round at most.
        met, misfits = met._replace(misfits=strange - misfits), misfits | strange
        if len(accepted) >= minimum and (accepted or not asked):
            break
        log(WARNING, "round %s: %s of %s uploads", number, len(accepted), minimum)
        if attempt == host.run.attempts:
            raise TooFewError(
                f"round {number} got {len(accepted)} good uploads in each of {attempt} "
                f"attempts, fewer than {max(minimum, 1)} (minimum in the run config): see the log "
                "for who was left out and why, and start again to resume from the last round"
            )
    server, metrics, accepted, unweighed = _stepped(
        host, met, server, accepted, total, rows, minimum
    )
    population, taken = host.run.clients, list(accepted)
    metrics |= {name: np.full(population, np.nan) for name in ("loss", "norm")}
    for k, upload in accepted.items():
        metrics["loss"][k], metrics["norm"][k] = upload.upload.loss, upload.norm
    metrics["finite"] = np.ones(population, bool)  # `accept` has checked the uploads
    names, seconds = [*map(met.name, range(population))], time.perf_counter() - start
    record = round_record(names, metrics, number, seconds, host.config.clients_named)
    for warning in warnings_of(record):
        log(WARNING, "%s", shown(warning))
    if not metrics["server_finite"]:
        log(WARNING, "round %s: the server's step is not finite: the shared leaves stay", number)
    log(INFO, "round %s: %s uploads, %.1f s", number, len(taken), seconds)
    reasons = {"left_out": left_out | unweighed, "refused": dict(met.refused)}
    record |= {key: value for key, value in reasons.items() if value}
    return server, record, met._replace(refused={})


def _stepped(
    host: Host,
    met: Met,
    server: Kept,
    accepted: dict[int, Accepted],
    total: Any,
    rows: np.ndarray,
    minimum: int,
) -> tuple[Kept, dict[str, np.ndarray], dict[int, Accepted], dict[str, str]]:
    """Makes the server's step, again without the clients whose weights are not finite.

    A client that hides its risk sends NaN, and REA weighs a risk that is not positive with NaN.

    Returns the new `Kept`, the metrics weights f[K] and server_finite bool[] of the round, the
    uploads that were added, and name -> why a client is left out. Raises RiskError or ConfigError
    if fewer than `minimum` uploads have weights that are finite.
    """
    number, rule = int(server.round) + 1, host.config.weigh or f"of {host.config.method}"
    after, weights, finite = host.step(server, total, rows)
    unweighable = [k for k in accepted if not np.isfinite(weights[k])]
    good = {k: upload for k, upload in accepted.items() if k not in unweighable}
    if unweighable and len(good) >= max(minimum, 1):
        # Sums have finite weights, so this total has each upload.
        after, weights, finite = host.step(server, {k: total[k] for k in good}, rows)
    if np.isfinite(weights).all():
        reason = f"the weighing rule {rule} cannot weigh its risk"
        reasons = {met.name(k): reason for k in unweighable}
        _log_left_out(number, reasons)
        metrics = {"weights": np.asarray(weights), "server_finite": np.asarray(finite)}
        return after, metrics, good, reasons
    for k, upload in accepted.items():
        if np.isnan(upload.upload.risk):
            raise ConfigError(
                f"round {number}: {met.name(k)} keeps its losses to itself, which the weighing "
                f"rule {rule} needs: let it report them, or set config.weigh=by_size or uniform"
            )
    raise RiskError(f"round {number}: the weighing rule gave weights that are not finite")


def _log_left_out(number: int, reasons: dict[str, str]) -> None:
    for name, reason in reasons.items():
        log(WARNING, "round %s: %s is left out: %s", number, name, reason)


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

    _ask(grid, host, met, server, trained, MessageType.EVALUATE, number, take)
    names, limit = [*map(met.name, range(host.run.clients))], host.config.clients_named
    record = {}
    for name, values in sorted(scores_of.items()):
        named_scores = by_client(names, values, limit) | {"mean": float(np.nanmean(values))}
        # Clients without a score, and groups of them, have NaN: a record allows no None.
        record[name] = {k: np.nan if x is None else x for k, x in named_scores.items()}
    return record | ({"tested_on": {"internal": part_of_all(parts)}} if parts else {})


def _drawn(host: Host, met: Met, number: int) -> tuple[np.ndarray, list[int]]:
    """Returns the clients i32[C] that the simulation would draw, and those of them that take part.

    Draws by size take clients without a size last: they report none, or were never met.
    """
    participation = host.participation
    sizes = np.array([met.sizes.get(k, 0) for k in range(host.run.clients)])
    hidden = [met.name(k) for k, size in met.sizes.items() if not size]
    if hidden and participation.drawn and participation.draw == "by_size":
        log(
            WARNING,
            "config.participation.draw='by_size' draws %s last, because no size is reported: let "
            "it report sizes, or set participation.draw=uniform",
            ", ".join(hidden),
        )
    client, stays = draw_cohort(participation, sizes, host.keys.participation, np.int32(number))
    rows = np.arange(len(sizes)) if client is None else np.asarray(client)
    stays = np.ones(len(rows), bool) if stays is None else stays
    return rows.astype(np.int32), [int(k) for k in rows[np.asarray(stays)]]


def _ask(
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
    arrays = first_arrays = messages.recorded(sent)  # all messages share the bytes
    if host.order.frozen and not all(np.asarray(server.taken)[[*clients]]):
        first_arrays = messages.recorded(sent | to_named({"frozen": server.state.frozen}))
    client, contents = {met.members[k].node: k for k in clients}, {}
    for node, k in client.items():
        order = host.order._replace(round=number, begin=int(server.taken[k]))
        contents[node] = messages.packed(order, arrays if order.begin else first_arrays)

    def take(node: int, reply: Reply) -> None:
        read(client[node], reply)

    messages.exchange(grid, contents, kind, host.run.time_limit, take, str(number))


def _uploads(
    grid: Grid, host: Host, met: Met, server: Kept, asked: list[int]
) -> tuple[dict[int, Accepted], Any, dict[str, str], set[int]]:
    """Asks clients to train, and adds their uploads one by one; `asked` are in ascending order.

    Returns client -> accepted upload without its arrays, the total of `Host.add`, client's name ->
    why it is left out, and the nodes whose answers do not fit what they said of themselves.
    """
    members, forms = met.members, (host.upload, host.personal)
    number, array_limit = int(server.round) + 1, len(jax.tree.leaves(forms))
    order, shared = host.order._replace(round=number), jax.device_get(server.state.shared)
    accepted, total, reasons, misfits = {}, None, {}, set()

    def take(k: int, reply: Reply) -> None:
        nonlocal total
        hello, population = members[k].hello, host.run.clients
        try:
            arrays = messages.arrays_in(content_of(reply, order, k), array_limit)
            upload = accept(arrays, forms, shared, k, population, hello, host.run.norm_bound)
        except ValueError as error:
            reasons[k] = str(error)
            if isinstance(error, MisfitError):
                misfits.add(members[k].node)
            return
        total = host.add(total, upload)
        # The arrays are in the total already; without them a round holds one upload at a time.
        scalars = upload.upload._replace(shared=(), message=())
        accepted[k] = upload._replace(upload=scalars, personal=())

    for k in asked:
        if k not in members:
            reasons[k] = "it is not connected"
        elif members[k].hello.form != host.form:
            form = members[k].hello.form
            reasons[k] = f"its samples are {form:.200}, not {host.form:.200} as others' are"
            misfits.add(members[k].node)
    connected = [k for k in asked if k not in reasons]
    _ask(grid, host, met, server, connected, MessageType.TRAIN, number, take)
    left_out = {met.name(k): short(reasons[k], 500) for k in asked if k in reasons}
    _log_left_out(number, left_out)
    return accepted, total, left_out, misfits
