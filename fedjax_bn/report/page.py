"""Writes report.html, one self-contained page with the tables and curves of finished runs."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.report import plots
from fedjax_bn.report.answers import measures_section, mistakes_section
from fedjax_bn.report.blocks import Block, Folded, Heading, Paragraphs, write_page
from fedjax_bn.report.comparison import first_screen, text_files
from fedjax_bn.report.curves import convergence_section, sensitivity_section
from fedjax_bn.report.finished_runs import Run, Variant, find_runs, variants_of
from fedjax_bn.report.masks import masks_section
from fedjax_bn.report.results import Table, tables_of
from fedjax_bn.report.sections import (
    absences_section,
    batch_norm_section,
    data_section,
    runs_section,
)
from fedjax_bn.training.evaluation.plots import ablations
from fedjax_bn.training.workdir import write_atomically, write_picture

_Group = tuple[list[Variant], list[str], list[Table]]  # the strings note which runs are left out


def write_report(folder: Path) -> None:
    """Writes plots/*.png and report.html of a finished run and of its finished baselines.

    Raises:
      WorkdirError: the folder holds no finished run, or a damaged one.
    """
    runs, notes = find_runs([folder])
    run, *_ = runs
    place, labels = folder / "plots", {"accuracy": f"{run.part()} {run.score}, %"}
    labels |= {"loss": "training loss", "weights": "aggregation weight"}
    if "mask_l1" in run.records[-1]:
        labels["mask_l1"] = "L1 norm of the mask"
    write_picture(
        place / "methods.png", lambda: plots.methods([finished.summary for finished in runs])
    )
    for key, label in labels.items():
        write_picture(place / f"{key}.png", partial(plots.curves, run.records, key, label))
    for name, draw in ablations(run.summary["accuracy"]["unseen"], run.score):
        write_picture(place / f"unseen{name}", draw)
    title = f"{run.method} on {run.summary['dataset']}, seed {run.seed}"
    write_atomically(folder / "report.html", _page(title, _groups(runs), notes))


def write_comparison(folders: Iterable[Path], out: Path, baseline: str = "") -> list[Path]:
    """Writes a report on all finished runs in folders, and its tables in text files beside it.

    Args:
      folders: workdirs, or folders of workdirs at any depth.
      out: the path of the page; the tables go beside it as .md, .csv and .tex.
      baseline: the method, or the label of the variant, with which others are compared.

    Returns:
      The paths of the files.

    Raises:
      WorkdirError: there is no finished run, or a damaged one, or `out` cannot be written.
      ConfigError: a data set has no run of the baseline, or `out` does not end with .html.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out={out} must end with .html: its tables are written beside it")
    runs, notes = find_runs(folders)
    groups = _groups(runs, baseline)
    title = f"{len(runs)} run{'s' * (len(runs) > 1)} on {', '.join(groups)}"
    tables = {name: tables for name, (_, _, tables) in groups.items()}
    files = {out: _page(title, groups, notes)}
    files |= {out.with_suffix(end): content for end, content in text_files(tables).items()}
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def _groups(runs: Sequence[Run], baseline: str = "") -> dict[str, _Group]:
    """Returns runs grouped by data set and kind of score: the group's name -> the group."""
    by_kind: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_kind.setdefault((run.summary["dataset"], run.score), []).append(run)
    datasets = [dataset for dataset, _ in by_kind]
    groups = {}
    for (dataset, score), group in by_kind.items():
        variants, notes = variants_of(group)
        name = dataset if datasets.count(dataset) == 1 else f"{dataset}, {score}"
        groups[name] = variants, notes, tables_of(variants, baseline)
    return groups


def _page(title: str, groups: Mapping[str, _Group], notes: Sequence[str]) -> str:
    """Returns the page: first the tables of all data sets, then the other sections of each."""
    several = len(groups) > 1
    tables_of_all: list[Block] = []
    details: list[Block] = []
    for name, (variants, left_out, tables) in groups.items():
        if several:
            tables_of_all.append(Heading(name, 2))
        tables_of_all += first_screen(variants, tables)
        tables_of_all.append(Paragraphs(left_out, "missing"))
        sections = {
            "Convergence": convergence_section(variants, tables),
            "Batch norm": batch_norm_section(variants),
            "Sensitivity": sensitivity_section(variants, tables),
            f"Beyond {variants[0].runs[0].score}": measures_section(variants),
            "What is confused": mistakes_section(variants),
            "Masks": masks_section(variants),
            "Who was left out": absences_section(variants),
            "Data": data_section(variants),
            "How it was made": runs_section(variants),
        }
        blocks: list[Block] = []
        for head, inside in sections.items():
            blocks += [Heading(head, 2), *inside] if inside else []
        details += [Folded(f"{name} in detail", blocks)] if several else blocks
    return write_page(title, [*tables_of_all, Paragraphs(notes, "missing"), *details])
