"""How runs were made: their keys, commands, versions, devices, notes on data, time and traffic."""

import html
import shlex
from collections.abc import Sequence
from functools import cache

from fedjax_bn.report.finished_runs import Run, Variant, as_json, defaults, spell
from fedjax_bn.report.html_parts import cell, joined, paragraphs, sortable
from fedjax_bn.run.config.file import packaged_configs, read

_MOST_COMMANDS = 12
_COSTS = (
    *("run", "seed", "target", "rounds", "selected", "s a round", "training min"),
    *("compiled in s", "samples a s", "MB down", "MB up", "folder"),
)


def about_runs(variants: Sequence[Variant]) -> str:
    """Returns tables of cost and of keys, the commands, and all else of interest, as HTML."""
    runs = [(variant.label, run) for variant in variants for run in variant.runs]
    notes = list(dict.fromkeys(note for _, run in runs for note in run.about.get("notes", ())))
    commands = list(dict.fromkeys(_command(run) for _, run in runs))
    if (more := len(commands) - _MOST_COMMANDS) > 0:
        commands[_MOST_COMMANDS:] = [f"... and {more} more"]
    costs = [_costs(label, run) for label, run in runs]
    heads = ["key", *(variant.label for variant in variants)]
    return joined(
        "<h3>Time and traffic</h3>",
        sortable("MB: what a client receives and sends in a round.", _COSTS, costs),
        "<h3>Keys that differ from the defaults</h3>",
        sortable("All other keys have their defaults.", heads, _keys(variants)),
        "<h3>Commands</h3>",
        f"<pre>{html.escape(chr(10).join(commands))}</pre>",
        "<h3>Notes on the data and the start</h3>" if notes else "",
        paragraphs(notes),
        "<h3>Versions and devices</h3>",
        paragraphs(list(dict.fromkeys(_machine(run) for _, run in runs))),
    )


def _costs(label: str, run: Run) -> list[object]:
    summary, sent = run.summary, run.summary.get("traffic", {})
    return [
        *(label, run.seed, run.target or "none", summary["rounds"], summary["selected_round"]),
        f"{summary['seconds_per_round']:.3g}",
        f"{sum(record['seconds'] for record in run.records) / 60:.1f}",
        f"{summary['compile_seconds']:.3g}",
        f"{summary['samples_per_second']:.0f}",
        *(f"{sent[way] / 1e6:.2f}" if way in sent else "" for way in ("down", "up")),
        cell(run.folder, kind="text"),
    ]


def _keys(variants: Sequence[Variant]) -> list[list[object]]:
    """A row a key, a column a variant: all values that its seeds and targets have."""
    configs = [[run.config for run in variant.runs] for variant in variants]
    every = [one for each in configs for one in each]
    changed = {key for one in every for key in one if defaults().get(key) != one[key]}
    rows = []
    for key in sorted(changed):
        texts = [" | ".join(dict.fromkeys(spell(one[key]) for one in each)) for each in configs]
        if len(set(texts)) == 1:
            texts[1:] = ["same"] * (len(texts) - 1)
        rows.append([key, *(cell(text, kind="text") for text in texts)])
    return rows


def _command(run: Run) -> str:
    """Returns a command that makes a run's configuration, from the nearest packaged config."""
    config = run.config
    changes = {
        name: {key: value for key, value in config.items() if values.get(key) != value}
        for name, values in _packaged().items()
        # no argument makes a key empty that a config has set
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
    """Name of a packaged config -> its keys."""
    return {name: as_json(read(name)) for name in packaged_configs()}


def _machine(run: Run) -> str:
    """Versions and devices."""
    about, machine = run.about, run.about.get("machine", {})
    versions = ", ".join(f"{name} {number}" for name, number in about.get("versions", {}).items())
    keys = ("device_kind", "cpu", "cores", "mesh")
    what = ", ".join(str(machine[key]) for key in keys if machine.get(key))
    return f"{versions or 'versions unknown'}; on {', '.join(about.get('devices', ()))} ({what})"
