"""The ServerApp: it meets the clients, plays the rounds, and saves each before the next begins.

For unseen clients it leaves WORKDIR/served, which `fedjax-bn serve` and `evaluate` read: it has the
form of a finished run of one client, whose personal leaves are the mean of all clients'
(`global_variables` of the simulation), if they have sent them.
"""

import json
import logging
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from logging import INFO, WARNING
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from ml_collections import ConfigDict

from fedjax_bn.engine.named_arrays import names_of
from fedjax_bn.flower.host import Host, Kept, open_host
from fedjax_bn.flower.messages import Order
from fedjax_bn.flower.rounds import Met, TooFewError, evaluate, meet, play
from fedjax_bn.flower.settings import Run, config_of, run_of
from fedjax_bn.flower.site import adds_noise, deployed
from fedjax_bn.run.config.keys import check, flatten
from fedjax_bn.run.experiment.method import follows_rounds, method_maker
from fedjax_bn.run.experiment.values import describe_privacy, privacy_notes
from fedjax_bn.run.files import checkpoint, workdir
from fedjax_bn.run.files.ownership import claim, owned
from fedjax_bn.run.files.workdir import CLAIM, NUMBER, TEXT
from fedjax_bn.run.processes.machine import describe_machine
from fedjax_bn.run.training.records import Record, out_of_patience, select_round
from fedjax_bn.run.training.train import resume

_SAME = ("clients", "serve_unseen")  # of the run config, in all starts of one federation
_POLL = 2.0  # seconds between looks for clients that are not there yet
_ABOUT = CLAIM | {"sizes": {"longest": NUMBER, "smallest": NUMBER}, "samples": TEXT}


def server_app(folder: str | Path = ".") -> ServerApp:
    """Returns a ServerApp of the method that the run config's `config` names; see `settings`.

    It talks to Flower's Grid itself, without a Strategy: weights, server optimizers and messages
    are the method's own. Its workdir holds config.json, metrics.jsonl and checkpoints as that of
    `fedjax-bn`; the same command continues from the last round.

    Args:
      folder: of the app, where the config file is looked for first.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _say_once()
        serve(grid, run_of(context.run_config), folder)

    return app


def _say_once() -> None:
    """Keeps Flower's lines, which it prints itself, from the root logger's handlers."""
    for handler in logging.root.handlers:  # absl adds one when Orbax is imported
        handler.addFilter(lambda record: record.name != "flwr")


def serve(grid: Grid, run: Run, folder: str | Path = ".") -> tuple[Kept, list[Record]]:
    """Plays the rounds that are left; returns what is kept after them, and their records.

    Args:
      grid: Flower's.
      run: the run config.
      folder: of the app.

    Raises:
      ConfigError: the configuration does not suit.
      WorkdirError, CheckpointError: the workdir is another federation's, or damaged.
      TooFewError, RiskError: as `rounds.play`.
    """
    config = config_of(run.config, run.changes, folder)
    # What can be wrong is found before the server waits for clients.
    check(config)
    method_maker(config)
    promised = describe_privacy(deployed(config), run.clients, config.rounds)
    place = Path(run.workdir).expanduser()
    with owned(place):
        order, form = _facts_of(place, run, config.method)
        finished = form and workdir.rounds_recorded(place / "metrics.jsonl") >= config.rounds
        met = Met() if finished else _gather(grid, order, run)
        if not form:  # a new federation, whose first clients decide
            hellos = [member.hello for member in met.members.values()]
            sizes = [hello.size for hello in hellos if hello.size] or [0]
            order = order._replace(longest=max(sizes), smallest=min(sizes))
            # The form that most clients have; of two as frequent, that of the first client.
            form = Counter(hello.form for hello in hellos).most_common(1)[0][0]
        # Only the compiled step has the seed of the server's noise: it is never written or sent.
        host = open_host(_with_own_noise(config), run, order, form)._replace(config=config)
        flat = dict(flatten(config)) | {f"flower.{k}": getattr(run, k) for k in _SAME}
        sizes = {"longest": order.longest, "smallest": order.smallest}
        about = {"data": order.federation, "sizes": sizes, "samples": form}
        claim(place, flat, about | promised | describe_machine(), follows_rounds(config))
        kept, records = resume(place, host.start)
        _say_start(host, records, promised)
        kept, records = _loop(grid, host, place, met, kept, records)
        log(INFO, _write_served(host, place, folder, kept, records))
        return kept, records


def _facts_of(place: Path, run: Run, method: str) -> tuple[Order, str]:
    """Returns what the server's workdir holds of a federation; a new one gets its name here.

    It is the header of the server's messages with begin=0, and the form of samples as JSON, "" for
    a new federation. `method` is the configured method's name.

    Raises:
      WorkdirError: its config.json is damaged.
    """
    path, sizes = place / "config.json", {"longest": 0, "smallest": 0}
    about = {"data": f"{method}-{secrets.token_hex(8)}", "sizes": sizes, "samples": ""}
    if path.exists():
        about = workdir.read_json(path, _ABOUT)
    longest, smallest = about["sizes"]["longest"], about["sizes"]["smallest"]
    order = Order(about["data"], method, 0, run.clients, longest, smallest, run.serve_unseen)
    return order, about["samples"]


def _with_own_noise(config: ConfigDict) -> ConfigDict:
    """Returns the configuration of the server's step; with a fresh seed where it adds noise.

    `config` is not changed, and is what may be written and sent. See `site.adds_noise`.
    """
    if not adds_noise(config, "server"):
        return config
    config = config.copy_and_resolve_references()
    config.privacy.seed = secrets.randbits(32)
    return config


def _gather(grid: Grid, order: Order, run: Run) -> Met:
    """Waits for all clients, or, when the time is over, for as many as a round needs."""
    met, start, least = Met(), time.monotonic(), run.minimum or run.clients
    while True:
        met = meet(grid, met, order, run.time_limit)
        count, waited = len(met.members), time.monotonic() - start
        if count == run.clients or (count >= least and waited > run.time_limit):
            return met
        if waited > run.attempts * run.time_limit:
            raise TooFewError(
                f"{count} of {run.clients} clients are there, fewer than {least} (minimum in the "
                "run config): start their SuperNodes, or see the log for why they are left out"
            )
        time.sleep(_POLL)


def _say_start(host: Host, records: list[Record], promised: Record) -> None:
    """Logs what travels, what stays, what privacy promises, and where the federation stands."""
    for note in (*privacy_notes(promised), *host.notes):
        log(INFO, note)
    keys = host.config.privacy
    if keys.clip and keys.noise and keys.seed is not None:
        log(
            WARNING,
            f"privacy.seed={keys.seed} makes noise that can be repeated, as in a simulation: "
            "anybody who has the run config can remove it, so leave privacy.seed empty where the "
            "noise is to protect clients",
        )
    if host.run.serve_unseen:
        names = ", ".join(names_of({"personal": host.personal}))
        log(INFO, "serve-unseen: clients send their personal leaves too: %s", names or "none")
    if records:
        log(INFO, "continuing from round %s of %s", len(records), host.config.rounds)


def _loop(
    grid: Grid, host: Host, place: Path, met: Met, kept: Kept, records: list[Record]
) -> tuple[Kept, list[Record]]:
    """Plays the rounds that are left; each is on the disk before the next begins."""
    config = host.config
    with checkpoint.open_both(place, len(records)) as (latest, selected):
        while len(records) < config.rounds and not out_of_patience(records, config.patience):
            kept, record, met = play(grid, host, met, kept)
            number = record["round"]
            if number == config.rounds or number % config.eval_every == 0:
                record |= evaluate(grid, host, met, kept)
            records.append(record)
            # The lines are on the disk before the checkpoint that counts them. So after a power cut
            # the checkpoint is followed by too many lines at most, which `resume` drops.
            workdir.append_line(place / "metrics.jsonl", record)
            if "validation" in record and select_round(records) == number:
                checkpoint.save(selected, number, kept)
                checkpoint.settle(selected)
            workdir.sync(place / "metrics.jsonl")
            checkpoint.save(latest, number, kept)
            checkpoint.settle(latest)
    checkpoint.delete_earlier(place)
    return kept, records


def _write_served(
    host: Host, place: Path, app: str | Path, kept: Kept, records: Sequence[Record]
) -> str:
    """Writes WORKDIR/served from the selected round, or the last one; returns a note for the log.

    `app` is the app's folder, where a user's own modules are.
    """
    personal = jax.eval_shape(host.one).personal
    if jax.tree.leaves(personal) and not jax.tree.leaves(kept.served):
        return (
            "an unseen client cannot be served, because personal leaves stayed with the clients: "
            "serve-unseen=true in the run config and in each node config would send them"
        )
    evaluated = any("accuracy" in record for record in records)
    number = select_round(list(records)) if evaluated else len(records)
    with checkpoint.open_folder(place / "checkpoints" / "selected", keep=1) as manager:
        if number in checkpoint.steps(manager):
            kept = checkpoint.restore(manager, jax.eval_shape(host.start), number)
    state, given = host.one(), ("round", "shared", "server")
    state = state._replace(**{name: getattr(kept.state, name) for name in given})
    if jax.tree.leaves(kept.served):
        mean = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], kept.served)
        state = state._replace(personal=mean)
    config, name = deployed(host.config), host.order.federation
    config.target = ""
    about = {
        "config": dict(flatten(config)),
        "data": name,
        "form": {"dataset": name, "clients": ["federation"]} | json.loads(host.form),
        "started_in": str(Path(app).resolve()),
    }
    accuracies = [
        {"internal": records[n - 1].get("accuracy", {"mean": float("nan")}), "unseen": {}}
        for n in (number, len(records))
    ]
    summary = {
        "method": config.method,
        "dataset": name,
        "seed": config.seed,
        "rounds": len(records),
        "selected_round": number,
        "accuracy": accuracies[0],
        "last_round": accuracies[1],
        "seconds_per_round": median(record["seconds"] for record in records),
        # The server does not know how long clients compile, and how many samples they train on.
        "compile_seconds": float("nan"),
        "samples_per_second": float("nan"),
        **describe_privacy(config, host.run.clients, len(records)),
    }
    folder = place / "served"
    workdir.write_json(folder / "config.json", about)
    with checkpoint.open_folder(folder / "checkpoints" / "latest", keep=1) as manager:
        checkpoint.save(manager, number, state)
        checkpoint.settle(manager)
    # Last, since a run without it has not finished.
    workdir.write_json(folder / "summary.json", summary)
    command = shlex.join(("fedjax-bn", "serve", "--workdir", str(folder), "--export", "FOLDER"))
    return f"round {number} can be served: {command}"
