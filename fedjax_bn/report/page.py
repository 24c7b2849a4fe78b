"""Writes report.html, one self-contained page with the tables and curves of finished runs."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from markupsafe import Markup

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.report.answers import masks_section, measures_section, mistakes_section
from fedjax_bn.report.blocks import TableCell, block, heat_map, picture, write_page
from fedjax_bn.report.comparison import first_screen, text_files
from fedjax_bn.report.curves import convergence_section
from fedjax_bn.report.finished_runs import (
    Run,
    Variant,
    as_json,
    find_runs,
    samples_scored,
    variants_of,
)
from fedjax_bn.report.results import Table, tables_of
from fedjax_bn.run.config.file import packaged_configs, read
from fedjax_bn.training.callbacks.client_logs import read_distances
from fedjax_bn.training.evaluation.plots import ablations
from fedjax_bn.training.workdir import write_atomically, write_picture

_TITLES = {
    "mean": "running means",
    "std": "running standard deviations",
    "scale": "scales",
    "bias": "biases",
}
_MOMENTS = {"first": "after round 1", "selected": "in the selected round"}
_MOST_CLASSES = 40  # for more classes the table of counts shows least, median and most
_PICTURES = {
    "samples": "What the clients see",
    "boxes": "Boxes found in {}, and those missed",
    "masked_features": "Features of two clients, before and after their masks",
}
_COSTS = (
    *("run", "seed", "target", "rounds", "selected", "s a round", "training min"),
    *("compiled in s", "samples a s", "MB down", "MB up", "folder"),
)
_Group = tuple[list[Variant], list[str], list[Table]]  # the strings note which runs are left out


def write_report(folder: Path) -> None:
    """Writes report.html of a finished run and its baselines, and plots of its adaptations.

    Raises:
      WorkdirError: the folder holds no finished run, or a damaged one.
    """
    runs, notes = find_runs([folder])
    run, *_ = runs
    for name, draw in ablations(run.summary["accuracy"]["unseen"], run.score):
        write_picture(folder / "plots" / f"unseen{name}", draw)
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
    tables = {name: tables for name, (_, _, tables) in groups.items()}
    files = {out: _page(f"Runs on {', '.join(groups)}", groups, notes)}
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
    several = len(groups) > 1  # then details are folded, or the tables would be far apart
    tables_of_all = []
    details = []
    for name, (variants, left_out, tables) in groups.items():
        if several:
            tables_of_all.append(block("heading", name, 2))
        tables_of_all += first_screen(variants, tables)
        tables_of_all.append(block("paragraphs", left_out, "missing"))
        sections = {
            "Convergence": convergence_section(variants, tables),
            "Batch norm": _batch_norm_section(variants),
            f"Beyond {variants[0].runs[0].score}": measures_section(variants),
            "What is confused": mistakes_section(variants),
            "Masks": masks_section(variants),
            "Who was left out": _absences_section(variants),
            "Data": _data_section(variants),
            "How it was made": _runs_section(variants),
        }
        blocks = []
        for head, inside in sections.items():
            blocks += [block("heading", head, 2), *inside] if inside else []
        details += [block("folded", f"{name} in detail", blocks)] if several else blocks
    return write_page(title, [*tables_of_all, block("paragraphs", notes, "missing"), *details])


def _batch_norm_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns heat maps of the clients' batch norms, for the first seed of each variant."""
    maps = []
    shared = []
    for variant in variants:
        run = variant.runs[0]
        if rows := _distances_of(run):
            title = f"{variant.label}, seed {run.seed}"
            maps.append(block("folded", title, rows, is_open=not maps))
        else:
            shared.append(variant.label)
    note = (
        f"{', '.join(shared)}: clients keep no batch norm of their own (or only those of a cohort "
        "are at hand), so that all have the same."
    )
    return [
        *([block("explanation", "distances")] if maps else []),
        *maps,
        block("paragraphs", [note] if shared else [], "missing"),
    ]


def _distances_of(run: Run) -> list[Markup]:
    """Returns a run's heat maps, a row of two rounds for each kind; [] if it wrote no distances."""
    moments = {title: read_distances(run.folder, name) for name, title in _MOMENTS.items()}
    moments = {title: distances for title, distances in moments.items() if distances is not None}
    rows = []
    for kind, title in _TITLES.items() if moments else ():
        values = {moment: distances.values[kind] for moment, distances in moments.items()}
        finite = np.concatenate([matrix[np.isfinite(matrix)] for matrix in values.values()])
        if len(finite):
            scale = {"greatest": float(finite.max())}  # one colour scale for both rounds
            maps = []
            for moment, matrix in values.items():
                names = moments[moment].layers, moments[moment].clients
                maps.append(heat_map(f"{title}, {moment}", *names, matrix, **scale))
            rows.append(block("group", maps, "side"))
    return rows


def _data_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns pictures of the first run's data, and its class counts by client in each part."""
    run = variants[0].runs[0]
    scored = samples_scored([Variant("", (run,))]).replace("samples", "images")
    blocks = []
    for name, title in _PICTURES.items():
        path, title = run.folder / "plots" / f"{name}.png", title.format(scored)
        if path.exists():
            blocks += [block("heading", title), picture(title, path.read_bytes())]
    if not (data := run.data):  # of a server, which sees no data
        return blocks
    counted = "pixels" if data.get("masks") else "boxes" if data["boxes"] else "samples"
    blocks.append(block("heading", f"{counted.capitalize()} by class and client"))
    if len(data["clients"]) < data["number"]:
        selection = f"{len(data['clients'])} of {data['number']:,} clients."
        blocks.append(block("paragraphs", [selection], "soft"))
    unseen = {f"{name} (unseen)": parts for name, parts in data["unseen"].items()}
    parts_of = data["clients"] | unseen
    for split in ("train", "validation", "test"):
        rows = {name: parts[split]["classes"] for name, parts in parts_of.items() if split in parts}
        if rows:
            heads, counts = data["classes"], np.array(list(rows.values()), float)
            if len(heads) > _MOST_CLASSES:
                heads = [f"least of {len(heads)} classes", "median", "most"]
                counts = np.stack([counts.min(1), np.median(counts, 1), counts.max(1)], axis=1)
            blocks.append(heat_map(f"{split}: {counted}", list(rows), heads, counts, "{:,.0f}"))
    return blocks


def _absences_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns a table of the clients and nodes that a Flower server left out; [] without any."""
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for run in (run for variant in variants for run in variant.runs):
        for record in run.records:
            reasons = {**record.get("left_out", {}), **record.get("refused", {})}
            for client, reason in reasons.items():
                rounds.setdefault((str(run.folder), client, reason), []).append(record["round"])
    rows = [
        [*(TableCell(value, style="text") for value in key), len(numbers), numbers[0], numbers[-1]]
        for key, numbers in rounds.items()
    ]
    about = "Clients whose upload was left out, and nodes that were refused as clients."
    heads = ("folder", "who", "why", "rounds", "first", "last")
    return [block("sortable_table", about, heads, rows)] if rows else []


def _runs_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns the runs' costs, changed keys, commands, notes, versions and devices."""
    runs = [(variant.label, run) for variant in variants for run in variant.runs]
    notes = list(dict.fromkeys(note for _, run in runs for note in run.about.get("notes", ())))
    head = "Notes on the data and the start"
    about = "MB: what a client receives and sends in a round."
    return [
        block("heading", "Time and traffic"),
        block("sortable_table", about, _COSTS, [_costs(label, run) for label, run in runs]),
        block("heading", "Commands"),
        block("commands", list(dict.fromkeys(_command(run) for _, run in runs))),
        *([block("heading", head), block("paragraphs", notes)] if notes else []),
        block("heading", "Versions and devices"),
        block("paragraphs", list(dict.fromkeys(_machine(run) for _, run in runs))),
    ]


def _costs(label: str, run: Run) -> list[object]:
    """Returns a run's row of `_COSTS`."""
    summary, sent = run.summary, run.summary.get("traffic", {})
    return [
        *(label, run.seed, run.target or "none", summary["rounds"], summary["selected_round"]),
        f"{summary['seconds_per_round']:.3g}",
        f"{sum(record['seconds'] for record in run.records) / 60:.1f}",
        f"{summary['compile_seconds']:.3g}",
        f"{summary['samples_per_second']:.0f}",
        *(f"{sent[way] / 1e6:.2f}" if way in sent else "" for way in ("down", "up")),
        TableCell(run.folder, style="text"),
    ]


def _machine(run: Run) -> str:
    """Returns the versions and devices of a run as a sentence."""
    machine = run.about.get("machine", {})
    versions = ", ".join(f"{name} {n}" for name, n in run.about.get("versions", {}).items())
    parts = [machine.get(key) for key in ("device_kind", "cpu", "cores", "mesh")]
    hardware = ", ".join(str(part) for part in parts if part)
    return f"{versions}; on {', '.join(run.about.get('devices', ()))} ({hardware})"


def _command(run: Run) -> str:
    """Returns the shortest command that sets a run's configuration, from a packaged config."""
    config = run.config
    changes = {
        name: {key: value for key, value in config.items() if values.get(key) != value}
        for name, values in _packaged().items()
        # the command line cannot set a key back to None, so such configs are left out
        if all(config.get(key) is not None for key, value in values.items() if value is not None)
    }
    name = min(changes, key=lambda packaged: (len(changes[packaged]), packaged))
    parts = []
    for key, value in sorted(changes[name].items()):
        value_text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"--config.{key}={shlex.quote(value_text)}")
    return " ".join(("fedjax-bn", "--config", name, *parts))


@cache
def _packaged() -> dict[str, dict[str, object]]:
    """Returns name of a packaged config -> its keys and values."""
    return {name: as_json(read(name)) for name in packaged_configs()}
