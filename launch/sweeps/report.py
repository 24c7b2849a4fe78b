"""Writes a paper's tables from finished runs, in Markdown, beside the published numbers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from plan import UNSEEN, Cell, Run, Sweep, Table, by_folder, configuration, finished, text

from fedjax_bn.report.runs import EQUALS_FEDAVG, has_equal_steps, other_samples
from fedjax_bn.run.config import flatten
from fedjax_bn.training.workdir import write_atomically

# Keys on which no number depends: those of the machine, of checkpoints and of output.
APART = (
    *("data.path", "data.cache", "data.device_megabytes", "baselines", "adaptations", "clients"),
    *("checkpoint_every", "eval_batch_size", "seed"),
)
Results = Mapping[str, Mapping[str, Any]]  # finished run -> `read_results`
Apart = Mapping[str, Sequence[str]]  # run -> its differences from the plan


def write_report(sweep: Sweep, workdir: Path) -> Path:
    """Writes WORKDIR/report.md and WORKDIR/figures/*.png from finished runs.

    Returns:
      The path of report.md.
    """
    runs = sweep.runs
    done = {run.name: read_results(workdir, run) for run in runs if finished(workdir, run.name)}
    apart = {run.name: differences(workdir, run) for run in runs if run.name in done}
    parts = [
        f"# {sweep.paper}: measured beside published",
        f"{len(done)} of {len(runs)} runs have finished. Scores in percent, mean (standard "
        "deviation) over seeds; a dash where nothing is known. [1] marks numbers whose runs differ "
        "from the plan; the sweep's file states where the plan differs from the paper.",
    ]
    for table in sweep.tables:
        shown = table_text(table, done, apart)
        parts.append(f"## {table.title}\n\n{shown}\n\n{notes(table, done, apart)}")
    for figure in sweep.figures:
        image = figure.draw(workdir)
        if image is not None:
            write_atomically(workdir / "figures" / f"{figure.name}.png", image)
        shown = f"![{figure.title}](figures/{figure.name}.png)" if image is not None else ""
        names = [run.name for run in figure.runs]
        ends = filter(None, (missing(names, done), legend(marks_of(names, apart))))
        parts.append(f"## {figure.title}\n\n{shown}\n\n" + "\n\n".join(ends))
    path = workdir / "report.md"
    write_atomically(path, "\n\n".join(part.strip() for part in parts) + "\n")
    return path


def read_results(workdir: Path, run: Run) -> dict[str, Any]:
    """Returns a run's summary and evaluations, and the clients' validation accuracy.

    Returns:
      {"summary": content of summary.json, "validation": see `selected_validation`, "fedavg": see
      `equals_fedavg`}, and name -> content of each evaluation that exists.
    """
    folder = workdir / run.name
    summary = json.loads((folder / "summary.json").read_text())
    results = {"summary": summary, "validation": selected_validation(folder, summary)}
    results["fedavg"] = equals_fedavg(folder)
    for evaluation in run.tests:
        path = folder / "evaluations" / f"{evaluation.name}.json"
        if path.exists():
            results[evaluation.name] = json.loads(path.read_text())
    return results


def equals_fedavg(folder: Path) -> bool:
    """Returns whether a run is of FedNova with equal steps of all clients, which is FedAvg."""
    paths = [folder / "config.json", folder / "data.json"]
    if not all(path.exists() for path in paths):
        return False
    config, data = (json.loads(path.read_text()) for path in paths)
    config = config["config"]
    return config.get("method") == "fednova" and has_equal_steps(config, data)


def selected_validation(folder: Path, summary: Mapping[str, Any]) -> float | None:
    """Returns the clients' mean validation accuracy in the selected round; None if unknown."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return None
    lines = path.read_text().splitlines()[: summary.get("selected_round", 0)]
    return json.loads(lines[-1]).get("validation", {}).get("mean") if lines else None


def value(results: Mapping[str, Any], cell: Cell) -> float | None:
    """Returns a cell's accuracy in percent in one run; None if the run does not have it."""
    if not cell.test:
        return accuracy(results["summary"], cell.domain, cell.adaptation)
    found = results.get(cell.test)
    if found is None:
        return None
    inside = found["internal"].get(cell.adaptation, {})
    if inside:
        return _of_clients(inside, cell.domain)
    return _outside(found["unseen"], cell.domain, cell.adaptation)


def accuracy(summary: Mapping[str, Any], domain: str, adaptation: str) -> float | None:
    """Returns a domain's accuracy in percent in a run's selected round; None if unknown.

    Args:
      domain: a client; a domain with several clients ("mnist/0", "mnist/1"), whose mean is
        returned; an unseen domain; `MEAN` or `UNSEEN`.
      adaptation: the adaptation on unseen domains.
    """
    inside = _of_clients(summary["accuracy"]["internal"], domain)
    if inside is not None:
        return inside
    return _outside(summary["accuracy"]["unseen"], domain, adaptation)


def _of_clients(accuracies: Mapping[str, float], domain: str) -> float | None:
    values = [v for name, v in accuracies.items() if name.partition("/")[0] == domain]
    return float(np.mean(values)) if values else None


def _outside(unseen: Mapping[str, Any], domain: str, adaptation: str) -> float | None:
    rows = unseen.values() if domain == UNSEEN else [unseen.get(domain, {})]
    values = [row.get(adaptation) for row in rows]
    return float(np.mean(values)) if values and None not in values else None


def chosen(part: tuple[tuple[str, ...], ...], done: Results) -> tuple[str, ...]:
    """Returns the alternative of a target with the best mean validation accuracy over seeds."""

    def mean(names: tuple[str, ...]) -> float:
        known = [done[name]["validation"] for name in names if name in done]
        known = [accuracy for accuracy in known if accuracy is not None]
        return float(np.mean(known)) if known else -np.inf

    return part[0] if len(part) == 1 else max(part, key=mean)


def measured(cell: Cell, done: Results) -> tuple[float, float | None] | None:
    """Returns mean and standard deviation (None for one seed) over seeds of the mean over targets.

    Seeds that lack a target do not count.
    """
    by_seed = []
    for names in zip(*(chosen(part, done) for part in cell.parts), strict=True):
        found = [value(done[name], cell) if name in done else None for name in names]
        if None not in found:
            by_seed.append(np.mean(found))
    if not by_seed:
        return None
    return float(np.mean(by_seed)), float(np.std(by_seed, ddof=1)) if len(by_seed) > 1 else None


def printed(cell: Cell) -> tuple[float, float | None] | None:
    """Returns the published mean and standard deviation; of several numbers only their mean."""
    if not cell.published:
        return None
    std = cell.published[0].std if len(cell.published) == 1 else None
    return float(np.mean([number.mean for number in cell.published])), std


def table_text(table: Table, done: Results, apart: Apart) -> str:
    """Returns the table in Markdown: measured and published numbers, without empty columns."""
    marks, lines = marks_of((run.name for run in table.runs), apart), []

    def ours(cell: Cell | None) -> str:
        """Returns the measured number, followed by the marks of its runs' differences."""
        found = cell and measured(cell, done)
        if not found:
            return ""
        used = marks_of((name for name in cell.runs if name in done), apart)
        numbers = ",".join(sorted((marks[difference] for difference in used), key=int))
        return number(found) + (f" [{numbers}]" if numbers else "")

    for label, cells in table.rows.items():
        names = {name for cell in cells if cell for name in cell.runs}
        count = f"measured, {len(names & done.keys())} of {len(names)} runs"
        why = next((cell.missing for cell in cells if cell and cell.missing), "")
        lines.append(([label, f"none: {why}" if why else count], [*map(ours, cells)]))
        theirs = [number(printed(cell)) if cell and cell.published else "" for cell in cells]
        if any(theirs):
            lines.append((["", "published"], theirs))
    used = [i for i in range(len(table.columns)) if any(values[i] for _, values in lines)]
    heads = ["", "", *(table.columns[i] for i in used)]
    rows = [[*label, *(values[i] or "-" for i in used)] for label, values in lines]
    rule = ["---", "---", *("---:" for _ in used)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))


def number(value: tuple[float, float | None]) -> str:
    """Returns a number as text, such as `71.04 (0.31)`, mean and standard deviation."""
    mean, std = value
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ({std:.2f})"


def notes(table: Table, done: Results, apart: Apart) -> str:
    """Returns notes on missing and differing runs, on FedNova, on validation, and on misprints."""
    names = [run.name for run in table.runs]
    found = [missing(names, done), legend(marks_of(names, apart))]
    equal = []
    for label, cells in table.rows.items():
        rows_runs = (name for cell in cells if cell for name in cell.runs)
        if any(done[name].get("fedavg") for name in rows_runs if name in done):
            equal.append(label)
    if equal:
        found.append(f"{', '.join(equal)}: {EQUALS_FEDAVG}, whatever the paper prints.")
    for label, cells in table.rows.items():
        parts = dict.fromkeys(part for cell in cells if cell for part in cell.parts)
        best = [chosen(part, done) for part in parts if len(part) > 1]
        best = [names[0].rpartition("/")[0] for names in best if done.keys() & set(names)]
        if best:
            found.append(f"{label}: by validation {', '.join(best)}.")
    return "\n\n".join([*filter(None, found), *oddities(table)])


def oddities(table: Table) -> Iterable[str]:
    """Yields sentences on published averages that differ from the mean of their row."""
    for label, cells in table.rows.items():
        # a cell with several published numbers shows our mean of them: not a printed number
        found = [c.published[0] for c in cells if c and len(c.published) == 1]
        averages = [number for number in found if number.column == "Avg"]
        others = [number.mean for number in found if number.column != "Avg"]
        # each number and the average are rounded to two decimals: up to 0.01 is not an error
        if averages and len(others) > 1 and abs(averages[0].mean - np.mean(others)) > 0.0151:
            yield (
                f"{label}: the published numbers average {np.mean(others):.2f}, the paper prints "
                f"{averages[0].mean:.2f}."
            )


def missing(names: Sequence[str], done: Results) -> str:
    """Returns which runs have not finished."""
    left = by_folder(name for name in dict.fromkeys(names) if name not in done)
    return f"Missing: {left}." if left else ""


def differences(workdir: Path, run: Run) -> tuple[str, ...]:
    """Returns the differences of a finished run from the plan: "model is X (planned: Y)".

    For a file that the user supplies, such as weights, only its presence counts.
    """
    folder = workdir / run.name
    if not (folder / "config.json").exists():
        return ()
    theirs = json.loads((folder / "config.json").read_text())["config"]
    changes = {key: value for key, value in run.changes.items() if key != "seed"}
    supplied = dict.fromkeys(run.needs, "PATH")
    planned = _planned(run.config, tuple((changes | supplied).items()))
    found = []
    for key in sorted(planned.keys() & theirs.keys() - set(APART)):
        # JSON stores tuples as lists
        values = (planned[key], theirs[key])
        ours, given = (list(one) if isinstance(one, tuple) else one for one in values)
        if key in run.needs:
            if not given:
                found.append(f"{key} is empty (planned: --data.{run.needs[key]})")
        elif ours != given:
            ours, given = ("empty" if one == "" else text(one) for one in (ours, given))
            found.append(f"{key} is {given} (planned: {ours})")
    path = folder / "data.json"
    if run.samples and path.exists():
        counts = other_samples(json.loads(path.read_text()), run.samples)
        each = [f"{name} {count} (planned: {run.samples[name]})" for name, count in counts.items()]
        if each:
            found.append(f"training samples of a client: {', '.join(each)}")
    return tuple(found)


@cache  # reading a config file takes 50 ms, and thousands of runs share a few
def _planned(config: str, changes: tuple[tuple[str, object], ...]) -> Mapping[str, object]:
    """Returns the planned configuration, dotted key -> value."""
    return dict(flatten(configuration(config, dict(changes))))


def marks_of(names: Iterable[str], apart: Apart) -> dict[str, str]:
    """Returns difference from the plan -> number, for some runs."""
    marks: dict[str, str] = {}
    for difference in (one for name in names for one in apart.get(name, ())):
        marks.setdefault(difference, str(len(marks) + 1))
    return marks


def legend(marks: Mapping[str, str]) -> str:
    """Returns the meaning of the marks as text; "" if there is none."""
    each = "; ".join(f"[{mark}] {difference}" for difference, mark in marks.items())
    return f"Differs from the plan: {each}." if each else ""
