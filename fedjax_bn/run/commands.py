"""Runs the commands `train`, for one target or for each in turn, `config` and `evaluate`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from fedjax_bn.arguments.text import file_name, shown
from fedjax_bn.data.domain import Domain
from fedjax_bn.data.sampling import label_forms
from fedjax_bn.federation import traffic
from fedjax_bn.run import finished_run as evaluate_finished
from fedjax_bn.run import train
from fedjax_bn.run.config.defaults import KEYS
from fedjax_bn.run.experiment.build import prepare
from fedjax_bn.run.experiment.datasets import domain_names
from fedjax_bn.run.experiment.method import served_of
from fedjax_bn.run.files.ownership import owned
from fedjax_bn.training import score_tables, workdir
from fedjax_bn.training.start import batches_of_one, partition_table, sample_input
from fedjax_bn.training.together import first
from fedjax_bn.training.workdir import Record


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
    score = score_tables.score_of(next(iter(by_target.values()))[0])
    say(f"\n{score_tables.accuracies(named, f'unseen, {score} %')}")
    say(f"\ntargets.json and a folder a target are in {folder}")


def _train_one(
    config: ConfigDict, folder: Path, write_report: Callable[[Path], None]
) -> list[Record]:
    """Trains the method and its baselines for one target; returns their summaries."""
    # Baselines have the same modules, so for them only sums over leaves are printed.
    summaries = [
        train.run(method_config, place, modules=place == folder)
        for method_config, place in runs(config, folder)
    ]
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
    unseen = ["unseen:", *map(_samples, experiment.unseen)] if experiment.unseen else []
    unnamed = clients - plan.clients_named
    lines = (
        "keys that differ from their defaults:",
        *changed,
        f"{plan.method} on {plan.model}, {clients:,} clients of {internal.name}, "
        f"{plan.rounds} rounds",
        "samples of clients (training, validation, test):",
        *map(_samples, internal.domains[: plan.clients_named]),
        *([f"  and {unnamed:,} more"] if unnamed > 0 else []),
        *unseen,
        f"a batch: {shapes}; the largest client makes {steps} steps a round",
        # A run of few among many clients has one row here: the number of clients is the data's.
        partition_table(experiment, state).partition("\n")[2],
        f"a client and round: {sent['down']:,} bytes down, {sent['up']:,} bytes up",
        *experiment.notes,
    )
    return "\n".join(lines)


def _samples(domain: Domain) -> str:
    splits = (domain.train, domain.validation, domain.test)
    counts = ("none" if split is None else str(len(split.images)) for split in splits)
    return f"  {domain.name}: {', '.join(counts)}"


def evaluate(folder: Path, request: evaluate_finished.Request) -> None:
    """Tests a finished run without training, and prints its scores and the files written."""
    result, files = evaluate_finished.run(folder, request)
    part, score = score_tables.part_tested(result), score_tables.score_of(result)
    tested = "" if part == "test" else f"{part} "
    measures = result.get("measures", {"internal": {}, "unseen": {}})
    tables = [
        (_transposed(result["unseen"]), f"unseen, {score} %"),
        (result["internal"], f"internal, {tested}{score} %"),
    ]
    whose = f"internal, own{tested and f' ({part})'}"
    of_measures = [(rows, f"unseen, {domain}") for domain, rows in measures["unseen"].items()]
    of_measures += [(_transposed(measures["internal"]), whose)]
    tables += [(*table, score_tables.OF_MEASURES) for table in of_measures]
    for rows, *words in tables:
        if rows:
            print(f"\n{score_tables.accuracies(rows, *words)}")
    print(f"\nround {result['round']}; written: {', '.join(map(str, files))}")


def _transposed(rows: Record) -> Record:
    """Returns {column: {row: value}} of {row: {column: value}}."""
    columns = next(iter(rows.values()), {})
    return {column: {name: row[column] for name, row in rows.items()} for column in columns}
