"""Makes the ServerApp, which meets the clients, plays the rounds, and saves each of them.

For unseen clients it writes WORKDIR/served, which `fedjax-bn serve` and `evaluate` read. This
folder has the form of a finished run of one client. If the clients sent their personal leaves, it
has their mean (`global_variables` of the simulation).
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

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.engine.named_arrays import names_of, to_named
from fedjax_bn.flower.host import Host, Kept, open_host
from fedjax_bn.flower.members import Met, meet, read_clients, write_clients
from fedjax_bn.flower.messages import Order, digest_of
from fedjax_bn.flower.rounds import TooFewError, evaluate, play
from fedjax_bn.flower.settings import Run, config_of, run_of
from fedjax_bn.flower.site import adds_noise, deployed, sent_personal
from fedjax_bn.run.config.keys import check, flatten
from fedjax_bn.run.experiment.build import describe_privacy
from fedjax_bn.run.experiment.method import follows_rounds, method_maker
from fedjax_bn.run.files.ownership import claim, owned
from fedjax_bn.run.train import resume
from fedjax_bn.sharing import OWN
from fedjax_bn.training import checkpoint, workdir
from fedjax_bn.training.callbacks.checkpoints import Checkpoints
from fedjax_bn.training.callbacks.evaluation import Scores
from fedjax_bn.training.callbacks.lines import Lines
from fedjax_bn.training.callbacks.patience import Patience
from fedjax_bn.training.experiment import privacy_notes
from fedjax_bn.training.loop import train
from fedjax_bn.training.machine import describe_machine
from fedjax_bn.training.records import Record, out_of_patience, select_round
from fedjax_bn.training.workdir import CLAIM

_SAME = ("clients", "serve_unseen")  # keys of the run config that a restart must not change
_POLL = 2.0  # seconds between two searches for clients that are not connected yet
_ABOUT = (*CLAIM, "sizes", "samples")  # of config.json


def server_app(folder: str | Path = ".") -> ServerApp:
    """Returns a ServerApp of the method that the run config's `config` names; see `settings`.

    The app uses Flower's Grid directly, without a Strategy: weights, server optimizers and messages
    are the method's own. Its workdir holds config.json, metrics.jsonl and checkpoints, like a
    workdir of `fedjax-bn`; the same command continues from the last round.

    Args:
      folder: the app's folder, in which the config file is looked for first.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _say_once()
        serve(grid, run_of(context.run_config), folder)

    return app


def _say_once() -> None:
    """Keeps the root logger's handlers from printing Flower's lines a second time."""
    for handler in logging.root.handlers:  # importing Orbax adds absl's handler
        handler.addFilter(lambda record: record.name != "flwr")


def serve(grid: Grid, run: Run, folder: str | Path = ".") -> tuple[Kept, list[Record]]:
    """Plays the rounds that are left; returns the server's last state, and all rounds' records.

    Args:
      grid: Flower's Grid.
      run: the run config.
      folder: the app's folder.

    Raises:
      ConfigError: the configuration is wrong.
      WorkdirError, CheckpointError: the workdir belongs to another federation, or is damaged.
      TooFewError, RiskError: see `rounds.play`; also, too few clients connect at the start.
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
        # Only the compiled step uses the seed of the server's noise, which is never written or
        # sent; so `host.config` is the configuration without that seed.
        host = open_host(_with_own_noise(config), run, order, form)._replace(config=config)
        flat = dict(flatten(config)) | {f"flower.{k}": getattr(run, k) for k in _SAME}
        sizes = {"longest": order.longest}
        about = {"data": order.federation, "sizes": sizes, "samples": form}
        claim(place, flat, about | promised | describe_machine(), follows_rounds(config))
        met = write_clients(place, met, run.clients)
        server, records = resume(place, host.start)
        digest = digest_of(to_named({"frozen": server.state.frozen}))
        host = host._replace(order=host.order._replace(frozen=digest))
        _say_start(host, records, promised)
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
    `method` is the configured method's name.

    Raises:
      WorkdirError: the workdir's config.json is damaged.
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

    Raises:
      ConfigError: two forms are stated by equally many clients, so that neither can be trusted.
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
    """Returns the configuration of the server's step, with a fresh seed if the step adds noise.

    `config` itself is not changed, so it may be written and sent. See `site.adds_noise`.
    """
    if not adds_noise(config, "server"):
        return config
    config = config.copy_and_resolve_references()
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


def _say_start(host: Host, records: list[Record], promised: Record) -> None:
    """Logs what privacy promises, what travels, what stays, and the round to continue from."""
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
    accuracies = [
        {"internal": records[n - 1].get("accuracy", {"mean": float("nan")}), "unseen": {}}
        for n in (number, len(records))
    ]
    config = deployed(host.config)
    return {
        "method": config.method,
        "dataset": host.order.federation,
        "seed": config.seed,
        "rounds": len(records),
        "selected_round": number,
        "tested_on": records[number - 1].get("tested_on", {}),
        "accuracy": accuracies[0],
        "last_round": accuracies[1],
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
    state = host.alone()._replace(round=server.state.round, shared=server.state.shared)
    state = state._replace(frozen=server.state.frozen)
    mean = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], server.served)
    # Zeros, so that the shared model predicts and not the own model of the start.
    personal_model = {name: tree for name, tree in state.personal.items() if name == OWN}
    personal_model = jax.tree.map(jnp.zeros_like, personal_model)
    state = state._replace(personal={**state.personal, **personal_model, **dict(mean)})
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
