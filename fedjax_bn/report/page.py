"""report.html: one page on finished runs, with their tables and curves, no other file needed."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_bn.arguments.text import on_page
from fedjax_bn.data.domain import Dataset, Domain
from fedjax_bn.report import html_parts, plots, text_tables
from fedjax_bn.report.about_runs import about_runs
from fedjax_bn.report.batch_norms import alphas, batch_norms
from fedjax_bn.report.convergence import convergence
from fedjax_bn.report.data_facts import data_facts
from fedjax_bn.report.data_section import data_section
from fedjax_bn.report.finished_runs import Run, find_runs
from fedjax_bn.report.first_screen import first_screen
from fedjax_bn.report.measured import measured
from fedjax_bn.report.mistakes import mistakes
from fedjax_bn.report.results import Table, tables_of
from fedjax_bn.report.sensitivity import sensitivity
from fedjax_bn.report.unseen import ablations
from fedjax_bn.report.variants import Variant, variants_of
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.evaluation.groups import some_of
from fedjax_bn.run.files.workdir import write_atomically, write_json

_CONNECTOMES = "abide"  # the data set whose features are the upper triangles of matrices
_MOST_SAMPLED = 40  # clients of which images are shown


class _Group(NamedTuple):
    """Runs on one data set: its name, their variants, sentences on what was left out, tables."""

    name: str
    variants: list[Variant]
    notes: list[str]
    tables: list[Table]


def write_report(folder: Path) -> None:
    """Writes plots/*.png and report.html of a finished run, its finished baselines beside it.

    Raises:
      WorkdirError: the folder holds no finished run.
    """
    runs, notes = find_runs([folder])
    write_plots(folder, runs)
    summary = runs[0].summary
    title = f"{summary['method']} on {summary['dataset']}, seed {summary['seed']}"
    write_atomically(folder / "report.html", _page(title, _groups(runs), notes))


def write_comparison(folders: Iterable[Path], out: Path, baseline: str = "") -> list[Path]:
    """Writes a report on all finished runs in folders, and its tables as text beside it.

    Args:
      folders: workdirs, or folders of workdirs at any depth.
      out: the page; the tables are beside it as .md, .csv and .tex.
      baseline: the method, or the label of a variant, that others are compared with.

    Returns:
      The files.

    Raises:
      WorkdirError: there is no finished run, or a damaged one, or `out` cannot be written.
      ConfigError: a data set has no run of the baseline, or `out` is no name of a page.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out={out} must end with .html: the tables beside it have other ends")
    runs, notes = find_runs(folders)
    groups = _groups(runs, baseline)
    names = ", ".join(group.name for group in groups)
    title = f"{len(runs)} run{'s' * (len(runs) > 1)} on {names}"
    named = [(group.name, group.tables) for group in groups]
    files = {
        out: _page(title, groups, notes),
        out.with_suffix(".md"): "\n".join(text_tables.markdown(*one) for one in named),
        out.with_suffix(".tex"): "\n".join(text_tables.latex(*one) for one in named),
        out.with_suffix(".csv"): text_tables.long_csv(named),
    }
    for path, text in files.items():
        write_atomically(path, text)
    return list(files)


def write_plots(folder: Path, runs: Sequence[Run]) -> None:
    """Writes plots/*.png of the first of some runs, the others beside it.

    Args:
      folder: the first run's workdir.
      runs: at least one.

    Raises:
      WorkdirError: a file cannot be written.
    """
    first, summaries = runs[0], [run.summary for run in runs]
    records, score = first.records, first.score
    drawn = {
        "methods": plots.methods(summaries),
        "accuracy": plots.curves(records, "accuracy", f"test {score}, %"),
        "loss": plots.curves(records, "loss", "training loss"),
        "weights": plots.curves(records, "weights", "aggregation weight"),
    }
    drawn |= {
        f"unseen{name.removesuffix('.png')}": image
        for name, image in ablations(first.summary["accuracy"]["unseen"])
    }
    if "mask_l1" in records[-1]:
        drawn["mask_l1"] = plots.curves(records, "mask_l1", "L1 norm of the mask")
    for name, image in drawn.items():
        write_atomically(folder / "plots" / f"{name}.png", image)


def write_data_plots(
    folder: Path, internal: Dataset, unseen: Sequence[Domain], most: int = 100
) -> None:
    """Writes data.json, and plots of what clients see and of how many samples they own.

    Of many clients some are shown, evenly spaced; data.json names `most` of them.
    """
    write_json(folder / "data.json", data_facts(internal, unseen, most))
    shown = [internal.domains[k] for k in some_of(len(internal.domains), _MOST_SAMPLED)]
    connectomes = {"connectomes": True} if internal.name == _CONNECTOMES else {}
    images = plots.samples([*shown, *unseen], **connectomes)
    write_atomically(folder / "plots" / "samples.png", images)
    write_atomically(folder / "plots" / "class_counts.png", plots.class_counts(internal))


def _groups(runs: Sequence[Run], baseline: str = "") -> list[_Group]:
    """Runs by data set and by what their scores are."""
    by_kind: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_kind.setdefault((run.summary["dataset"], run.score), []).append(run)
    datasets = [dataset for dataset, _ in by_kind]
    found = []
    for (dataset, score), group in by_kind.items():
        variants, notes = variants_of(group)
        name = dataset if datasets.count(dataset) == 1 else f"{dataset}, {score}"
        found.append(_Group(name, variants, notes, tables_of(variants, baseline)))
    return found


def _page(title: str, groups: Sequence[_Group], notes: Sequence[str]) -> str:
    """The page: what came of every data set first, then the rest of each."""
    body = []
    for name, variants, more, made in groups:
        if len(groups) > 1:
            body.append(f"<h2>{on_page(name)}</h2>")
        body += [first_screen(variants, made), html_parts.paragraphs(more, "missing")]
    body.append(html_parts.paragraphs(notes, "missing"))
    for group in groups:
        parts = [f"<h2>{head}</h2>\n{part}" for head, part in _sections(group) if part]
        if len(groups) > 1:
            head = f"<summary><strong>{on_page(group.name)} in detail</strong></summary>"
            parts = ["<details>", head, *parts, "</details>"]
        body += parts
    return html_parts.page(title, "\n".join(filter(None, body)))


def _sections(group: _Group) -> list[tuple[str, str]]:
    """(heading, HTML) of what stands below the first screen."""
    variants = group.variants
    return [
        ("Convergence", convergence(variants, group.tables)),
        ("Batch norm", "\n".join(filter(None, (batch_norms(variants), alphas(variants))))),
        ("Sensitivity", sensitivity(variants, group.tables)),
        ("Beyond accuracy", measured(variants)),
        ("What is confused", mistakes(variants)),
        ("Data", data_section(variants)),
        ("How it was made", about_runs(variants)),
    ]
