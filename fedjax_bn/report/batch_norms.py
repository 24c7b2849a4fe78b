"""Batch norm, the subject itself: how far clients lie apart by layer, alphas of the adapter.

`fedjax-bn evaluate --alphas` records the alphas.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.arguments.text import on_page
from fedjax_bn.report import html_parts
from fedjax_bn.report.charts import heat_map
from fedjax_bn.report.finished_runs import Run
from fedjax_bn.report.variants import Variant
from fedjax_bn.run.files.workdir import not_readable, read_arrays
from fedjax_bn.run.training.batch_norm_log import KINDS, Distances, read_distances

_ABOUT = (
    "How far each client's batch norm lies from the mean over clients, root mean square over "
    "channels: of means in standard deviations of the layer, of standard deviations as logarithms "
    "(0.1 is about ten percent), of scale and bias as they are. Before training all clients have "
    "one model, and every distance is 0."
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


def batch_norms(variants: Sequence[Variant]) -> str:
    """Heat maps of the first seed of each variant that keeps batch norms at its clients."""
    parts, shared, missing = [], [], []
    for variant in variants:
        run = variant.runs[0]
        found = {name: read_distances(run.folder, name) for name in _MOMENTS}
        known = {name: one for name, one in found.items() if one is not None}
        if known:
            parts.append(_maps(variant.label, run, known, is_open=not parts))
        else:
            (shared if run.data else missing).append(variant.label)
    notes = []
    if shared:
        notes.append(
            f"{', '.join(shared)}: clients keep no batch norm of their own (or its rows lie on the "
            "disk), so that all have the same."
        )
    if missing:
        notes.append(
            f"{', '.join(missing)}: no distances were written, as versions before 0.2 did not. "
            "Train again with this version to see them."
        )
    about = html_parts.paragraphs([_ABOUT] * bool(parts), "soft")
    return "\n".join(filter(None, (about, *parts, html_parts.paragraphs(notes, "missing"))))


def _maps(label: str, run: Run, found: dict[str, Distances], is_open: bool) -> str:
    """What a run's clients keep, a pair of heat maps a kind."""
    rows = []
    for kind in KINDS:
        known = {name: one.values[kind] for name, one in found.items()}
        if not any(np.isfinite(values).any() for values in known.values()):
            continue
        most = max(float(np.nanmax(v)) for v in known.values() if np.isfinite(v).any())
        pair = "".join(f"<div>{_map(kind, name, found[name], most)}</div>" for name in known)
        rows.append(f'<div class="side">{pair}</div>')
    title = on_page(f"{label}, seed {run.summary['seed']}")
    mark = " open" if is_open else ""
    return f"<details{mark}><summary>{title}</summary>{''.join(rows)}</details>"


def _map(kind: str, name: str, one: Distances, most: float) -> str:
    title = f"{_TITLES[kind]}, {_MOMENTS[name]}"
    return heat_map(title, one.layers, one.clients, one.values[kind], ".2g", most)


def alphas(variants: Sequence[Variant]) -> str:
    """A heat map a file: quantiles over the samples, a column a layer; or how to get it."""
    parts = []
    for variant in variants:
        folder = variant.runs[0].folder
        files = sorted((folder / "evaluations").glob("*-alphas-*.npz"))
        parts += [_alpha_map(variant.label, path) for path in files]
        served = [t for row in variant.runs[0].summary["accuracy"]["unseen"].values() for t in row]
        if not files and _ADAPTER in served:
            text = (
                f"{variant.label}: no alphas by layer were recorded; `fedjax-bn evaluate --workdir "
                f"{shlex.quote(str(folder))} --alphas` does, and then this report shows them."
            )
            parts.append(html_parts.paragraphs([text], "missing"))
    return "\n".join(["<h3>Alphas of the adapter by layer</h3>", *parts]) if parts else ""


def _alpha_map(label: str, path: Path) -> str:
    values = read_arrays(path)
    try:
        rows = [np.quantile(values[layer], [*_QUANTILES.values()]) for layer in values]
    except (ValueError, IndexError, TypeError) as error:
        raise not_readable(path, error) from error
    title = f"{label}, {path.stem}: 0 takes the received statistics, 1 those of each sample"
    return heat_map(title, list(_QUANTILES), list(values), np.array(rows).T, ".2f", 1.0)
