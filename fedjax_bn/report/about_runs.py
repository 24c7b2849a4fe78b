"""How runs were made: their keys, commands, versions, devices, notes on data, time and traffic."""

import shlex
from collections.abc import Sequence
from functools import cache

from fedjax_bn.report import html_parts
from fedjax_bn.report.finished_runs import Run
from fedjax_bn.report.variants import Variant, changed_keys, spell
from fedjax_bn.run.config.file import packaged_configs, read
from fedjax_bn.run.config.keys import flatten

_MOST_COMMANDS = 12


def about_runs(variants: Sequence[Variant]) -> str:
    """Tables of cost and of keys, the commands, and what else is known of the runs, as HTML."""
    runs = [(variant.label, run) for variant in variants for run in variant.runs]
    notes = dict.fromkeys(note for _, run in runs for note in run.about.get("notes", ()))
    commands = dict.fromkeys(command(run) for _, run in runs)
    shown = "\n".join(list(commands)[:_MOST_COMMANDS])
    more = len(commands) - _MOST_COMMANDS
    parts = [
        "<h3>Time and traffic</h3>",
        _costs(runs),
        "<h3>Keys that differ from the defaults</h3>",
        _keys(variants),
        "<h3>Commands</h3>",
        html_parts.preformatted(shown + (f"\n... and {more} more" if more > 0 else "")),
        "<h3>Notes on the data and the start</h3>" if notes else "",
        html_parts.paragraphs(list(notes)),
        "<h3>Versions and devices</h3>",
        html_parts.paragraphs(list(dict.fromkeys(_machine(run) for _, run in runs))),
    ]
    return "\n".join(filter(None, parts))


def _costs(runs: Sequence[tuple[str, Run]]) -> str:
    heads = (
        *("run", "seed", "target", "rounds", "selected", "s a round", "training min"),
        *("compiled in s", "samples a s", "MB down", "MB up", "folder"),
    )
    rows = []
    for label, run in runs:
        summary = run.summary
        sent = summary.get("traffic", {})
        seconds = sum(record["seconds"] for record in run.records)
        numbers = (
            f"{summary['seconds_per_round']:.3g}",
            f"{seconds / 60:.1f}",
            f"{summary['compile_seconds']:.3g}",
            f"{summary['samples_per_second']:.0f}",
            *(f"{sent[way] / 1e6:.2f}" if way in sent else "" for way in ("down", "up")),
        )
        texts = (summary["seed"], run.target or "none")
        counts = (summary["rounds"], summary["selected_round"])
        rows.append([html_parts.cell(one) for one in (label, *texts, *counts, *numbers)])
        rows[-1].append(html_parts.cell(run.folder, kind="text"))
    caption = "MB: what a client receives and sends in a round."
    return html_parts.sortable(caption, heads, rows)


def _keys(variants: Sequence[Variant]) -> str:
    """A row a key, a column a variant; of seeds and targets all values."""
    configs = [[changed_keys(run) for run in variant.runs] for variant in variants]
    keys = sorted({key for runs in configs for config in runs for key in config})
    rows = []
    for key in keys:
        values = [
            dict.fromkeys(spell(run.config[key]) for run in variant.runs) for variant in variants
        ]
        texts = [" | ".join(one) for one in values]
        if len(set(texts)) == 1:
            texts = texts[:1] + ["same"] * (len(texts) - 1)
        rows.append([html_parts.cell(key), *(html_parts.cell(t, kind="text") for t in texts)])
    heads = ["key", *(variant.label for variant in variants)]
    return html_parts.sortable("All other keys have their defaults.", heads, rows)


def command(run: Run) -> str:
    """A command that makes a run's configuration, from the nearest packaged config."""
    config = run.config
    changes = {
        name: {key: value for key, value in config.items() if values.get(key) != value}
        for name, values in _packaged().items()
        if all(config[key] is not None for key, value in values.items() if value is not None)
    }
    name = min(changes, key=lambda one: (len(changes[one]), one))
    told = [f"--config.{key}={_word(value)}" for key, value in sorted(changes[name].items())]
    return " ".join(("fedjax-bn", "--config", name, *told))


def _word(value: object) -> str:
    return shlex.quote(",".join(map(str, value)) if isinstance(value, list) else str(value))


@cache
def _packaged() -> dict[str, dict[str, object]]:
    """Name of a packaged config -> its keys."""
    return {
        name: {k: list(v) if isinstance(v, tuple) else v for k, v in flatten(read(name, ()))}
        for name in packaged_configs()
    }


def _machine(run: Run) -> str:
    """Versions and devices in a sentence."""
    about = run.about
    versions = ", ".join(f"{name} {number}" for name, number in about.get("versions", {}).items())
    machine = about.get("machine", {})
    what = ", ".join(
        str(machine[key]) for key in ("device_kind", "cpu", "cores", "mesh") if machine.get(key)
    )
    return f"{versions or 'versions unknown'}; on {', '.join(about.get('devices', ()))} ({what})"
