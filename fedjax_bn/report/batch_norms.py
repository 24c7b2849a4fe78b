"""Batch norm in a report: how far clients differ by layer, and the alphas of FedIG-A's adapter.

`fedjax-bn evaluate --alphas` records the alphas.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.report.finished_runs import Variant
from fedjax_bn.report.html_parts import folded, heat_map, joined, paragraphs, side_by_side
from fedjax_bn.run.files.workdir import not_readable, read_arrays
from fedjax_bn.run.training.batch_norm_log import read_distances

_ABOUT = (
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


def batch_norms(variants: Sequence[Variant]) -> str:
    """Returns heat maps of the first seed of each variant whose clients keep batch norms."""
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
                most = float(finite.max())  # the same colours at both moments
                maps = (
                    heat_map(f"{title}, {_MOMENTS[name]}", one.layers, one.clients, values[name],
                             ".2g", most)
                    for name, one in found.items()
                )  # fmt: skip
                rows.append(side_by_side(maps))
        parts.append(folded(f"{variant.label}, seed {run.seed}", "".join(rows), not parts))
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
    about = paragraphs([_ABOUT] * bool(parts), "soft")
    return joined(about, *parts, paragraphs(notes, "missing"), _alphas(variants))


def _alphas(variants: Sequence[Variant]) -> str:
    """A heat map for each file: quantiles over the samples, a column a layer; or how to get it."""
    parts = []
    for variant in variants:
        run = variant.runs[0]
        files = sorted((run.folder / "evaluations").glob("*-alphas-*.npz"))
        parts += [_alpha_map(variant.label, path) for path in files]
        served = [t for row in run.summary["accuracy"]["unseen"].values() for t in row]
        if not files and _ADAPTER in served:
            text = (
                f"{variant.label}: no alphas by layer were recorded; `fedjax-bn evaluate --workdir "
                f"{shlex.quote(str(run.folder))} --alphas` does, and then this report shows them."
            )
            parts.append(paragraphs([text], "missing"))
    return "\n".join(["<h3>Alphas of the adapter by layer</h3>", *parts]) if parts else ""


def _alpha_map(label: str, path: Path) -> str:
    values = read_arrays(path)
    try:
        rows = [np.quantile(values[layer], [*_QUANTILES.values()]) for layer in values]
    except (ValueError, IndexError, TypeError) as error:
        raise not_readable(path, error) from error
    title = f"{label}, {path.stem}: 0 takes the received statistics, 1 those of each sample"
    return heat_map(title, list(_QUANTILES), list(values), np.array(rows).T, ".2f", 1.0)
