"""From finished runs to a paper's tables, in Markdown, beside the published numbers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from differences import differences, legend, letters
from plan import UNSEEN, Cell, Run, Sweep, Table, all_runs, by_folder, finished

from fedjax_bn.run.files.workdir import write_atomically

Results = Mapping[str, Mapping[str, Any]]  # of finished runs, see `read_results`
Apart = Mapping[str, Sequence[str]]  # run -> its differences from the plan


def write_report(sweep: Sweep, workdir: Path) -> Path:
    """Writes WORKDIR/report.md and WORKDIR/figures/*.png from what has finished.

    Returns:
      The path of report.md.
    """
    runs = all_runs(sweep.parts)
    done = {run.name: read_results(workdir, run) for run in runs if finished(workdir, run.name)}
    apart = {run.name: differences(workdir, run) for run in runs if run.name in done}
    parts = [f"# {sweep.paper}: measured beside published", overview(runs, done)]
    for table in sweep.tables:
        shown = table_text(table, done, apart)
        parts.append(f"## {table.title}\n\n{shown}\n\n{notes(table, done, apart)}")
    for figure in sweep.figures:
        image = figure.draw(workdir)
        if image is not None:
            write_atomically(workdir / "figures" / f"{figure.name}.png", image)
        shown = f"![{figure.title}](figures/{figure.name}.png)" if image is not None else ""
        names = [run.name for run in figure.runs]
        said = filter(None, (missing(names, done), legend(marks_of(names, apart))))
        parts.append(f"## {figure.title}\n\n{shown}\n\n" + "\n\n".join(said))
    path = workdir / "report.md"
    write_atomically(path, "\n\n".join(part.strip() for part in parts) + "\n")
    return path


def read_summary(workdir: Path, name: str) -> dict[str, Any]:
    """The summary.json of a finished run."""
    return json.loads((workdir / name / "summary.json").read_text())


def read_results(workdir: Path, run: Run) -> dict[str, Any]:
    """What a run's summary and evaluations say, and the clients' validation accuracy.

    Returns:
      "summary": its content; "validation": percent at the selected round, None where there is
      none; and name -> content of each evaluation that is there.
    """
    folder = workdir / run.name
    summary = read_summary(workdir, run.name)
    results = {"summary": summary, "validation": selected_validation(folder, summary)}
    for evaluation in run.tests:
        path = folder / "evaluations" / f"{evaluation.name}.json"
        if path.exists():
            results[evaluation.name] = json.loads(path.read_text())
    return results


def selected_validation(folder: Path, summary: Mapping[str, Any]) -> float | None:
    """The clients' mean validation accuracy in the selected round of a run; None: not known."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return None
    lines = path.read_text().splitlines()[: summary.get("selected_round", 0)]
    return json.loads(lines[-1]).get("validation", {}).get("mean") if lines else None


def overview(runs: Sequence[Run], done: Results) -> str:
    """How much of the sweep has finished."""
    return (
        f"{len(done)} of {len(runs)} runs have finished. Accuracies in percent, mean (standard "
        "deviation) over seeds; a dash where nothing is known. A letter marks numbers whose runs "
        "differ from the plan; the sweep's file says where the plan differs from the paper."
    )


def value(results: Mapping[str, Any], cell: Cell) -> float | None:
    """Accuracy in percent of a cell's domain in one run, None where the run does not know it."""
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
    """Accuracy in percent of a domain in a run's selected round, None where it has none.

    Args:
      summary: of summary.json.
      domain: a client; if the domain has several ("mnist/0", "mnist/1"), their mean; else an
        unseen domain; or `MEAN`, `UNSEEN`.
      adaptation: how the unseen domain was served.
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
    """Of a target's alternatives the one with the best mean validation accuracy."""
    if len(part) == 1:
        return part[0]

    def mean(names: tuple[str, ...]) -> float:
        known = [done[name]["validation"] for name in names if name in done]
        known = [accuracy for accuracy in known if accuracy is not None]
        return float(np.mean(known)) if known else -np.inf

    return max(part, key=mean)


def measured(cell: Cell, done: Results) -> tuple[float, float | None] | None:
    """Mean and standard deviation (of one seed: None) over seeds, each a mean over targets.

    Seeds of which a target is missing do not count.
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
    """The published mean and standard deviation; of several numbers their mean."""
    if not cell.published:
        return None
    std = cell.published[0].std if len(cell.published) == 1 else None
    return float(np.mean([number.mean for number in cell.published])), std


def marks_of(names: Iterable[str], apart: Apart) -> dict[str, str]:
    """A letter for each way in which some runs differ from the plan."""
    return letters(difference for name in names for difference in apart.get(name, ()))


def table_text(table: Table, done: Results, apart: Apart) -> str:
    """The table in Markdown: a row's measured and published numbers, without empty columns."""
    marks, lines = marks_of((run.name for run in table.runs), apart), []
    for label, cells in table.rows.items():
        names = {name for cell in cells if cell for name in cell.runs}
        count = f"measured, {len(names & done.keys())} of {len(names)} runs"
        why = next((cell.missing for cell in cells if cell and cell.missing), "")
        shown = [cell_text(cell, done, apart, marks) if cell else "" for cell in cells]
        lines.append(([label, f"none: {why}" if why else count], shown))
        theirs = [number(printed(cell)) if cell and cell.published else "" for cell in cells]
        if any(theirs):
            lines.append((["", "published"], theirs))
    used = [i for i in range(len(table.columns)) if any(values[i] for _, values in lines)]
    heads = ["", "", *(table.columns[i] for i in used)]
    rows = [[*label, *(values[i] or "-" for i in used)] for label, values in lines]
    rule = ["---", "---", *("---:" for _ in used)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))


def cell_text(cell: Cell, done: Results, apart: Apart, marks: Mapping[str, str]) -> str:
    """The measured number, and the letters of its runs' differences behind it."""
    found = measured(cell, done)
    if not found:
        return ""
    used = sorted(marks_of((name for name in cell.runs if name in done), apart))
    behind = "".join(sorted(marks[difference] for difference in used))
    return f"{number(found)} [{behind}]" if behind else number(found)


def number(value: tuple[float, float | None] | None) -> str:
    """`71.04 (0.31)`; a dash for None."""
    if value is None:
        return "-"
    mean, std = value
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ({std:.2f})"


def notes(table: Table, done: Results, apart: Apart) -> str:
    """Which runs are missing, which differ, what validation chose, and oddities in print."""
    names = [run.name for run in table.runs]
    said = [missing(names, done), legend(marks_of(names, apart)), *choices(table, done)]
    return "\n\n".join([*filter(None, said), *oddities(table)])


def choices(table: Table, done: Results) -> Iterable[str]:
    """Sentences on which alternatives validation chose."""
    for label, cells in table.rows.items():
        parts = dict.fromkeys(part for cell in cells if cell for part in cell.parts)
        best = [chosen(part, done) for part in parts if len(part) > 1]
        best = [names[0].rpartition("/")[0] for names in best if done.keys() & set(names)]
        if best:
            yield f"{label}: by validation {', '.join(best)}."


def oddities(table: Table) -> Iterable[str]:
    """Sentences on published averages that are not those of their row."""
    for label, cells in table.rows.items():
        found = [c.published[0] for c in cells if c and len(c.published) == 1]
        averages = [number for number in found if number.column == "Avg"]
        others = [number.mean for number in found if number.column != "Avg"]
        if averages and len(others) > 1 and abs(averages[0].mean - np.mean(others)) > 0.0151:
            yield (
                f"{label}: the published numbers average {np.mean(others):.2f}, the paper prints "
                f"{averages[0].mean:.2f}."
            )


def missing(names: Sequence[str], done: Results) -> str:
    """Which runs have not finished."""
    left = by_folder(name for name in dict.fromkeys(names) if name not in done)
    return f"Missing: {left}." if left else ""
