"""Writes report.html, one self-contained page with the tables and curves of finished runs."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import on_page
from fedjax_bn.report import comparison, html_parts, plots
from fedjax_bn.report.answers import measured, mistakes
from fedjax_bn.report.curves import convergence, sensitivity
from fedjax_bn.report.finished_runs import Run, Variant, find_runs, variants_of
from fedjax_bn.report.masks import masks_section
from fedjax_bn.report.results import Table, tables_of
from fedjax_bn.report.sections import about_runs, absences, batch_norms, data_section
from fedjax_bn.training.evaluation.plots import ablations
from fedjax_bn.training.workdir import write_atomically, write_picture

_Group = tuple[list[Variant], list[str], list[Table]]  # the strings note which runs are left out


def write_report(folder: Path) -> None:
    """Writes plots/*.png and report.html of a finished run and of its finished baselines.

    Raises:
      WorkdirError: the folder holds no finished run, or a damaged one.
    """
    runs, notes = find_runs([folder])
    first = runs[0]
    place, labels = folder / "plots", {"accuracy": f"{first.part()} {first.score}, %"}
    labels |= {"loss": "training loss", "weights": "aggregation weight"}
    if "mask_l1" in first.records[-1]:
        labels["mask_l1"] = "L1 norm of the mask"
    write_picture(place / "methods.png", lambda: plots.methods([run.summary for run in runs]))
    for key, label in labels.items():
        write_picture(place / f"{key}.png", partial(plots.curves, first.records, key, label))
    for name, draw in ablations(first.summary["accuracy"]["unseen"], first.score):
        write_picture(place / f"unseen{name}", draw)
    title = f"{first.method} on {first.summary['dataset']}, seed {first.seed}"
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
    files |= {out.with_suffix(end): text for end, text in comparison.text_files(tables).items()}
    for path, text in files.items():
        write_atomically(path, text)
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
    several, first, details = len(groups) > 1, [], []
    for name, (variants, left_out, tables) in groups.items():
        first += [f"<h2>{on_page(name)}</h2>"] * several
        first.append(comparison.first_screen(variants, tables))
        first.append(html_parts.paragraphs(left_out, "missing"))
        sections = {
            "Convergence": convergence(variants, tables),
            "Batch norm": batch_norms(variants),
            "Sensitivity": sensitivity(variants, tables),
            f"Beyond {variants[0].runs[0].score}": measured(variants),
            "What is confused": mistakes(variants),
            "Masks": masks_section(variants),
            "Who was left out": absences(variants),
            "Data": data_section(variants),
            "How it was made": about_runs(variants),
        }
        inside = html_parts.joined(
            *(f"<h2>{head}</h2>\n{part}" for head, part in sections.items() if part)
        )
        details.append(html_parts.folded(f"{name} in detail", inside) if several else inside)
    first.append(html_parts.paragraphs(notes, "missing"))
    return html_parts.page(title, html_parts.joined(*first, *details))
