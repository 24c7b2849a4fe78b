"""The commands `train` and `config`: the runs of a configuration, each in a workdir of its own."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
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
from fedjax_bn.run.experiment.method import own_rules, served_of
from fedjax_bn.run.files.finished_run import restore_state, trained_clients
from fedjax_bn.run.files.ownership import RunFiles, owned
from fedjax_bn.sharing import nothing
from fedjax_bn.training import score_tables, workdir
from fedjax_bn.training.callbacks.checkpoints import Checkpoints, Lines
from fedjax_bn.training.callbacks.client_logs import ClientLogs
from fedjax_bn.training.callbacks.evaluation import Patience, Scores, StopRequests
from fedjax_bn.training.callbacks.profile import Profile
from fedjax_bn.training.callbacks.progress import Progress, Warnings
from fedjax_bn.training.callbacks.tensorboard import TensorBoard
from fedjax_bn.training.evaluation.answers import Keep
from fedjax_bn.training.evaluation.evaluate import batch_accuracy, evaluator, unseen_evaluator
from fedjax_bn.training.experiment import Experiment, privacy_notes
from fedjax_bn.training.loop import train
from fedjax_bn.training.mesh import form_on, mesh_note
from fedjax_bn.training.plots import draw_boxes, write_data_plots
from fedjax_bn.training.population import AnyState, start_population
from fedjax_bn.training.processes import first
from fedjax_bn.training.records import (
    Record,
    have_trained,
    out_of_patience,
    samples_a_round,
    summarize,
)
from fedjax_bn.training.rounds import Rounds, open_rounds, recorded_round
from fedjax_bn.training.start import batches_of_one, data_hash, partition_table, sample_input
from fedjax_bn.training.workdir import describe_machine


def train_all(config: ConfigDict, folder: Path, write_report: Callable[[Path], None]) -> None:
    """Trains a method and its baselines, writes reports and prints tables.

    With `target=each` it leaves out each domain in turn: `folder` has a workdir for each target,
    and a table of all of them, targets.json. `write_report` makes the plots and the page of a
    finished run's folder. Of several processes only the first one writes and prints.
    """
    say: Callable[[str], None] = print if first() else lambda text: None
    if config.target != "each":
        summaries = _train_one(config, folder, write_report)
        say(f"\n{score_tables.comparison([[row] for row in summaries])}")
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
    table = [{"method": m, "adaptation": a, **row} for (m, a), row in rows.items()]
    with owned(folder, wait=True):
        content = {"targets": list(by_target), "accuracy": table}
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
        # Unseen clients would get a mean of models that never met.
        alone = own_rules(method).get("share") == nothing.__name__
        baseline.adaptations = () if alone else served_of(baseline, config.adaptations)
        yield baseline, folder / "baselines" / file_name(method)


def run(
    config: ConfigDict, folder: Path, say: Callable[[str], None] = print, modules: bool = True
) -> Record:
    """Trains one method and returns its summary; a run that was stopped continues.

    The workdir's files are described in docs/workdir.md. `modules` prints a line for each module
    on what is shared, else only sums. What cannot be used is a ConfigError, WorkdirError or
    CheckpointError, an update or risk that is not finite and must not be left out a NotFiniteError
    or RiskError, and Ctrl-C, after the state was saved, an InterruptedRun.
    """
    # 1. Everything that can be wrong is found here, before anything is written or compiled.
    experiment, keys, start = prepare(config)
    plan, mesh = experiment.plan, experiment.mesh
    promised = plan.privacy(plan.rounds)
    experiment = experiment._replace(notes=experiment.notes + privacy_notes(promised))
    about = {"data": data_hash(experiment), "form": form_of(experiment.internal)}
    about |= {"notes": list(experiment.notes), "started_in": str(Path.cwd())}
    about |= promised | starting_record(plan.start_from) | describe_machine()
    about["machine"]["mesh"] = mesh_note(mesh)
    files = RunFiles(folder, plan, about)
    say = say if first() else lambda line: None

    # 2. A finished run has nothing to do.
    if summary := files.finished():
        say(f"{folder} holds a finished run of {plan.method}; nothing to do.")
        return summary

    # 3. Otherwise this process (the first, if there are several) owns the folder until it ends, and
    # continues from the latest checkpoint, if there is one.
    with files.continued(start_population(experiment, start), mesh, say) as (state, records):
        form = form_on(state, mesh)  # a round donates the state
        # 4. Print and draw what will be trained.
        notes = (*experiment.notes, partition_table(experiment, state, modules))
        for note in (*notes, *([] if mesh is None else [mesh_note(mesh)])):
            say(note)
        if first():
            write_data_plots(folder, experiment.internal, experiment.unseen, plan.clients_named)
        rounds = open_rounds(experiment, keys, state)
        bytes_sent = traffic(experiment.method, state, batches_of_one(experiment))
        say(rounds.note)
        say("a client and round: {down:,} bytes down, {up:,} bytes up".format(**bytes_sent))
        # 5. Train.
        compile_seconds = 0.0
        if len(records) < plan.rounds and not out_of_patience(records, plan.patience):
            compile_seconds = _train(experiment, folder, rounds, state, records, say)
        spent = plan.privacy(len(records))
        summary = summarize(experiment, records, compile_seconds, traffic=bytes_sent, **spent)
        if len(records) < plan.rounds:
            say(
                f"stopped after round {len(records)} of {plan.rounds}: the validation "
                f"{experiment.task.score.name} was best in round {summary['selected_round']} "
                f"(patience={plan.patience})"
            )
        # The summary marks the run as finished: only pictures, which may fail, follow it.
        _finish(experiment, files, form, summary)
        return summary


def _finish(experiment: Experiment, files: RunFiles, form: AnyState, summary: Record) -> None:
    """Tests the selected round in the ways that are left for the end, and ends the run."""
    answers: Keep = {}
    selected, number = restore_state(files.folder, form)
    names = [domain.name for domain in experiment.internal.domains]
    trained = trained_clients(files.folder, names, number)
    if scores := batch_accuracy(experiment, selected, trained):
        summary["batch_statistics"] = scores
    if "unseen" not in experiment.evaluation.eval_also:
        unseen_scores = unseen_evaluator(experiment)(selected, answers)
        summary["accuracy"]["unseen"] = unseen_scores.get("unseen", summary["accuracy"]["unseen"])
        if "unseen_measures" in unseen_scores:
            summary["measures"]["unseen"] = unseen_scores["unseen_measures"]
    files.finish(summary, answers)
    # Pictures need all clients' models where one process can read them.
    by_client = isinstance(form, FederatedState) and jax.process_count() == 1
    if has_boxes(experiment.internal.domains[0].test.labels) and by_client:
        draw_boxes(experiment, files.folder, selected)
        with TensorBoard(files.folder, summary["rounds"], pictures="boxes"):
            pass


def _train(
    experiment: Experiment,
    folder: Path,
    rounds: Rounds,
    state: AnyState,
    records: list[Record],
    say: Callable[[str], None],
) -> float:
    """Compiles and runs the rounds that are left; appends to `records`, returns compile seconds."""
    plan, answers = experiment.plan, {}
    say(f"compiling a round of {plan.method}")
    began = time.perf_counter()
    round = recorded_round(rounds.compile(state), experiment)
    compile_seconds = time.perf_counter() - began
    names = [domain.name for domain in experiment.internal.domains]
    score_all, stop = evaluator(experiment), StopRequests()

    def evaluate(state: AnyState) -> Record:
        answers.clear()
        return score_all(state, have_trained(records, names), answers)

    shown: tuple[Any, ...] = ()
    if first():
        samples, score = samples_a_round(experiment), experiment.task.score.name
        progress = Progress(plan.method, plan.rounds, len(records), samples, score)
        shown = (TensorBoard(folder, len(records)), progress)
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
    train(round, state, rounds=plan.rounds, records=records, callbacks=callbacks)
    if stop.asked:
        fact = f"stopped after round {len(records)} of {plan.rounds}, which is saved in {folder}"
        raise InterruptedRun(f"{fact}: give the same command to continue")
    return compile_seconds


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
