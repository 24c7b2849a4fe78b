"""The report's sections on batch norms, data, absences, and how the runs were made."""

import shlex
from collections.abc import Sequence
from functools import cache

import numpy as np

from fedjax_bn.report.blocks import (
    Block,
    Commands,
    Folded,
    Group,
    Heading,
    HeatMap,
    Paragraphs,
    SortableTable,
    TableCell,
    picture_of_run,
)
from fedjax_bn.report.finished_runs import (
    Run,
    Variant,
    as_json,
    defaults,
    samples_scored,
    spell,
)
from fedjax_bn.run.config.file import packaged_configs, read
from fedjax_bn.training.callbacks.client_logs import read_distances
from fedjax_bn.training.workdir import read_arrays

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


def batch_norm_section(variants: Sequence[Variant]) -> list[Block]:
    """Returns heat maps of the clients' batch norms, for the first seed of each variant.

    A note names the variants without such distances. The adapter's alphas follow below.
    """
    maps: list[Block] = []
    shared = []
    for variant in variants:
        run = variant.runs[0]
        if rows := _distances_of(run):
            maps.append(Folded(f"{variant.label}, seed {run.seed}", rows, is_open=not maps))
        else:
            shared.append(variant.label)
    note = (
        f"{', '.join(shared)}: clients keep no batch norm of their own (or only those of a cohort "
        "are at hand), so that all have the same."
    )
    about = [Paragraphs([_DISTANCES], "soft")] if maps else []
    return [
        *about,
        *maps,
        Paragraphs([note] if shared else [], "missing"),
        *_alphas(variants),
    ]


def _distances_of(run: Run) -> list[Block]:
    """Returns a run's heat maps, a row of two rounds for each kind; [] if it wrote no distances."""
    moments = {name: read_distances(run.folder, name) for name in _MOMENTS}
    written = {name: distances for name, distances in moments.items() if distances is not None}
    rows: list[Block] = []
    for kind, title in _TITLES.items() if written else ():
        values = [distances.values[kind] for distances in written.values()]
        finite = np.concatenate([matrix[np.isfinite(matrix)] for matrix in values])
        if len(finite):
            greatest = float(finite.max())  # one colour scale for both rounds
            maps = [
                HeatMap(
                    f"{title}, {_MOMENTS[name]}",
                    distances.layers,
                    distances.clients,
                    distances.values[kind],
                    greatest=greatest,
                )
                for name, distances in written.items()
            ]
            rows.append(Group(maps, "side"))
    return rows


def _alphas(variants: Sequence[Variant]) -> list[Block]:
    """Returns heat maps of the alphas' quantiles by layer, or a note on how to record them."""
    blocks: list[Block] = []
    for variant in variants:
        folder, label = variant.runs[0].folder, variant.label
        files = sorted((folder / "evaluations").glob("*-alphas-*.npz"))
        for path in files:
            alphas = read_arrays(path)
            title = f"{label}, {path.stem}: 0 takes the received statistics, 1 those of each sample"
            rows = np.array(
                [np.quantile(values, [*_QUANTILES.values()]) for values in alphas.values()]
            )
            blocks.append(HeatMap(title, list(_QUANTILES), list(alphas), rows.T, ".2f", 1.0))
        unseen = variant.runs[0].summary["accuracy"]["unseen"]
        if not files and any(_ADAPTER in row for row in unseen.values()):
            hint = (
                f"{label}: no alphas by layer were recorded; `fedjax-bn evaluate --workdir "
                f"{shlex.quote(str(folder))} --alphas` does, and then this report shows them."
            )
            blocks.append(Paragraphs([hint], "missing"))
    return [Heading("Alphas of the adapter by layer"), *blocks] if blocks else []


def data_section(variants: Sequence[Variant]) -> list[Block]:
    """Returns pictures of the first run's data, and its class counts.

    Training, validation and test samples have a table each, with a row for each client and a column
    for each class.
    """
    run = variants[0].runs[0]
    scored = samples_scored([Variant("", (run,))]).replace("samples", "images")
    blocks: list[Block] = []
    for name, title in _PICTURES.items():
        blocks += picture_of_run(run.folder / "plots" / f"{name}.png", title.format(scored))
    if not (data := run.data):  # of a server, which sees no data
        return blocks
    counted = "pixels" if data.get("masks") else "boxes" if data["boxes"] else "samples"
    blocks.append(Heading(f"{counted.capitalize()} by class and client"))
    if len(data["clients"]) < data["number"]:
        selection = f"{len(data['clients'])} of {data['number']:,} clients."
        blocks.append(Paragraphs([selection], "soft"))
    unseen = {f"{name} (unseen)": parts for name, parts in data["unseen"].items()}
    parts_of = data["clients"] | unseen
    for split in ("train", "validation", "test"):
        rows = {name: parts[split]["classes"] for name, parts in parts_of.items() if split in parts}
        if rows:
            heads, counts = data["classes"], np.array(list(rows.values()), float)
            if len(heads) > _MOST_CLASSES:
                heads = [f"least of {len(heads)} classes", "median", "most"]
                counts = np.stack([counts.min(1), np.median(counts, 1), counts.max(1)], axis=1)
            blocks.append(HeatMap(f"{split}: {counted}", list(rows), heads, counts, ",.0f"))
    return blocks


def absences_section(variants: Sequence[Variant]) -> list[Block]:
    """Returns a table of the clients and nodes that a server left out; [] without any.

    Only runs over Flower have such records.
    """
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for run in (run for variant in variants for run in variant.runs):
        for record in run.records:
            reasons = {**record.get("left_out", {}), **record.get("refused", {})}
            for client, reason in reasons.items():
                rounds.setdefault((str(run.folder), client, reason), []).append(record["round"])
    rows = [
        [*(TableCell(value, style="text") for value in key), len(numbers), numbers[0], numbers[-1]]
        for key, numbers in list(rounds.items())[:_MOST_ABSENCES]
    ]
    about = (
        "Clients whose upload was left out of a round, and nodes that were refused as clients: "
        f"{len(rows)} of {len(rounds)} rows."
    )
    heads = ("folder", "who", "why", "rounds", "first", "last")
    return [SortableTable(about, heads, rows)] if rows else []


def runs_section(variants: Sequence[Variant]) -> list[Block]:
    """Returns the runs' costs, changed keys, commands, notes, versions and devices."""
    runs = [(variant.label, run) for variant in variants for run in variant.runs]
    notes = list(dict.fromkeys(note for _, run in runs for note in run.about.get("notes", ())))
    commands = list(dict.fromkeys(_command(run) for _, run in runs))
    if (hidden := len(commands) - _MOST_COMMANDS) > 0:
        commands[_MOST_COMMANDS:] = [f"... and {hidden} more"]
    keys = ["key", *(variant.label for variant in variants)]
    return [
        Heading("Time and traffic"),
        SortableTable(
            "MB: what a client receives and sends in a round.",
            _COSTS,
            [_costs(label, run) for label, run in runs],
        ),
        Heading("Keys that differ from the defaults"),
        SortableTable("All other keys have their defaults.", keys, _changed_keys(variants)),
        Heading("Commands"),
        Commands(commands),
        *([Heading("Notes on the data and the start"), Paragraphs(notes)] if notes else []),
        Heading("Versions and devices"),
        Paragraphs(list(dict.fromkeys(_machine(run) for _, run in runs))),
    ]


def _costs(label: str, run: Run) -> list[object]:
    """Returns a run's row of `_COSTS`."""
    summary, sent = run.summary, run.summary.get("traffic", {})
    return [
        *(label, run.seed, run.target or "none"),
        *(summary["rounds"], summary["selected_round"]),
        f"{summary['seconds_per_round']:.3g}",
        f"{sum(record['seconds'] for record in run.records) / 60:.1f}",
        f"{summary['compile_seconds']:.3g}",
        f"{summary['samples_per_second']:.0f}",
        *(f"{sent[way] / 1e6:.2f}" if way in sent else "" for way in ("down", "up")),
        TableCell(run.folder, style="text"),
    ]


def _changed_keys(variants: Sequence[Variant]) -> list[list[object]]:
    """Returns (key, its values in each variant) of the keys that are not at their defaults."""
    configs = [[run.config for run in variant.runs] for variant in variants]
    flat = [config for group in configs for config in group]
    rows: list[list[object]] = []
    for key in sorted({k for config in flat for k in config if defaults().get(k) != config[k]}):
        # seeds and targets of one variant may have several values
        texts = [
            " | ".join(dict.fromkeys(spell(config.get(key)) for config in group))
            for group in configs
        ]
        if len(set(texts)) == 1:
            texts[1:] = ["same"] * (len(texts) - 1)
        rows.append([key, *(TableCell(value, style="text") for value in texts)])
    return rows


def _machine(run: Run) -> str:
    """Returns the versions and devices of a run as a sentence."""
    machine = run.about.get("machine", {})
    versions = ", ".join(f"{name} {n}" for name, n in run.about.get("versions", {}).items())
    parts = [machine.get(key) for key in ("device_kind", "cpu", "cores", "mesh")]
    hardware = ", ".join(str(part) for part in parts if part)
    devices = ", ".join(run.about.get("devices", ()))
    return f"{versions or 'versions unknown'}; on {devices} ({hardware})"


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
