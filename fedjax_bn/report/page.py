"""Writes report.html, one self-contained page with the tables and curves of finished runs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.arguments.text import on_page
from fedjax_bn.data import label_trees
from fedjax_bn.data.domain import Dataset, Domain, Split, splits
from fedjax_bn.report import comparison, data_plots, html_parts, plots
from fedjax_bn.report.answers import measured, mistakes
from fedjax_bn.report.curves import convergence, sensitivity
from fedjax_bn.report.finished_runs import Run, Variant, find_runs, variants_of
from fedjax_bn.report.masks import masks_section
from fedjax_bn.report.results import Table, tables_of
from fedjax_bn.report.sections import about_runs, absences, batch_norms, data_section
from fedjax_bn.training.evaluation.groups import some_of
from fedjax_bn.training.evaluation.per_sample import class_names
from fedjax_bn.training.records import Record
from fedjax_bn.training.workdir import write_atomically, write_json

_CONNECTOMES = "abide"  # the data set whose features are the upper triangles of matrices
_MOST_SAMPLED = 40  # clients whose images are shown
_Group = tuple[list[Variant], list[str], list[Table]]  # the strings note which runs are left out


def write_report(folder: Path) -> None:
    """Writes plots/*.png and report.html of a finished run and of its finished baselines.

    Raises:
      WorkdirError: the folder holds no finished run, or a damaged one.
    """
    runs, notes = find_runs([folder])
    first = runs[0]
    drawn = {
        "methods": plots.methods([run.summary for run in runs]),
        "accuracy": plots.curves(first.records, "accuracy", f"test {first.score}, %"),
        "loss": plots.curves(first.records, "loss", "training loss"),
        "weights": plots.curves(first.records, "weights", "aggregation weight"),
    }
    for name, image in plots.ablations(first.summary["accuracy"]["unseen"], first.score):
        drawn[f"unseen{name.removesuffix('.png')}"] = image
    if "mask_l1" in first.records[-1]:
        drawn["mask_l1"] = plots.curves(first.records, "mask_l1", "L1 norm of the mask")
    for name, image in drawn.items():
        write_atomically(folder / "plots" / f"{name}.png", image)
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


def data_facts(internal: Dataset, unseen: Sequence[Domain], most: int = 100) -> Record:
    """Returns the content of data.json.

    Args:
      internal: the clients.
      unseen: the domains without a client; all their samples count as test samples.
      most: the most clients that are listed; of more, an evenly spaced selection is.

    Returns:
      {"classes": names, "clients": {client: {split: counts}}, "unseen": {domain: {"test": counts}},
      "boxes" and "masks": whether boxes or pixels are counted by class, "number": of all clients},
      where counts are
      {"samples": n, "classes": [n of each class]}.
    """

    def counts(parts: Sequence[Split]) -> Record:
        # an unseen domain may use one split under several names: it is counted once
        parts = {id(part): part for part in parts}.values()
        each = sum(label_trees.class_counts(part.labels, number) for part in parts)
        samples = sum(len(part.images) for part in parts)
        return {"samples": samples, "classes": [int(count) for count in each]}

    number = internal.num_classes
    shown = [internal.domains[k] for k in some_of(len(internal.domains), most)]
    return {
        "classes": list(internal.classes or map(str, range(number))),
        "clients": {
            domain.name: {name: counts([split]) for name, split in splits(domain)}
            for domain in shown
        },
        "unseen": {
            domain.name: {"test": counts([split for _, split in splits(domain)])}
            for domain in unseen
        },
        "boxes": label_trees.has_boxes(internal.domains[0].train.labels),
        "masks": label_trees.has_masks(internal.domains[0].train.labels),
        "number": len(internal.domains),
    }


def write_data_plots(
    folder: Path, internal: Dataset, unseen: Sequence[Domain], most: int = 100
) -> None:
    """Writes data.json, and plots of the clients' samples and of their class counts.

    An evenly spaced selection of many clients is shown; data.json lists at most `most` clients.
    """
    write_json(folder / "data.json", data_facts(internal, unseen, most))
    shown = [internal.domains[k] for k in some_of(len(internal.domains), _MOST_SAMPLED)]
    options = {"connectomes": True} if internal.name == _CONNECTOMES else {}
    if label_trees.has_masks(internal.domains[0].train.labels):
        options = {"classes": class_names(internal)}
    images = data_plots.samples([*shown, *unseen], **options)
    write_atomically(folder / "plots" / "samples.png", images)
    write_atomically(folder / "plots" / "class_counts.png", data_plots.class_counts(internal))


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
