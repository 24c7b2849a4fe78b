"""The ServerApp: it meets the clients, plays the rounds, and saves each before the next begins."""

import logging
import time
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedjax_bn.engine.named_arrays import names_of
from fedjax_bn.flower import noise
from fedjax_bn.flower.host import Host, Kept, about_of, facts_of, known_from, open_host
from fedjax_bn.flower.members import NOBODY, Met, meet
from fedjax_bn.flower.records import Order
from fedjax_bn.flower.rounds import TooFewError, evaluate, play
from fedjax_bn.flower.served import write_served
from fedjax_bn.flower.settings import Run, config_of, run_of
from fedjax_bn.flower.site import deployed
from fedjax_bn.run.config.keys import check, flatten
from fedjax_bn.run.experiment.method import follows_rounds, method_maker
from fedjax_bn.run.experiment.privacy import describe_privacy, privacy_notes
from fedjax_bn.run.files import checkpoint, workdir
from fedjax_bn.run.files.ownership import claim, owned
from fedjax_bn.run.processes.machine import describe_machine
from fedjax_bn.run.training.records import Record
from fedjax_bn.run.training.summary import out_of_patience, select_round
from fedjax_bn.run.training.train import resume

_FLOWER = "flwr"  # its logger
_SAME = ("clients", "serve_unseen")  # of the run config, in all starts of one federation
_POLL = 2.0  # seconds between looks for clients that are not there yet


def server_app(folder: str | Path = ".") -> ServerApp:
    """A ServerApp of whatever method the run config's `config` names; see `settings` for all keys.

    It talks to Flower's Grid itself, without a Strategy: weights, server optimizers and messages
    are the method's own. Its workdir holds config.json, metrics.jsonl and checkpoints as that of
    `fedjax-bn`; the same command goes on from the last round.

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
    """Keeps Flower's lines, which it prints itself, from the root logger's handlers.

    Orbax has absl give the root logger one when it is imported.
    """
    for handler in logging.root.handlers:
        handler.addFilter(lambda record: record.name != _FLOWER)


def serve(grid: Grid, run: Run, folder: str | Path = ".") -> tuple[Kept, list[Record]]:
    """Plays the rounds that are left; returns what is kept behind them, and their records.

    Args:
      grid: Flower's.
      run: the run config.
      folder: of the app.

    Raises:
      ConfigError: the configuration does not suit, or no client says what its samples are.
      WorkdirError, CheckpointError: the workdir is another federation's, or damaged.
      TooFewError, RiskError: as `rounds.play`.
    """
    config = config_of(run.config, run.changes, folder)
    check(config)  # before anybody is waited for
    method_maker(config)
    promised = describe_privacy(deployed(config), run.clients, config.rounds)
    place = Path(run.workdir).expanduser()
    with owned(place):
        order, form = facts_of(place, run, config.method)
        finished = form and workdir.rounds_recorded(place / "metrics.jsonl") >= config.rounds
        met = NOBODY if finished else _gather(grid, order, run)
        order, form = known_from(order, form, met.members)
        host = open_host(noise.of_server(config), run, order, form)._replace(config=config)
        flat = dict(flatten(config)) | {f"flower.{k}": getattr(run, k) for k in _SAME}
        claim(
            place,
            flat,
            about_of(order, form) | promised | describe_machine(),
            follows_rounds(config),
        )
        kept, records = resume(place, host.start)
        _say_start(host, records, promised)
        kept, records = _loop(grid, host, place, met, kept, records)
        log(INFO, write_served(host, place, folder, kept, records))
        return kept, records


def _gather(grid: Grid, order: Order, run: Run) -> Met:
    """Waits for all clients, or, when the time is over, for as many as a round needs."""
    met, start, least = NOBODY, time.monotonic(), run.minimum or run.clients
    while True:
        met = meet(grid, met, order, run.time_limit)
        there, waited = len(met.members), time.monotonic() - start
        if there == run.clients or (there >= least and waited > run.time_limit):
            return met
        if waited > run.attempts * run.time_limit:
            raise TooFewError(
                f"{there} of {run.clients} clients are there, fewer than {least} (minimum in the "
                "run config): start their SuperNodes, or see the log for why they are left out"
            )
        time.sleep(_POLL)


def _say_start(host: Host, records: list[Record], promised: Record) -> None:
    """What travels, what stays, what privacy promises, and where the federation stands."""
    for note in (*host.experiment.notes, *privacy_notes(promised), host.table):
        log(INFO, note)
    if said := noise.warning(host.config):
        log(WARNING, said)
    log(INFO, "a client and round: {down:,} bytes down, {up:,} bytes up".format(**host.traffic))
    if host.run.serve_unseen:
        names = ", ".join(names_of({"personal": host.personal}))
        log(INFO, "serve-unseen: clients send their personal leaves too: %s", names or "none")
    if records:
        log(INFO, "going on from round %s of %s", len(records), host.config.rounds)


def _loop(
    grid: Grid,
    host: Host,
    place: Path,
    met: Met,
    kept: Kept,
    records: list[Record],
) -> tuple[Kept, list[Record]]:
    """The rounds that are left. A round is on the disk before the next is asked for."""
    config = host.config
    with checkpoint.open_both(place, len(records)) as (latest, selected):
        while len(records) < config.rounds and not out_of_patience(records, config.patience):
            kept, record, met = play(grid, host, met, kept)
            number = record["round"]
            if number == config.rounds or number % config.eval_every == 0:
                record |= evaluate(grid, host, met.members, kept)
            records.append(record)
            workdir.append_line(place / "metrics.jsonl", record)
            if "validation" in record and select_round(records) == number:
                checkpoint.save(selected, number, kept)
                checkpoint.settle(selected)
            workdir.sync(place / "metrics.jsonl")
            checkpoint.save(latest, number, kept)
            checkpoint.settle(latest)
    checkpoint.delete_earlier(place)
    return kept, records
