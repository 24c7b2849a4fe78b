"""Makes the ServerApp, which meets the clients, plays the rounds, and saves each of them.

For unseen clients it writes WORKDIR/served, which has the form of a finished run of one client,
with the mean of the personal leaves if the clients sent them. In all functions `members` are the
clients that the server has met, and `server` is its state after the last round.
"""

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import Context, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedjax_bn.arguments.errors import RiskError, UserError
from fedjax_bn.arguments.text import short, shown
from fedjax_bn.data.domain import part_of_all
from fedjax_bn.engine.named_arrays import names_of, to_named
from fedjax_bn.flower import handshake, messages
from fedjax_bn.flower.host import Host, Kept
from fedjax_bn.flower.members import Members, accept, form_of_most
from fedjax_bn.flower.messages import Order
from fedjax_bn.flower.settings import Run, adds_noise, config_of, deployed, run_of
from fedjax_bn.run.config import check, flatten
from fedjax_bn.run.config.choices import privacy_of
from fedjax_bn.run.experiment.build import describe_privacy
from fedjax_bn.run.experiment.method import follows_rounds, method_maker
from fedjax_bn.run.files.ownership import claim, owned, resume
from fedjax_bn.state import Upload, broadcast_of
from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.availability import draw_cohort
from fedjax_bn.training.callbacks.checkpoints import Checkpoints, Lines
from fedjax_bn.training.callbacks.evaluation import Patience, Scores
from fedjax_bn.training.experiment import privacy_notes
from fedjax_bn.training.loop import train
from fedjax_bn.training.records import by_client, out_of_patience, round_record, warnings_of
from fedjax_bn.training.score_tables import accuracies
from fedjax_bn.training.workdir import Record

# client -> its accepted upload without arrays, and the norm of its update
_Accepted = dict[int, tuple[Upload, float]]
_SAME = ("clients", "serve_unseen")  # keys of the run config that a restart must not change


def server_app(folder: str | Path = ".") -> ServerApp:
    """Returns a ServerApp of the method that the run config's `config` names; see `settings`.

    It uses no Strategy of Flower, because the server's step is the method's. The same command
    continues from the last round. In `folder`, the app's, the config file is looked for first.
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
        members, is_new = Members(grid, run, place), not form
        if is_new:  # its first clients determine the longest and the form
            order = order._replace(facts=handshake.facts_of(config))
            members.gather(order)
            order = order._replace(longest=max(members.sizes.values()))
            form = form_of_most(members, order, config)
        with_noise = config.copy_and_resolve_references()
        if adds_noise(config, "server"):
            with_noise.privacy += f":seed={secrets.randbits(32)}"
        host = Host(with_noise, order, form)
        # It is written and sent, and the seed of the server's noise must not be.
        host.config = config
        left = workdir.rounds_recorded(place / "metrics.jsonl") < config.rounds
        if not is_new and (left or run.only_evaluates()):
            members.gather(host.order)
        flat = dict(flatten(config)) | {f"flower.{k}": getattr(run, k) for k in _SAME}
        about = {"data": order.federation, "sizes": {"longest": order.longest}, "samples": form}
        about |= promised | workdir.describe_machine()
        if run.only_evaluates():
            return _evaluate_only(host, members, place, flat, about)
        claim(place, flat, about, follows_rounds(config))
        members.save()
        server, records = resume(place, host.start)
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
        summary = host.summary(records)
        log(INFO, host.write_served(place, folder, server, summary))
        # Last, because a folder with summary.json counts as finished; `fedjax-bn report` reads it.
        workdir.write_json(place / "summary.json", summary)
        return server, records


def _evaluate_only(
    host: Host, members: Members, place: Path, flat: Record, about: Record
) -> tuple[Kept, list[Record]]:
    """Asks all clients for scores of the present model; returns it, and a record of them.

    Of a federation that has begun, WORKDIR/evaluations/sites.json holds the record; nothing else is
    written. Raises UserError without any score, and what `claim` raises of `flat` and `about`.
    """
    server, begun = None, (place / "config.json").exists()
    if begun:
        recorded = workdir.read_json(place / "config.json", workdir.CLAIM)["config"]
        flat = flat | {"rounds": recorded["rounds"]}
        played = workdir.rounds_recorded(place / "metrics.jsonl")
        server = checkpoint.latest_state(place, host.start, played)
    claim(place, flat, about, write=False)
    server = server or host.start()
    members.meet(host.order)
    if untrained := [members.name(k) for k in members.connected if not server.taken[k]]:
        said = "%s never trained: scored with initial personal leaves, if the method has any"
        log(WARNING, said, ", ".join(untrained))
    record = evaluate(host, members, server, everyone=True)
    if not record:
        raise UserError("no client has scored the model: see the log, and report in node configs")
    record |= {"round": int(server.round), "untrained": untrained, "refused": members.refused}
    if begun:  # another folder could not become a workdir later if it had files
        workdir.write_json(place / "evaluations" / "sites.json", record)
    return server, [record]


def _facts_of(place: Path, run: Run, method: str) -> tuple[Order, str]:
    """Returns the header of the server's messages with begin=0, and the form of samples as JSON."""
    # They come from the server's workdir. A new federation gets its name here, and the form "".
    about = {"data": f"{method}-{secrets.token_hex(8)}", "sizes": {"longest": 0}, "samples": ""}
    if (path := place / "config.json").exists():
        about = workdir.read_json(path, (*workdir.CLAIM, "sizes", "samples"))
    longest = about["sizes"]["longest"]
    order = Order(about["data"], method, 0, run.clients, longest, run.serve_unseen)
    return order, about["samples"]


def _log_start(host: Host, records: list[Record], promised: Record) -> None:
    """Logs what privacy promises, what travels, what stays, and the round to continue from."""
    for note in (*privacy_notes(promised), *host.notes):
        log(INFO, note)
    privacy = privacy_of(host.config)
    if privacy and privacy.noise and privacy.seed is not None:
        fault = "anybody who has the run config can repeat the noise of seed=%s and remove it"
        remedy = "leave that option out where the noise is to protect clients"
        log(WARNING, f"{fault}: {remedy}", privacy.seed)
    if host.order.serve_unseen:
        names = ", ".join(names_of({"personal": host.personal}))
        log(INFO, "serve-unseen: clients send their personal leaves too: %s", names or "none")
    if records:
        log(INFO, "continuing from round %s of %s", len(records), host.config.rounds)


def play(host: Host, members: Members, server: Kept) -> tuple[Kept, Record]:
    """Plays the next round, and repeats it if too few uploads are good; returns also its record.

    Raises UserError if all `attempts` got too few good uploads, and RiskError if the weighing rule
    made weights that are not finite.
    """
    number, start, run = int(server.round) + 1, time.perf_counter(), members.run
    rows, asked = _drawn(host, members, number - 1)
    minimum = min(run.minimum or len(asked), len(asked))
    for _ in range(run.attempts):
        members.meet(host.order)
        members.save()  # bindings to keys, before any client trains
        accepted, total, reasons = _uploads(host, members, server, asked)
        left_out = _named(members, number, reasons)
        if len(accepted) >= minimum:
            break
        log(WARNING, "round %s: %s of %s uploads", number, len(accepted), minimum)
    else:
        uploads = f"round {number} got {len(accepted)} good uploads"
        remedy = "see the log for who was left out, and start again to resume"
        raise UserError(f"{uploads}, fewer than minimum={minimum}: {remedy}")
    stepped = _stepped(host, members, server, accepted, total, rows, minimum)
    server, weights, finite, unweighed = stepped
    left_out |= _named(members, number, unweighed)
    metrics = {name: np.full(run.clients, np.nan) for name in ("loss", "norm")}
    for k in accepted.keys() - unweighed:
        upload, metrics["norm"][k] = accepted[k]
        metrics["loss"][k] = upload.loss
    # `accept` has checked the uploads
    metrics |= {"weights": weights, "server_finite": finite, "finite": np.ones(run.clients, bool)}
    names, seconds = [*map(members.name, range(run.clients))], time.perf_counter() - start
    record = round_record(names, metrics, number, seconds, host.config.clients_named)
    for warning in warnings_of(record):
        log(WARNING, "%s", shown(warning))
    if not finite:
        log(WARNING, "round %s: the server's step is not finite: the shared leaves stay", number)
    count = len(accepted) - len(unweighed)
    log(INFO, "round %s: %s uploads, %.1f s", number, count, seconds)
    refused, members.refused = members.refused, {}
    noted = {"left_out": left_out, "refused": refused}
    return server, record | {key: names for key, names in noted.items() if names}


def _stepped(
    host: Host,
    members: Members,
    server: Kept,
    accepted: _Accepted,
    total: Any,
    rows: np.ndarray,
    minimum: int,
) -> tuple[Kept, np.ndarray, np.ndarray, dict[int, str]]:
    """Makes the server's step, again without the clients whose weights are not finite.

    REA weighs a hidden risk (NaN), or one that is not positive, with NaN. Returns also client ->
    why its upload is left out; RiskError if fewer than `minimum` uploads have finite weights.
    """
    number, rule = int(server.round) + 1, host.config.weigh or f"of {host.config.method}"
    after, weights, finite = host.step(server, total, rows)
    reason = f"the weighing rule {rule} cannot weigh its risk"
    unweighed = {k: reason for k in accepted if not np.isfinite(weights[k])}
    if unweighed and len(accepted) - len(unweighed) >= minimum:
        # Sums have finite weights, so this total has each upload.
        weighed_total = {k: total[k] for k in accepted if k not in unweighed}
        after, weights, finite = host.step(server, weighed_total, rows)
    if not np.isfinite(weights).all():
        names = ", ".join(map(members.name, unweighed)) or "the clients"
        fault = f"the weighing rule {rule} cannot weigh the risks of {names}"
        remedy = "let them report losses, or set config.weigh=by_size or uniform"
        raise RiskError(f"round {number}: {fault}: {remedy}")
    return after, np.asarray(weights), np.asarray(finite), unweighed


def _named(members: Members, number: int, reasons: Mapping[int, str]) -> dict[str, str]:
    """Logs client -> why it is left out of a round; returns the same by names, shortened."""
    named = {members.name(k): short(reason, 500) for k, reason in sorted(reasons.items())}
    for name, reason in named.items():
        log(WARNING, "round %s: %s is left out: %s", number, name, reason)
    return named


def evaluate(host: Host, members: Members, server: Kept, everyone: bool = False) -> Record:
    """Returns {"accuracy": {client: percent, "mean": ...}, ...} of reporting clients, for `SCORED`.

    "tested_on" says of which of their samples the accuracies are, see `data.domain.scored_part`.
    Clients without a model of their own are asked only if `everyone` is; who fails or is late has
    no score.
    """
    order, count = host.order._replace(round=int(server.round)), host.order.population
    scores_of, parts, taken = {}, [], np.asarray(server.taken)
    connected = members.connected.items()
    asked = [k for k, (_, hello) in connected if hello.scores and (everyone or taken[k])]

    def keep(k: int, scores: dict[str, float]) -> None:
        validates = scores.get(messages.TESTED_ON_VALIDATION, 0.0) > 0
        parts.append("validation" if validates else "test")
        for name in scores.keys() & {*messages.SCORED}:
            scores_of.setdefault(name, np.full(count, np.nan))[k] = scores[name]

    contents = _contents(server, order, asked)
    reasons = members.ask(order, contents, MessageType.EVALUATE, _scores_in, keep)
    for k, reason in reasons.items():
        log(WARNING, "%s is not evaluated: %s", members.name(k), short(reason, 500))
    names, record = [*map(members.name, range(count))], {}
    for name, values in sorted(scores_of.items()):
        record[name] = by_client(names, values, host.config.clients_named)
        record[name]["mean"] = float(np.nanmean(values))
    if parts:
        log(INFO, "scores of round %s\n%s", order.round, accuracies(record, "percent"))
        record["tested_on"] = {"internal": part_of_all(parts)}
    return record


def _scores_in(client: int, content: RecordDict) -> dict[str, float]:
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
        fault = "config.participation=by_size draws %s last, because no size is reported"
        remedy = "let it report sizes, or set participation=uniform"
        log(WARNING, f"{fault}: {remedy}", ", ".join(hidden))
    client, stays = draw_cohort(participation, sizes, host.keys.participation, np.int32(number))
    rows = np.arange(len(sizes)) if client is None else np.asarray(client)
    stays = np.ones(len(rows), bool) if stays is None else stays
    return rows.astype(np.int32), [int(k) for k in rows[np.asarray(stays)]]


def _contents(server: Kept, order: Order, clients: Sequence[int]) -> dict[int, RecordDict]:
    """Returns client -> the message with a round's broadcast."""
    # Clients that have not trained yet also get the frozen leaves, which they keep.
    sent, taken = to_named(broadcast_of(server.state)), np.asarray(server.taken)
    arrays = first_arrays = messages.recorded(sent)  # all messages share the bytes
    if jax.tree.leaves(server.state.frozen) and not all(taken[[*clients]]):
        first_arrays = messages.recorded(sent | to_named({"frozen": server.state.frozen}))
    order = order._replace(facts="")  # which only questions have
    return {
        k: messages.packed(
            order._replace(begin=int(taken[k])), arrays if taken[k] else first_arrays
        )
        for k in clients
    }


def _uploads(
    host: Host, members: Members, server: Kept, asked: Sequence[int]
) -> tuple[_Accepted, Any, dict[int, str]]:
    """Asks clients to train, and adds their uploads one by one; `asked` are in ascending order."""
    # Returns the accepted uploads, the total of `Host.add`, and client -> why it is left out.
    connected, forms = members.connected, (host.upload, host.personal)
    order, limit = host.order._replace(round=int(server.round) + 1), len(jax.tree.leaves(forms))
    shared = jax.device_get(server.state.shared)
    accepted, total = {}, None
    reasons = {k: "it is not connected" for k in asked if k not in connected}

    def read(k: int, content: RecordDict) -> tuple[Upload, Any, float]:
        arrays, (_, hello) = messages.arrays_in(content, limit), connected[k]
        bound = members.run.norm_bound
        return accept(arrays, forms, shared, k, order.population, hello, bound)

    def keep(k: int, sent: tuple[Upload, Any, float]) -> None:
        nonlocal total
        upload, personal, norm = sent
        total = host.add(total, upload, personal)
        # The arrays are in the total already; without them a round holds one upload at a time.
        accepted[k] = upload._replace(shared=(), message=()), norm

    contents = _contents(server, order, [k for k in asked if k not in reasons])
    reasons |= members.ask(order, contents, MessageType.TRAIN, read, keep)
    return accepted, total, reasons
