"""Runs the commands `train`, for one target or for each in turn, and `evaluate`."""

from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from fedjax_bn.arguments.text import file_name, shown
from fedjax_bn.report import tables
from fedjax_bn.report.page import write_data_plots, write_report
from fedjax_bn.report.plots import masked_features
from fedjax_bn.run import finished_run as evaluate_finished
from fedjax_bn.run import train
from fedjax_bn.run.experiment.datasets import domain_names
from fedjax_bn.run.experiment.method import served_of
from fedjax_bn.run.files.ownership import owned
from fedjax_bn.training import workdir
from fedjax_bn.training.together import first
from fedjax_bn.training.workdir import Record

PLOTS = train.Plots(write_data_plots, masked_features)


def train_all(config: ConfigDict, folder: Path) -> None:
    """Trains, writes reports and prints tables; `target=each` leaves out each domain in turn.

    With `target=each`, `folder` has one workdir for each target, and a table of all targets,
    targets.json. If there are several processes, only the first one writes and prints.
    """
    if config.target != "each":
        summaries = _train_one(config, folder)
        if first():
            print(f"\n{tables.comparison(summaries)}")
            print(f"\nsummary.json, plots and report.html are in {folder}")
        return
    by_target = {}
    for target in domain_names(config):
        one = config.copy_and_resolve_references()
        one.target = target
        if first():
            print(f"\ntarget {shown(target)}")
        by_target[target] = _train_one(one, folder / file_name(target))
    if not first():
        return
    rows = tables.by_target(by_target)
    content = {
        "targets": list(by_target),
        "accuracy": [{"method": m, "adaptation": a, **row} for (m, a), row in rows.items()],
    }
    with owned(folder, wait=True):
        workdir.write_json(folder / "targets.json", content)
    named = {tables.heading(key): row for key, row in rows.items()}
    score = tables.score_of(next(iter(by_target.values()))[0])
    print(f"\n{tables.accuracies(named, f'unseen, {score} %')}")
    print(f"\ntargets.json and a folder a target are in {folder}")


def _train_one(config: ConfigDict, folder: Path) -> list[Record]:
    """Trains the method and its baselines for one target; returns their summaries."""
    # Baselines have the same modules, so for them only sums over leaves are printed.
    summaries = [
        train.run(one, place, modules=place == folder, plots=PLOTS)
        for one, place in runs(config, folder)
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


def evaluate(folder: Path, request: evaluate_finished.Request) -> None:
    """Tests a finished run without training, and prints its scores and the files written."""
    result, files = evaluate_finished.run(folder, request)
    texts = dict.fromkeys(text for row in result["unseen"].values() for text in row)
    outside = {text: {d: row[text] for d, row in result["unseen"].items()} for text in texts}
    part, score = tables.part_tested(result), tables.score_of(result)
    tested = "" if part == "test" else f"{part} "
    for rows, title in ((outside, "unseen, "), (result["internal"], f"internal, {tested}")):
        if rows:
            print(f"\n{tables.accuracies(rows, f'{title}{score} %')}")
    measures = result.get("measures", {"internal": {}, "unseen": {}})
    for domain, rows in measures["unseen"].items():
        print(f"\n{tables.accuracies(rows, f'unseen, {domain}', tables.OF_MEASURES)}")
    if inside := measures["internal"]:
        names = next(iter(inside.values()))
        clients = {c: {name: row[c] for name, row in inside.items()} for c in names}
        title = f"internal, own{tested and f' ({part})'}"
        print(f"\n{tables.accuracies(clients, title, tables.OF_MEASURES)}")
    print(f"\nround {result['round']}; written: {', '.join(map(str, files))}")
