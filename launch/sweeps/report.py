"""From finished runs to a paper's tables, in Markdown, beside the published numbers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plan import Cell, Run, Sweep, Table, finished, runs_of

from fedjax_bn.run.workdir import write_atomically

UNSEEN = "unseen"  # in place of a domain: the mean over all unseen ones, by seed


def write_report(sweep: Sweep, workdir: Path) -> Path:
    """Writes WORKDIR/report.md and WORKDIR/figures/*.png from what has finished.

    Returns:
      The path of report.md.
    """
    runs = {run.name: run for run in sweep.runs}
    done = {name: read_summary(workdir, name) for name in runs if finished(workdir, name)}
    parts = [f"# {sweep.paper}: measured beside published", overview(sweep.runs, done)]
    for table in sweep.tables():
        parts.append(f"## {table.title}\n\n{table_text(table, done)}\n\n{notes(table, done, runs)}")
    for figure in sweep.figures():
        image = figure.draw(workdir)
        if image is not None:
            write_atomically(workdir / "figures" / f"{figure.name}.png", image)
        shown = f"![{figure.title}](figures/{figure.name}.png)" if image is not None else ""
        parts.append(f"## {figure.title}\n\n{shown}\n\n{missing(runs_of(figure), done)}")
    path = workdir / "report.md"
    write_atomically(path, "\n\n".join(part.strip() for part in parts) + "\n")
    return path


def read_summary(workdir: Path, name: str) -> dict[str, Any]:
    """The summary.json of a finished run."""
    return json.loads((workdir / name / "summary.json").read_text())


def overview(runs: Sequence[Run], done: dict[str, Any]) -> str:
    """How much of the sweep has finished."""
    return (
        f"{len(done)} of {len(runs)} runs have finished. Accuracies in percent, mean (standard "
        "deviation) over seeds; a dash where nothing is known."
    )


def accuracy(summary: dict[str, Any], domain: str, adaptation: str) -> float | None:
    """Accuracy in percent of a domain in a run's selected round, None where it has none.

    Args:
      summary: of summary.json.
      domain: a client; if the domain has several ("mnist/0", "mnist/1"), their mean; else an
        unseen domain; "unseen" for the mean of all unseen domains.
      adaptation: how the unseen domain was served.
    """
    if domain == UNSEEN:
        values = [row[adaptation] for row in summary["accuracy"]["unseen"].values()]
        return float(np.mean(values)) if values else None
    internal = summary["accuracy"]["internal"]
    values = [v for name, v in internal.items() if name.partition("/")[0] == domain]
    if values:
        return float(np.mean(values))
    return summary["accuracy"]["unseen"].get(domain, {}).get(adaptation)


def measured(cell: Cell, done: dict[str, Any]) -> tuple[float, float | None] | None:
    """Mean and standard deviation (of one run: None) over the finished runs of a cell."""
    found = {n: accuracy(done[n], cell.domain, cell.adaptation) for n in cell.runs if n in done}
    values = [value for value in found.values() if value is not None]
    if cell.domain == UNSEEN:
        values = means_by_seed(cell.runs, found)
    if not values:
        return None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def means_by_seed(names: Sequence[str], found: dict[str, float | None]) -> list[float]:
    """The mean over the runs of a seed, one a target; of seeds whose runs have all finished."""
    seeds: dict[str, list[str]] = {}
    for name in names:
        seeds.setdefault(name.rpartition("/")[2], []).append(name)
    groups = [[found.get(name) for name in group] for group in seeds.values()]
    return [float(np.mean(values)) for values in groups if None not in values]


def table_text(table: Table, done: dict[str, Any]) -> str:
    """The table in Markdown: two lines a row, measured and published, without empty columns."""
    lines = []
    for label, cells in table.rows.items():
        ours = [measured(cell, done) if cell else None for cell in cells]
        names = {name for cell in cells if cell for name in cell.runs}
        count = f"{len(names & done.keys())} of {len(names)} runs"
        lines.append(([label, f"measured, {count}"], ours))
        lines.append((["", "published"], [cell.published if cell else None for cell in cells]))
    used = [i for i in range(len(table.columns)) if any(values[i] for _, values in lines)]
    heads = ["", "", *(table.columns[i] for i in used)]
    rows = [[*label, *(number(values[i]) for i in used)] for label, values in lines]
    rule = ["---", "---", *("---:" for _ in used)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))


def number(value: tuple[float, float | None] | None) -> str:
    """`71.04 (0.31)`."""
    if value is None:
        return "-"
    mean, std = value
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ({std:.2f})"


def notes(table: Table, done: dict[str, Any], runs: dict[str, Run]) -> str:
    """Which runs are missing, and which were shorter or longer than described."""
    names = runs_of(table)
    said = [missing(names, done)]
    rounds = sorted({done[name]["rounds"] for name in names if name in done})
    if rounds:
        said.append(f"Rounds of the finished runs: {', '.join(map(str, rounds))}.")
    return " ".join(filter(None, said))


def missing(names: Sequence[str], done: dict[str, Any]) -> str:
    """A sentence on the runs that have not finished, by folder; empty where all have."""
    left: dict[str, list[str]] = {}
    for name in names:
        if name not in done:
            folder, _, seed = name.rpartition("/")
            left.setdefault(folder, []).append(seed)
    runs = [f"{folder}/{{{','.join(seeds)}}}" for folder, seeds in left.items()]
    return f"Missing: {', '.join(runs)}." if left else ""
