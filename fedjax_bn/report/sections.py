"""Writes the sections of a page on batch norms, data, and how its runs were made."""

import html
import shlex
from collections.abc import Sequence
from functools import cache

import numpy as np

from fedjax_bn.report import html_parts
from fedjax_bn.report.finished_runs import (
    Run,
    Variant,
    as_json,
    defaults,
    samples_scored,
    spell,
)
from fedjax_bn.report.html_parts import cell, heat_map, joined, paragraphs, picture, sortable
from fedjax_bn.run.config.file import packaged_configs, read
from fedjax_bn.training.callbacks.client_logs import read_distances
from fedjax_bn.training.workdir import not_readable, read_arrays

_DISTANCES = (
    "The distance of each client's batch norm from the mean over clients, root mean square over "
    "channels: means in standard deviations of the layer, standard deviations as logarithms (0.1 "
    "is about ten percent), scale and bias as they are. Before training all clients have one "
    "model, and every distance is 0."
)
_TITLES = {
    "mean": "running means",
    "std": "running standard deviations",
    "scale": "scales",
    "bias": "biases",
}
_MOMENTS = {"first": "after round 1", "selected": "in the selected round"}
_ADAPTER = "zero_shot_adapter"
_QUANTILES = {"10 %": 0.1, "median": 0.5, "90 %": 0.9}
_MOST_CLASSES = 40  # for more classes the table of counts shows least, median and most
_PICTURES = {
    "samples": "What the clients see",
    "boxes": "Boxes found in {}, and those missed",
    "masked_features": "Features of two clients, before and after their masks",
}
_MOST_COMMANDS = 12
_MOST_ABSENCES = 100
_COSTS = (
    *("run", "seed", "target", "rounds", "selected", "s a round", "training min"),
    *("compiled in s", "samples a s", "MB down", "MB up", "folder"),
)


def batch_norms(variants: Sequence[Variant]) -> str:
    """Returns heat maps of the clients' batch norms, for the first seed of each variant, as HTML.

    Notes name the variants without such distances. The adapter's alphas follow below.
    """
    parts, shared, missing = [], [], []
    for variant in variants:
        run = variant.runs[0]
        found = {name: read_distances(run.folder, name) for name in _MOMENTS}
        found = {name: one for name, one in found.items() if one is not None}
        if not found:
            (shared if run.data else missing).append(variant.label)
            continue
        rows = []
        for kind, title in _TITLES.items():
            values = {name: one.values[kind] for name, one in found.items()}
            finite = np.concatenate([one[np.isfinite(one)] for one in values.values()])
            if len(finite):
                most = float(finite.max())  # one colour scale for both rounds
                maps = (
                    heat_map(f"{title}, {_MOMENTS[name]}", one.layers, one.clients, values[name],
                             ".2g", most)
                    for name, one in found.items()
                )  # fmt: skip
                rows.append(html_parts.side_by_side(maps))
        title = f"{variant.label}, seed {run.seed}"
        parts.append(html_parts.folded(title, "".join(rows), is_open=not parts))
    notes = []
    if shared:
        notes.append(
            f"{', '.join(shared)}: clients keep no batch norm of their own (or its rows are stored "
            "on the disk), so that all have the same."
        )
    if missing:
        notes.append(
            f"{', '.join(missing)}: no distances were written, as versions before 0.2 did not. "
            "Train again with this version to see them."
        )
    about = paragraphs([_DISTANCES] * bool(parts), "soft")
    return joined(about, *parts, paragraphs(notes, "missing"), _alphas(variants))


def _alphas(variants: Sequence[Variant]) -> str:
    """Returns heat maps of the alphas' quantiles by layer, or a note on how to record them."""
    parts = []
    for variant in variants:
        folder, label = variant.runs[0].folder, variant.label
        files = sorted((folder / "evaluations").glob("*-alphas-*.npz"))
        for path in files:
            values = read_arrays(path)
            try:
                rows = [np.quantile(values[layer], [*_QUANTILES.values()]) for layer in values]
            except (ValueError, IndexError, TypeError) as error:
                raise not_readable(path, error) from error
            title = f"{label}, {path.stem}: 0 takes the received statistics, 1 those of each sample"
            columns = np.array(rows).T
            parts.append(heat_map(title, list(_QUANTILES), list(values), columns, ".2f", 1.0))
        unseen = variant.runs[0].summary["accuracy"]["unseen"]
        if not files and any(_ADAPTER in row for row in unseen.values()):
            text = (
                f"{label}: no alphas by layer were recorded; `fedjax-bn evaluate --workdir "
                f"{shlex.quote(str(folder))} --alphas` does, and then this report shows them."
            )
            parts.append(paragraphs([text], "missing"))
    return "\n".join(["<h3>Alphas of the adapter by layer</h3>", *parts]) if parts else ""


def data_section(variants: Sequence[Variant]) -> str:
    """Returns pictures of the first run's data, and its class counts, as HTML.

    Training, validation and test samples have a table each, with a row for each client and a column
    for each class.
    """
    run = variants[0].runs[0]
    plots = run.folder / "plots"
    scored = samples_scored([Variant("", (run,))]).replace("samples", "images")
    parts = [
        picture(plots / f"{name}.png", text.format(scored)) for name, text in _PICTURES.items()
    ]
    if not (data := run.data):  # a version before 0.2 wrote no data.json
        text = "Training samples by class and client"
        return joined(*parts, picture(plots / "class_counts.png", text))
    what = "pixels" if data.get("masks") else "boxes" if data["boxes"] else "samples"
    parts.append(f"<h3>{what.capitalize()} by class and client</h3>")
    if len(data["clients"]) < data["number"]:
        few = f"{len(data['clients'])} of {data['number']:,} clients."
        parts.append(paragraphs([few], "soft"))
    named = data["clients"] | {f"{name} (unseen)": one for name, one in data["unseen"].items()}
    for split in ("train", "validation", "test"):
        rows = {name: one[split]["classes"] for name, one in named.items() if split in one}
        if rows:
            heads, counts = data["classes"], np.array(list(rows.values()), float)
            if len(heads) > _MOST_CLASSES:
                heads = [f"least of {len(heads)} classes", "median", "most"]
                counts = np.stack([counts.min(1), np.median(counts, 1), counts.max(1)], axis=1)
            parts.append(heat_map(f"{split}: {what}", list(rows), heads, counts, ",.0f"))
    return joined(*parts)


def absences(variants: Sequence[Variant]) -> str:
    """Returns a table of the clients and nodes that a server left out, as HTML; "" without any.

    Only runs over Flower have such records.
    """
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for variant in variants:
        for run in variant.runs:
            for record in run.records:
                each = {**record.get("left_out", {}), **record.get("refused", {})}
                for who, why in each.items():
                    rounds.setdefault((str(run.folder), who, why), []).append(record["round"])
    rows = [
        [*(cell(text, kind="text") for text in key), len(found), found[0], found[-1]]
        for key, found in list(rounds.items())[:_MOST_ABSENCES]
    ]
    heads = ("folder", "who", "why", "rounds", "first", "last")
    about = (
        "Clients whose upload was left out of a round, and nodes that were refused as clients: "
        f"{len(rows)} of {len(rounds)} rows."
    )
    return sortable(about, heads, rows) if rows else ""


def about_runs(variants: Sequence[Variant]) -> str:
    """Returns the runs' costs, changed keys, commands, notes, versions and devices, as HTML."""
    runs = [(variant.label, run) for variant in variants for run in variant.runs]
    notes = list(dict.fromkeys(note for _, run in runs for note in run.about.get("notes", ())))
    commands = list(dict.fromkeys(_command(run) for _, run in runs))
    if (more := len(commands) - _MOST_COMMANDS) > 0:
        commands[_MOST_COMMANDS:] = [f"... and {more} more"]
    costs, machines = [], {}
    for label, run in runs:
        summary, sent = run.summary, run.summary.get("traffic", {})
        costs.append(
            [
                *(label, run.seed, run.target or "none"),
                *(summary["rounds"], summary["selected_round"]),
                f"{summary['seconds_per_round']:.3g}",
                f"{sum(record['seconds'] for record in run.records) / 60:.1f}",
                f"{summary['compile_seconds']:.3g}",
                f"{summary['samples_per_second']:.0f}",
                *(f"{sent[way] / 1e6:.2f}" if way in sent else "" for way in ("down", "up")),
                cell(run.folder, kind="text"),
            ]
        )
        about, machine = run.about, run.about.get("machine", {})
        versions = ", ".join(f"{name} {n}" for name, n in about.get("versions", {}).items())
        keys = ("device_kind", "cpu", "cores", "mesh")
        what = ", ".join(str(machine[key]) for key in keys if machine.get(key))
        devices = ", ".join(about.get("devices", ()))
        machines[f"{versions or 'versions unknown'}; on {devices} ({what})"] = None
    configs = [[run.config for run in variant.runs] for variant in variants]
    every = [one for each in configs for one in each]
    changed = []
    for key in sorted({key for one in every for key in one if defaults().get(key) != one[key]}):
        # seeds and targets of one variant may have several values
        texts = [" | ".join(dict.fromkeys(spell(one[key]) for one in each)) for each in configs]
        if len(set(texts)) == 1:
            texts[1:] = ["same"] * (len(texts) - 1)
        changed.append([key, *(cell(text, kind="text") for text in texts)])
    heads = ["key", *(variant.label for variant in variants)]
    return joined(
        "<h3>Time and traffic</h3>",
        sortable("MB: what a client receives and sends in a round.", _COSTS, costs),
        "<h3>Keys that differ from the defaults</h3>",
        sortable("All other keys have their defaults.", heads, changed),
        "<h3>Commands</h3>",
        f"<pre>{html.escape(chr(10).join(commands))}</pre>",
        "<h3>Notes on the data and the start</h3>" if notes else "",
        paragraphs(notes),
        "<h3>Versions and devices</h3>",
        paragraphs(machines),
    )


def _command(run: Run) -> str:
    """Returns the shortest command that sets a run's configuration, from a packaged config."""
    config = run.config
    changes = {
        name: {key: value for key, value in config.items() if values.get(key) != value}
        for name, values in _packaged().items()
        # the command line cannot set a key back to None, so such configs are left out
        if all(config[key] is not None for key, value in values.items() if value is not None)
    }
    name = min(changes, key=lambda one: (len(changes[one]), one))
    parts = []
    for key, value in sorted(changes[name].items()):
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"--config.{key}={shlex.quote(text)}")
    return " ".join(("fedjax-bn", "--config", name, *parts))


@cache
def _packaged() -> dict[str, dict[str, object]]:
    """Returns name of a packaged config -> its keys and values."""
    return {name: as_json(read(name)) for name in packaged_configs()}
