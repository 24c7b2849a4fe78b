"""Writes report.html, one self-contained page with the tables and curves of finished runs."""

import io
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.report.blocks import TableCell, block, heat_map, picture, write_page
from fedjax_bn.report.comparison import first_screen, text_files
from fedjax_bn.report.curves import convergence_section, measures_section
from fedjax_bn.report.results import Table, of_batches, tables_of
from fedjax_bn.report.runs import (
    Run,
    Variant,
    find_runs,
    packaged,
    samples_of,
    samples_scored,
    variants_of,
)
from fedjax_bn.run.config.file import packaged_configs
from fedjax_bn.tasks.figures import on_plot, png
from fedjax_bn.tasks.segmentation.overlays import overlays
from fedjax_bn.training.callbacks.client_logs import read_distances
from fedjax_bn.training.evaluation.answers import AnsweredMasks, Mistake
from fedjax_bn.training.plots import ablations, of_part
from fedjax_bn.training.score_tables import heading, in_form
from fedjax_bn.training.workdir import write_atomically, write_picture

_TITLES = {"mean": "running means", "std": "running standard deviations"}
_TITLES |= {"scale": "scales", "bias": "biases"}
_MOMENTS = {"first": "after round 1", "selected": "in the selected round"}
_MOST_CLASSES = 40  # for more classes the table of counts shows least, median and most
_PICTURES = {
    "samples": "What the clients see",
    "boxes": "Boxes found in {}, and those missed",
    "masked_features": "Features of two clients, before and after their masks",
}
_WIDE = 20  # classes whose confusions are a matrix; for more, the most frequent pairs are listed
_PAIRS = 15
_ROWS = 12  # clients, or domains and adaptations, whose mistakes are shown
_BOXES = 16  # clients of a plot of Dice, and as many domains with adaptations
_MASKED_RUNS = 6  # whose pictures of masks are shown
_PICTURED = 8  # clients of such a picture, and as many domains with adaptations
_Group = tuple[list[Variant], list[str], list[Table]]  # the strings note which runs are left out


def write_report(folder: Path) -> None:
    """Writes report.html of a finished run and its baselines, and plots of its adaptations."""
    runs, notes = find_runs([folder])
    run, *_ = runs
    for name, draw in ablations(run.summary["accuracy"]["unseen"], run.score):
        write_picture(folder / "plots" / f"unseen{name}", draw)
    title = f"{run.method} on {run.summary['dataset']}, seed {run.seed}"
    write_atomically(folder / "report.html", _page(title, _groups(runs), notes))


def write_comparison(folders: Iterable[Path], out: Path, baseline: str = "") -> list[Path]:
    """Writes a report on all finished runs in folders, at any depth; returns the files' paths.

    The page is `out`, a ConfigError unless it ends with .html; its tables go beside it as .md, .csv
    and .tex. `baseline` is as in `results.tables_of`, errors also as in `runs.find_runs`.
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
    datasets, groups = [dataset for dataset, _ in by_kind], {}
    for (dataset, score), group in by_kind.items():
        variants, notes = variants_of(group)
        name = dataset if datasets.count(dataset) == 1 else f"{dataset}, {score}"
        groups[name] = variants, notes, tables_of(variants, baseline)
    return groups


def _page(title: str, groups: Mapping[str, _Group], notes: Sequence[str]) -> str:
    """Returns the page: first the tables of all data sets, then the other sections of each."""
    several = len(groups) > 1  # then details are folded, or the tables would be far apart
    tables_of_all, details = [], []
    for name, (variants, left_out, tables) in groups.items():
        if several:
            tables_of_all.append(block("heading", name, 2))
        tables_of_all += first_screen(variants, tables)
        tables_of_all.append(block("paragraphs", left_out, "missing"))
        sections = {
            "Convergence": convergence_section(variants, tables),
            "Batch norm": _batch_norm_section(variants),
            f"Beyond {variants[0].runs[0].score}": measures_section(variants),
            "What is confused": _mistakes_section(variants),
            "Masks": _masks_section(variants),
            "Who was left out": _absences_section(variants),
            "Data": _data_section(variants),
            "How it was made": _runs_section(variants),
        }
        headed = [[block("heading", head, 2), *parts] for head, parts in sections.items() if parts]
        blocks = list(chain(*headed))
        details += [block("folded", f"{name} in detail", blocks)] if several else blocks
    return write_page(title, [*tables_of_all, block("paragraphs", notes, "missing"), *details])


def _mistakes_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns accuracy by class, confusions and mistakes, each from a variant's first seed."""
    runs = [(variant, variant.runs[0]) for variant in variants if variant.runs[0].answers]
    if not runs or runs[0][1].score != "accuracy":
        return []
    names, recall, folds = _class_names(runs[0][1]), {}, []
    for variant, run in runs:
        for adaptation in dict.fromkeys(adaptation for _, adaptation in run.answers):
            whom = f"unseen [{adaptation}]" if adaptation else of_part("internal", run.part())
            if (matrix := _summed_confusions(run, adaptation)) is not None:
                count = matrix.sum(1)
                percent = 100 * matrix.diagonal() / np.maximum(count, 1)
                recall[f"{variant.label}, {whom}"] = np.where(count > 0, percent, np.nan)
        clients = f"{samples_of([variant], 'internal')} together"
        matrices = _confusions(clients, _summed_confusions(run, ""), names)
        for key in [key for key in run.answers if key[1]][:_ROWS]:
            matrices += _confusions(heading(key), run.answers[key].confusion, names)
        inside = [block("group", matrices, "side"), *_worst_mistakes(run, names)]
        title = f"{variant.label}, seed {run.seed}: classes (rows) by answers (columns)"
        folds.append(block("folded", title, inside, is_open=not folds))
    if recall:
        title = "Accuracy by class in percent, the samples of all clients or domains together"
        return [heat_map(title, [*recall], names, np.stack([*recall.values()]), "{:.0f}"), *folds]
    return folds


def _class_names(run: Run) -> list[str]:
    """Returns the names of the classes; those without a name are called by their numbers."""
    names = run.data.get("classes", [])
    sizes = [0]
    for answered in run.answers.values():
        sizes += [] if answered.confusion is None else [len(answered.confusion)]
        sizes += [1 + max(mistake.label, mistake.answer) for mistake in answered.mistakes]
    return [*names, *map(str, range(len(names), max(sizes)))]


def _summed_confusions(run: Run, adaptation: str) -> np.ndarray | None:
    """Returns the summed confusions i64[C, C] of all clients, or of all unseen domains, or None."""
    answers = [answered for key, answered in run.answers.items() if key[1] == adaptation]
    matrices = [answered.confusion for answered in answers if answered.confusion is not None]
    return np.sum(matrices, axis=0) if matrices else None


def _confusions(title: str, matrix: np.ndarray | None, names: Sequence[str]) -> list[Markup]:
    if matrix is None:
        return []
    if len(names) <= _WIDE:
        # NaN leaves a cell empty, so that the confusions stand out
        values = np.where(matrix > 0, matrix, np.nan).astype(float)
        np.fill_diagonal(values, matrix.diagonal())
        return [heat_map(title, names, names, values, "{:.0f}")]
    mistaken = matrix.copy()
    np.fill_diagonal(mistaken, 0)
    order = np.argsort(-mistaken, axis=None, kind="stable")[:_PAIRS]
    pairs = zip(*np.unravel_index(order, mistaken.shape), strict=True)
    rows = [(names[i], names[j], mistaken[i, j]) for i, j in pairs if mistaken[i, j]]
    title = f"{title}: most frequent confusions"
    return [block("sortable_table", title, ["is", "answer", "n"], rows)]


def _worst_mistakes(run: Run, names: Sequence[str]) -> list[Markup]:
    """Returns the pictures of the most confident mistakes of some clients and domains."""
    blocks = []
    for (name, adaptation), answered in list(run.answers.items())[:_ROWS]:
        if answered.mistakes:
            whom = heading((name, adaptation)) if adaptation else of_part(name, run.part())
            pictures = [_picture(mistake, names) for mistake in answered.mistakes]
            blocks += [block("paragraphs", [whom], "soft"), block("group", pictures, "mistakes")]
    return [block("heading", "Most confident mistakes"), *blocks] if blocks else []


def _picture(mistake: Mistake, names: Sequence[str]) -> Markup:
    """Returns a sample u8[H, W, 1 or 3], or f[F] as a strip, with its label and the answer."""
    pixels = mistake.picture
    if pixels.ndim == 1:
        low, high = float(pixels.min()), float(pixels.max())
        pixels = ((pixels - low) / ((high - low) or 1) * 255).astype(np.uint8)[None, :, None]
        # eight times as wide as high
        pixels = np.repeat(pixels, max(1, pixels.shape[1] // 8), axis=0)
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
    answer = f"{names[mistake.answer]} ({100 * mistake.confidence:.0f} %)"
    title = f"sample {mistake.sample} is {names[mistake.label]}, answered {answer}"
    return picture(title, file.getvalue(), (answer, f"is {names[mistake.label]}"))


def _masks_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns pictures of masks and the distributions of Dice; [] for runs without masks."""
    firsts = [(variant.label, variant.runs[0]) for variant in variants]
    runs = [(f"{label}, seed {run.seed}", run) for label, run in firsts if run.masks]
    if not runs:
        return []
    about = block("explanation", "spread", samples_scored(variants))
    blocks = [block("heading", "Dice by volume"), about]
    blocks += [picture(f"Dice by volume, {title}", _draw_spread(run)) for title, run in runs]
    blocks += [block("heading", "Truth and prediction"), block("explanation", "truth")]
    for title, run in runs[:_MASKED_RUNS]:
        rows = {name: masks.pictures for name, masks in _labelled(run, _PICTURED).items()}
        drawn = picture(f"Masks of {title}", overlays(rows, run.data.get("classes", [])))
        blocks.append(block("folded", title, [drawn], is_open=title == runs[0][0]))
    return blocks


def _labelled(run: Run, most: int) -> dict[str, AnsweredMasks]:
    """Returns label -> the masks of at most `most` clients, and as many unseen domains."""
    answered = {key: masks for key, masks in run.masks.items() if masks.pictures}
    inside = {of_part(key[0], run.part()): answered[key] for key in answered if not key[1]}
    outside = {heading(key): answered[key] for key in answered if key[1]}
    return dict(chain(islice(inside.items(), most), islice(outside.items(), most)))


def _draw_spread(run: Run) -> bytes:
    """Draws Dice by volume as PNG: a box and a point per volume, for each client."""
    answered = _labelled(run, _BOXES)
    names, values = [*answered], [masks.dice.mean(-1) * 100 for masks in answered.values()]
    figure = Figure(figsize=(max(5, 0.7 * len(names) + 1.5), 3.6), layout="constrained")
    axes = figure.subplots()
    axes.boxplot(values, widths=0.6, showfliers=False, medianprops={"color": "black"})
    random = np.random.default_rng(0)  # so that equal runs draw equal plots
    for place, percent in enumerate(values, start=1):
        across = place + random.uniform(-0.2, 0.2, len(percent))
        axes.plot(across, percent, ".", markersize=4, alpha=0.5)
    places = range(1, len(names) + 1)
    axes.set_xticks(places, map(on_plot, names), rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="Dice, %", ylim=(-3, 103))
    axes.grid(axis="y", alpha=0.3)
    return png(figure)


def _batch_norm_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns scores by running and by batch statistics, and heat maps of each first seed."""
    scores = []
    for variant in variants:
        for client, (tested, batches, gap) in of_batches(variant.runs).items():
            names = variant.label, variant.runs[0].config["statistics"], client
            numbers = (f"{x:.1f}" for x in (tested.mean, batches.mean))
            limits = ("" if np.isnan(x) else f"{x:+.1f}" for x in gap)
            scores.append([*(TableCell(x, style="text") for x in names), *numbers, *limits])
    maps, shared = [], []
    for label, run in ((variant.label, variant.runs[0]) for variant in variants):
        if rows := _distances_of(run):
            maps.append(block("folded", f"{label}, seed {run.seed}", rows, is_open=not maps))
        else:
            shared.append(label)
    return [block("batch_norms", scores, maps, shared)]


def _distances_of(run: Run) -> list[Markup]:
    """Returns a run's heat maps, a row of two rounds for each kind; [] if it wrote no distances."""
    stored = {title: read_distances(run.folder, name) for name, title in _MOMENTS.items()}
    stored = {title: arrays for title, arrays in stored.items() if arrays}
    rows = []
    for kind, title in _TITLES.items():
        finite = [arrays[kind][np.isfinite(arrays[kind])] for arrays in stored.values()]
        if any(map(len, finite)):
            greatest = float(np.concatenate(finite).max())  # one for both rounds
            maps = []
            for moment, arrays in stored.items():
                names = (arrays[key].tolist() for key in ("layers", "clients"))
                maps.append(heat_map(f"{title}, {moment}", *names, arrays[kind], greatest=greatest))
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
    parts_of = data["clients"] | {f"{name} (unseen)": x for name, x in data["unseen"].items()}
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
            reasons = record.get("left_out", {}) | record.get("refused", {})
            for client, reason in reasons.items():
                rounds.setdefault((str(run.folder), client, reason), []).append(record["round"])
    rows = []
    for names, numbers in rounds.items():
        cells = [TableCell(name, style="text") for name in names]
        rows.append([*cells, len(numbers), numbers[0], numbers[-1]])
    return [block("absences", rows)] if rows else []


def _runs_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns the runs' costs, changed keys, commands, notes, versions and devices."""
    runs = [(variant.label, run) for variant in variants for run in variant.runs]
    costs = []
    for label, run in runs:
        summary, sent = run.summary, run.summary.get("traffic", {})
        minutes = sum(record["seconds"] for record in run.records) / 60
        row = [label, run.seed, run.target or "none", summary["rounds"], summary["selected_round"]]
        row += [f"{summary['seconds_per_round']:.3g}", f"{minutes:.1f}"]
        forms = {"compile_seconds": ".3g", "samples_per_second": ".0f"}
        row += [in_form(summary[key], form) for key, form in forms.items()]
        row += [f"{sent[way] / 1e6:.2f}" if way in sent else "" for way in ("down", "up")]
        costs.append([*row, TableCell(run.folder, style="text")])
    commands = dict.fromkeys(_command(run) for _, run in runs)
    notes = dict.fromkeys(note for _, run in runs for note in run.about.get("notes", ()))
    machines = dict.fromkeys(_machine(run) for _, run in runs)
    return [block("runs", costs, *map(list, (commands, notes, machines)))]


def _machine(run: Run) -> str:
    """Returns the versions and devices of a run as a sentence."""
    machine = run.about.get("machine", {})
    versions = ", ".join(f"{name} {n}" for name, n in run.about.get("versions", {}).items())
    parts = filter(None, map(machine.get, ("device_kind", "cpu", "cores", "mesh")))
    hardware = ", ".join(map(str, parts))
    return f"{versions}; on {', '.join(run.about.get('devices', ()))} ({hardware})"


def _command(run: Run) -> str:
    """Returns the shortest command that sets a run's configuration, from a packaged config."""
    config, commands = run.config, []
    for name in packaged_configs():
        values = packaged(name)
        # the command line cannot set a key back to None, so such configs are left out
        if all(config.get(key) is not None for key, value in values.items() if value is not None):
            changes = {key: value for key, value in config.items() if values.get(key) != value}
            commands.append((len(changes), name, changes))
    _, name, changes = min(commands, key=lambda command: command[:2])
    parts = [f"--config {name}"]
    for key, value in sorted(changes.items()):
        value_text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"--config.{key}={shlex.quote(value_text)}")
    return " ".join(("fedjax-bn", *parts))
