"""The commands `train` and `config`: the runs of a configuration, each in a workdir of its own."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_bn.arguments.errors import InterruptedRun
from fedjax_bn.arguments.text import file_name, shown
from fedjax_bn.data.domain import Domain, form_of
from fedjax_bn.data.labels import has_boxes
from fedjax_bn.data.sampling import label_forms
from fedjax_bn.federation import FederatedState, traffic
from fedjax_bn.run.config.defaults import KEYS
from fedjax_bn.run.experiment.build import prepare, starting_record
from fedjax_bn.run.experiment.datasets import domain_names
from fedjax_bn.run.experiment.method import served_of
from fedjax_bn.run.files.finished_run import restore_state
from fedjax_bn.run.files.ownership import claim, owned
from fedjax_bn.training import checkpoint, score_tables, workdir
from fedjax_bn.training.callbacks.checkpoints import Checkpoints, Lines
from fedjax_bn.training.callbacks.client_logs import ClientLogs
from fedjax_bn.training.callbacks.evaluation import Patience, Scores, StopRequests
from fedjax_bn.training.callbacks.profile import Profile
from fedjax_bn.training.callbacks.progress import Progress, Warnings
from fedjax_bn.training.callbacks.tensorboard import TensorBoard
from fedjax_bn.training.evaluation.answers import Keep, write_answers
from fedjax_bn.training.evaluation.evaluate import evaluator, unseen_evaluator
from fedjax_bn.training.experiment import Experiment, privacy_notes
from fedjax_bn.training.loop import train
from fedjax_bn.training.mesh import form_on, mesh_note
from fedjax_bn.training.plots import draw_boxes, write_data_plots
from fedjax_bn.training.population import start_population
from fedjax_bn.training.processes import by_first, first, held_by_first, require_same
from fedjax_bn.training.records import (
    Record,
    have_trained,
    out_of_patience,
    samples_a_round,
    summarize,
)
from fedjax_bn.training.rounds import open_rounds, recorded_round
from fedjax_bn.training.start import (
    Keys,
    batches_of_one,
    data_hash,
    partition_table,
    sample_input,
)
from fedjax_bn.training.workdir import SUMMARY, describe_machine, difference


def train_all(config: ConfigDict, folder: Path, write_report: Callable[[Path], None]) -> None:
    """Trains, writes reports and prints tables; `target=each` leaves out each domain in turn.

    With `target=each`, `folder` has one workdir for each target, and a table of all targets,
    targets.json. `write_report` makes the plots and the page of a finished run's folder. Of several
    processes only the first one writes and prints.
    """
    say: Callable[[str], None] = print if first() else lambda text: None
    if config.target != "each":
        summaries = _train_one(config, folder, write_report)
        say(f"\n{score_tables.comparison(summaries)}")
        say(f"\nsummary.json, plots and report.html are in {folder}")
        return
    by_target = {}
    for target in domain_names(config):
        target_config = config.copy_and_resolve_references()
        target_config.target = target
        say(f"\ntarget {shown(target)}")
        by_target[target] = _train_one(target_config, folder / file_name(target), write_report)
    if not first():
        return
    rows = score_tables.by_target(by_target)
    content = {
        "targets": list(by_target),
        "accuracy": [{"method": m, "adaptation": a, **row} for (m, a), row in rows.items()],
    }
    with owned(folder, wait=True):
        workdir.write_json(folder / "targets.json", content)
    named = {score_tables.heading(key): row for key, row in rows.items()}
    score = next(iter(by_target.values()))[0].get("score", "accuracy")
    say(f"\n{score_tables.accuracies(named, f'unseen, {score} %')}")
    say(f"\ntargets.json and a folder a target are in {folder}")


def _train_one(
    config: ConfigDict, folder: Path, write_report: Callable[[Path], None]
) -> list[Record]:
    """Trains the method and its baselines for one target; returns their summaries."""
    # Baselines have the same modules, so for them only sums over leaves are printed.
    summaries = [run(*pair, modules=pair[1] == folder) for pair in runs(config, folder)]
    if first() and not (folder / "report.html").exists():
        with owned(folder, wait=True):
            write_report(folder)
    return summaries


def runs(config: ConfigDict, folder: Path) -> Iterator[tuple[ConfigDict, Path]]:
    """Yields (configuration, workdir) of the method, then of each of its baselines."""
    yield config, folder
    for method in config.baselines:
        baseline = config.copy_and_resolve_references()
        baseline.update(method=method, share="", baselines=())
        baseline.adaptations = served_of(baseline, config.adaptations)
        yield baseline, folder / "baselines" / file_name(method)


def run(
    config: ConfigDict, folder: Path, say: Callable[[str], None] = print, modules: bool = True
) -> Record:
    """Trains one method and returns its summary; a run that was stopped continues.

    The workdir's files are described in docs/workdir.md. `modules` prints a line for each module
    on what is shared, else only sums.

    Raises:
      ConfigError, WorkdirError, CheckpointError: the configuration, the data or the workdir cannot
        be used.
      NotFiniteError, RiskError: an update or a risk is not finite, and none may be left out.
      InterruptedRun: Ctrl-C, after the state was saved.
    """
    # 1. Everything that can be wrong is found here, before anything is written or compiled.
    experiment, keys, start = prepare(config)
    plan = experiment.plan
    start = start_population(experiment, start)
    promised = plan.privacy(plan.rounds)
    experiment = experiment._replace(notes=experiment.notes + privacy_notes(promised))
    about = {"data": data_hash(experiment), "form": form_of(experiment.internal)}
    about |= {"notes": list(experiment.notes), "started_in": str(Path.cwd())}
    about |= promised | starting_record(plan.start_from) | describe_machine()
    about["machine"]["mesh"] = mesh_note(experiment.mesh)
    say = say if first() else lambda line: None
    require_same("the configuration", plan.keys)
    require_same("the data", about["data"])
    by_first(lambda: claim(folder, plan.keys, about, plan.follows, write=False))

    # 2. A finished run has nothing to do, unless it is given more rounds. One that ran out of
    # patience has fewer rounds, and stays as it is.
    path = folder / "summary.json"
    summary = by_first(lambda: workdir.read_json(path, SUMMARY) if path.exists() else None)
    if summary and (summary["rounds"] >= plan.rounds or summary.get("stopped_early", False)):
        say(f"{folder} holds a finished run of {plan.method}; nothing to do.")
        return summary

    # 3. Otherwise this process (the first, if there are several) owns the folder until it ends, and
    # continues from the latest checkpoint, if there is one.
    with held_by_first(owned(folder)):
        by_first(lambda: claim(folder, plan.keys, about, plan.follows))
        if note := by_first(lambda: difference(folder, about)):
            say(note)
        state, records = resume(folder, start, experiment.mesh)
        if records:
            say(f"continuing from round {len(records)} of {plan.rounds} in {folder}")
        return _finish(experiment, keys, folder, state, records, say, modules)


def resume(
    folder: Path, start: Callable[[], FederatedState], mesh: Mesh | None = None
) -> tuple[FederatedState, list[Record]]:
    """Returns the state from which a workdir's run continues, and the records up to it.

    Records of later rounds are dropped. A damaged workdir is a WorkdirError or CheckpointError.
    """
    path = folder / "metrics.jsonl"
    recorded = by_first(lambda: workdir.rounds_recorded(path))
    state = checkpoint.latest_state(folder, start, recorded, mesh)
    records = by_first(lambda: workdir.read_lines(path, int(state.round)))
    by_first(lambda: workdir.keep_lines(path, records))
    return state, records


def _finish(
    experiment: Experiment,
    keys: Keys,
    folder: Path,
    state: FederatedState,
    records: list[Record],
    say: Callable[[str], None],
    modules: bool,
) -> Record:
    """Runs the remaining rounds, continuing from `state` and `records`, and writes the summary."""
    plan, form = experiment.plan, form_on(state, experiment.mesh)  # a round donates the state
    # 4. Print and draw what will be trained, and compile a round.
    for note in (*experiment.notes, partition_table(experiment, state, modules)):
        say(note)
    if experiment.mesh is not None:
        say(mesh_note(experiment.mesh))
    if first():
        write_data_plots(folder, experiment.internal, experiment.unseen, plan.clients_named)
    rounds = open_rounds(experiment, keys, state)
    bytes_sent = traffic(experiment.method, state, batches_of_one(experiment))
    say(rounds.note)
    say("a client and round: {down:,} bytes down, {up:,} bytes up".format(**bytes_sent))

    # 5. Train. The summary marks the run as finished: only pictures, which may fail, follow it.
    compile_seconds = 0.0
    if len(records) < plan.rounds and not out_of_patience(records, plan.patience):
        say(f"compiling a round of {plan.method}")
        began = time.perf_counter()
        round = recorded_round(rounds.compile(state), experiment)
        compile_seconds = time.perf_counter() - began
        callbacks, stop = _callbacks(experiment, folder, say, records)
        train(round, state, rounds=plan.rounds, records=records, callbacks=callbacks)
        if stop.asked:
            raise InterruptedRun(
                f"stopped after round {len(records)} of {plan.rounds}, which is saved in {folder}: "
                "give the same command to continue"
            )
    spent = plan.privacy(len(records))
    summary = summarize(experiment, records, compile_seconds, traffic=bytes_sent, **spent)
    if len(records) < plan.rounds:
        say(
            f"stopped after round {len(records)} of {plan.rounds}: the validation "
            f"{experiment.task.score.name} was best in round {summary['selected_round']} "
            f"(patience={plan.patience})"
        )
    if experiment.evaluation.eval_unseen == "once":
        selected, _ = restore_state(folder, form)
        answers: Keep = {}
        unseen_scores = unseen_evaluator(experiment)(selected, answers)
        summary["accuracy"]["unseen"] = unseen_scores.get("unseen", summary["accuracy"]["unseen"])
        if "unseen_measures" in unseen_scores:
            summary["measures"]["unseen"] = unseen_scores["unseen_measures"]
        by_first(lambda: write_answers(folder, answers, plan.predictions))
    by_first(lambda: checkpoint.delete_earlier(folder))
    by_first(lambda: workdir.write_json(folder / "summary.json", summary))
    # Pictures need all clients' models where one process can read them.
    by_client = isinstance(form, FederatedState) and jax.process_count() == 1
    if has_boxes(experiment.internal.domains[0].test.labels) and by_client:
        draw_boxes(experiment, folder, restore_state(folder, form)[0])
        with TensorBoard(folder, len(records), pictures="boxes"):
            pass
    return summary


def _callbacks(
    experiment: Experiment, folder: Path, say: Callable[[str], None], records: list[Record]
) -> tuple[tuple[Any, ...], StopRequests]:
    """Returns what happens between rounds, whose records are appended to `records`."""
    plan, rounds_played, answers = experiment.plan, len(records), {}
    names = [domain.name for domain in experiment.internal.domains]
    score_all, stop = evaluator(experiment), StopRequests()

    def evaluate(state: Any) -> Record:
        answers.clear()
        return score_all(state, have_trained(records, names), answers)

    shown: tuple[Any, ...] = ()
    if first():
        samples, score = samples_a_round(experiment), experiment.task.score.name
        progress = Progress(plan.method, plan.rounds, rounds_played, samples, score)
        shown = (TensorBoard(folder, rounds_played), progress)
    # Their order makes a kill at any moment exact, see `training.loop.train`.
    callbacks = (
        Profile(plan.profile, folder / "profile"),
        Warnings(say),
        Scores(evaluate, plan.eval_every, plan.rounds),
        Patience(plan.patience, records),
        ClientLogs(experiment, folder, records),
        Lines(folder, records, answers, plan.predictions),
        *shown,
        stop,
        Checkpoints(folder, plan.checkpoint_every, records, [e.flush for e in shown[:1]]),
    )
    return callbacks, stop


def describe_run(config: ConfigDict) -> str:
    """Returns what a configuration trains, as text; nothing is trained, compiled or written."""
    experiment, _, start = prepare(config)
    state, batches = jax.eval_shape(start), batches_of_one(experiment)
    plan, internal = experiment.plan, experiment.internal
    steps, size = batches["valid"].shape
    images = jax.eval_shape(lambda: sample_input(internal, experiment.prepare, size))
    labels = label_forms(internal.domains[0].train, (size,))
    leaves = jax.tree.leaves((images, labels))
    shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    sent, clients = traffic(experiment.method, state, batches), len(internal.domains)
    changed = [f"  {k}={plan.keys[k]}" for k, key in KEYS.items() if plan.keys[k] != key.default]
    unnamed = clients - plan.clients_named
    return "\n".join(
        (
            "keys that differ from their defaults:",
            *changed,
            f"{plan.method} on {plan.model}, {clients:,} clients of {internal.name}, "
            f"{plan.rounds} rounds",
            "samples of clients (training, validation, test):",
            *map(_samples, internal.domains[: plan.clients_named]),
            *([f"  and {unnamed:,} more"] if unnamed > 0 else []),
            *(["unseen:"] if experiment.unseen else []),
            *map(_samples, experiment.unseen),
            f"a batch: {shapes}; the largest client makes {steps} steps a round",
            # With few among many clients there is one row here: their number is the data's.
            partition_table(experiment, state).partition("\n")[2],
            f"a client and round: {sent['down']:,} bytes down, {sent['up']:,} bytes up",
            *experiment.notes,
        )
    )


def _samples(domain: Domain) -> str:
    splits = (domain.train, domain.validation, domain.test)
    counts = ("none" if split is None else str(len(split.images)) for split in splits)
    return f"  {domain.name}: {', '.join(counts)}"
