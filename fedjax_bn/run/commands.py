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
from fedjax_bn.run.config.defaults import keys
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
    if config.target != "each":
        summaries = _train_one(config, folder, write_report)
        if first():
            print(f"\n{score_tables.comparison(summaries)}")
            print(f"\nsummary.json, plots and report.html are in {folder}")
        return
    by_target = {}
    for target in domain_names(config):
        target_config = config.copy_and_resolve_references()
        target_config.target = target
        if first():
            print(f"\ntarget {shown(target)}")
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
    print(f"\n{score_tables.accuracies(named, f'unseen, {score} %')}")
    print(f"\ntargets.json and a folder a target are in {folder}")


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
    sent = traffic(experiment.method, state, batches)
    changed = [
        (name, plan.keys[name]) for name in keys() if plan.keys[name] != keys()[name].default
    ]
    named = internal.domains[: plan.clients_named]
    lines = ["keys that differ from their defaults:"]
    lines += [f"  {name}={value}" for name, value in changed]
    lines += [
        f"{plan.method} on {plan.model}, {len(internal.domains):,} clients of {internal.name}, "
        f"{plan.rounds} rounds",
        "samples of clients (training, validation, test):",
        *map(_samples, named),
    ]
    if len(named) < len(internal.domains):
        lines.append(f"  and {len(internal.domains) - len(named):,} more")
    if experiment.unseen:
        lines += ["unseen:", *map(_samples, experiment.unseen)]
    lines += [
        f"a batch: {shapes}; the largest client makes {steps} steps a round",
        # A run of few among many clients has one row here: the number of clients is the data's.
        partition_table(experiment, state).partition("\n")[2],
        f"a client and round: {sent['down']:,} bytes down, {sent['up']:,} bytes up",
        *experiment.notes,
    ]
    return "\n".join(lines)


def _samples(domain: Domain) -> str:
    splits = (domain.train, domain.validation, domain.test)
    counts = ("none" if split is None else str(len(split.images)) for split in splits)
    return f"  {domain.name}: {', '.join(counts)}"


def evaluate(folder: Path, request: evaluate_finished.Request) -> None:
    """Tests a finished run without training, and prints its scores and the files written."""
    result, files = evaluate_finished.run(folder, request)
    part, score = score_tables.part_tested(result), result.get("score", "accuracy")
    tested = "" if part == "test" else f"{part} "
    tables = {
        f"unseen, {score} %": _transposed(result["unseen"]),
        f"internal, {tested}{score} %": result["internal"],
    }
    for title, rows in tables.items():
        if rows:
            print(f"\n{score_tables.accuracies(rows, title)}")
    measures = result.get("measures", {"internal": {}, "unseen": {}})
    tables = {f"unseen, {domain}": rows for domain, rows in measures["unseen"].items()}
    tables[f"internal, own{tested and f' ({part})'}"] = _transposed(measures["internal"])
    for title, rows in tables.items():
        if rows:
            print(f"\n{score_tables.accuracies(rows, title, score_tables.OF_MEASURES)}")
    print(f"\nround {result['round']}; written: {', '.join(map(str, files))}")


def _transposed(rows: Record) -> Record:
    """Returns {column: {row: value}} of {row: {column: value}}."""
    columns = next(iter(rows.values()), {})
    return {column: {name: row[column] for name, row in rows.items()} for column in columns}
