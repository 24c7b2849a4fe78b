"""The loop over rounds: restore, round, evaluate, select, log, save."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_bn import sharing
from fedjax_bn.data.division.partition import fingerprint
from fedjax_bn.data.domain import form_of
from fedjax_bn.extrapolation import check_risks
from fedjax_bn.federation import FederatedState
from fedjax_bn.run import checkpoint, logs, workdir
from fedjax_bn.run.config import flatten
from fedjax_bn.run.configured_method import resolved, with_method_parts
from fedjax_bn.run.errors import ConfigError, InterruptedRun, NotFiniteError, RiskError
from fedjax_bn.run.evaluator import evaluator
from fedjax_bn.run.experiment import (
    Experiment,
    build,
    initial_variables,
    load_pretrained,
    sample_input,
)
from fedjax_bn.run.mask_log import log_masks
from fedjax_bn.run.report import plots
from fedjax_bn.run.rounds import open_rounds
from fedjax_bn.run.summary import Record, select_round, summarize


class Keys(NamedTuple):
    """The random keys of a run, all from `config.seed`."""

    model: jax.Array
    method: jax.Array
    data: jax.Array
    participation: jax.Array


def run(config: ConfigDict, folder: Path, say: Callable[[str], None] = print) -> Record:
    """Trains one method and returns its summary; a run that was stopped goes on where it was.

    Args:
      config: as `fedjax_bn.run.config.base` and a config file make it.
      folder: the workdir; see the README for its files.
      say: where messages go.

    Raises:
      ConfigError: the configuration or the data do not suit.
      WorkdirError, CheckpointError: the workdir is another run's or damaged.
      NotFiniteError: a client's update is not finite and `config.on_nonfinite` is "stop".
      InterruptedRun: Ctrl-C, after the state was saved.
    """
    # 1. Everything that can be wrong is found here, before anything is written or compiled.
    config = resolved(config)
    experiment, keys, start = prepare(config)
    about = {"data": data_hash(experiment), "form": form_of(experiment.internal)}
    about["notes"] = list(experiment.notes)
    about |= workdir.describe_machine()
    workdir.claim(folder, dict(flatten(config)), about)

    # 2. A finished run only says so.
    if (folder / "summary.json").exists():
        say(f"{folder} holds a finished run of {config.method}; nothing to do.")
        return workdir.read_json(folder / "summary.json", ("method", "accuracy"))

    # 3. Otherwise go on from the latest checkpoint, if there is one.
    state = resume(folder, start)
    if state.round:
        say(f"going on from round {int(state.round)} of {config.rounds} in {folder}")
    records = workdir.read_lines(folder / "metrics.jsonl", int(state.round))
    workdir.rewrite_lines(folder / "metrics.jsonl", records)

    for note in experiment.notes:
        say(note)
    say(partition_table(config, state))
    draw_data(experiment, folder)
    rounds = open_rounds(config, experiment, keys, state)
    say(rounds.note)
    began = time.perf_counter()
    round = rounds.compile(state)
    compile_seconds = time.perf_counter() - began
    records = loop(config, experiment, folder, round, state, records)

    summary = summarize(config, experiment, records, compile_seconds)
    workdir.write_json(folder / "summary.json", summary)
    return summary


def prepare(config: ConfigDict) -> tuple[Experiment, Keys, Callable[[], FederatedState]]:
    """Builds the experiment, the keys and a function that makes the state before the first round.

    Raises:
      ConfigError: whatever is wrong with the configuration or the data it names.
    """
    try:
        experiment = build(config)
        keys = make_keys(config)
        fixed, notes = load_pretrained(config, experiment)
        start = starter(config, experiment, keys, fixed)
        jax.eval_shape(start)  # raises where the method does not suit the model
        return experiment._replace(notes=experiment.notes + notes), keys, start
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


def make_keys(config: ConfigDict) -> Keys:
    """The random keys of a run."""
    return Keys(*jax.random.split(jax.random.key(config.seed), len(Keys._fields)))


def starter(
    config: ConfigDict,
    experiment: Experiment,
    keys: Keys,
    fixed: sharing.Variables | None = None,
) -> Callable[[], FederatedState]:
    """Returns `start() -> state` before the first round; `fixed` as `load_pretrained` gives it."""

    @jax.jit
    def begin(fixed: sharing.Variables | None) -> FederatedState:
        variables = initial_variables(experiment, keys.model)
        if fixed is not None:
            variables = sharing.join(fixed, sharing.split_like(variables, fixed)[1])
        images = sample_input(experiment.internal, experiment.prepare, 2)
        key = jax.random.fold_in(keys.model, 1)
        variables = with_method_parts(config, experiment.model, variables, images, key)
        return experiment.method.init(keys.method, variables, len(experiment.internal.domains))

    return partial(begin, fixed)


def data_hash(experiment: Experiment) -> str:
    """SHA-256 of the data split, the unseen clients included."""
    domains = experiment.internal.domains + experiment.unseen
    return fingerprint(experiment.internal._replace(domains=domains))


def draw_data(experiment: Experiment, folder: Path) -> None:
    """Writes pictures of the samples and of the class counts of every client."""
    pictures = [*experiment.internal.domains, *experiment.unseen]
    workdir.write_atomically(folder / "plots" / "samples.png", plots.samples(pictures))
    counts = plots.class_counts(experiment.internal)
    workdir.write_atomically(folder / "plots" / "class_counts.png", counts)


def resume(folder: Path, start: Callable[[], FederatedState]) -> FederatedState:
    """The state of the latest checkpoint, or `start()` where there is none."""
    with checkpoint.open_folder(folder / "checkpoints" / "latest", keep=2) as latest:
        if latest.all_steps():
            return checkpoint.restore(latest, jax.eval_shape(start))
    return start()


def partition_table(config: ConfigDict, state: FederatedState) -> str:
    """Which leaves are shared and which personal, with counts and bytes of one client."""
    own = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state.personal
    )
    variables = sharing.join(state.shared, own)
    mask = jax.tree.map(lambda leaf: leaf is not None, state.shared, is_leaf=lambda x: x is None)
    return f"{config.method} on {config.model}, {state.weights.shape[0]} clients\n" + (
        sharing.describe(variables, mask)
    )


def loop(
    config: ConfigDict,
    experiment: Experiment,
    folder: Path,
    round: Callable,
    state: FederatedState,
    records: list[Record],
) -> list[Record]:
    """Runs the rounds that are left; returns the records of all."""
    names = [domain.name for domain in experiment.internal.domains]
    evaluate = evaluator(config, experiment)
    latest, selected = open_checkpoints(folder, len(records))
    events = logs.open_events(folder / "events", records)
    bar = logs.progress(config.method, config.rounds, len(records))
    with latest, selected, events, bar, stop_requests() as stop_requested:
        while len(records) < config.rounds:
            start = time.perf_counter()
            state, metrics = round(state)
            metrics = jax.device_get(metrics)
            record = round_record(names, metrics, len(records) + 1, time.perf_counter() - start)
            if config.on_nonfinite == "stop":
                check_finite(record)
            check_weights(names, metrics, len(records) + 1)
            number, last = record["round"], record["round"] == config.rounds
            record |= log_masks(experiment, folder, state, last)
            if last or number % config.eval_every == 0:
                record |= evaluate(state)
            records.append(record)
            workdir.append_line(folder / "metrics.jsonl", record)
            logs.write_events(events, record)
            bar.set_postfix_str(logs.progress_text(record), refresh=False)
            bar.update()

            if "validation" in record and select_round(records) == number:
                checkpoint.save(selected, number, state)
            stop = stop_requested()
            if last or stop or number % config.checkpoint_every == 0:
                # A run that goes on from here will not select this round again.
                selected.wait_until_finished()
                checkpoint.save(latest, number, state)
            if stop:
                raise InterruptedRun(
                    f"stopped after round {number} of {config.rounds}, which is saved in {folder}: "
                    "give the same command to go on"
                )
    return records


def open_checkpoints(folder: Path, rounds_done: int) -> tuple[Any, Any]:
    """The folders of the latest and of the selected checkpoints, without those still to come."""
    latest = checkpoint.open_folder(folder / "checkpoints" / "latest", keep=2)
    selected = checkpoint.open_folder(folder / "checkpoints" / "selected", keep=1)
    for step in selected.all_steps():
        if step > rounds_done:  # of a killed run; it will be reached, and saved, again
            selected.delete(step)
    return latest, selected


def round_record(
    names: list[str], metrics: dict[str, np.ndarray], number: int, seconds: float
) -> Record:
    """One line of metrics.jsonl; None for the loss of a client that sat out."""

    def by_client(values: np.ndarray) -> Record:
        numbers = values.tolist()
        return {
            name: value if np.isfinite(value) else None
            for name, value in zip(names, numbers, strict=True)
        }

    record = {
        "round": number,
        "loss": by_client(metrics["loss"]),
        "weights": by_client(metrics["weights"]),
        "seconds": seconds,
    }
    if not metrics["finite"].all():
        record["not_finite"] = [n for n, ok in zip(names, metrics["finite"], strict=True) if not ok]
    return record


def check_finite(record: Record) -> None:
    """Raises NotFiniteError where a client's update of the round is not finite."""
    if "not_finite" in record:
        raise NotFiniteError(
            f"round {record['round']}: the update of {', '.join(record['not_finite'])} is not "
            "finite; lower optimizer.learning_rate, look at that client's data, or set "
            "on_nonfinite=drop to leave such clients out of a round's mean"
        )


def check_weights(names: list[str], metrics: dict[str, np.ndarray], number: int) -> None:
    """Raises RiskError where the weighing rule gave no weights, because a risk does not suit."""
    if np.isfinite(metrics["weights"]).all():
        return
    counts = np.isfinite(metrics["loss"]) & metrics["finite"]
    try:
        check_risks(counts, metrics["risk"], names)
    except ValueError as error:
        raise RiskError(f"round {number}: {error}") from error
    raise RiskError(f"round {number}: the weighing rule gave weights that are not finite")


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask to stop after the round; a second one acts at once."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def request(number: int, frame: Any) -> None:
        del frame
        requested.set()
        signal.signal(number, old[number])

    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, request) for number in numbers}
    try:
        yield requested.is_set
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
