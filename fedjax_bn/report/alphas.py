"""Alphas of the zero-shot adapter by layer, where `fedjax-bn evaluate --alphas` recorded them."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_bn.report import html_parts
from fedjax_bn.report.charts import heat_map
from fedjax_bn.report.variants import Variant
from fedjax_bn.run.files.workdir import not_readable, read_arrays

_ADAPTER = "zero_shot_adapter"
_QUANTILES = {"10 %": 0.1, "median": 0.5, "90 %": 0.9}


def alphas(variants: Sequence[Variant]) -> str:
    """A heat map a file: quantiles over the samples, a column a layer; or how to get it."""
    parts = []
    for variant in variants:
        folder = variant.runs[0].folder
        files = sorted((folder / "evaluations").glob("*-alphas-*.npz"))
        parts += [_map(variant.label, path) for path in files]
        served = [t for row in variant.runs[0].summary["accuracy"]["unseen"].values() for t in row]
        if not files and _ADAPTER in served:
            text = (
                f"{variant.label}: no alphas by layer were recorded; `fedjax-bn evaluate --workdir "
                f"{shlex.quote(str(folder))} --alphas` does, and then this report shows them."
            )
            parts.append(html_parts.paragraphs([text], "missing"))
    return "\n".join(["<h3>Alphas of the adapter by layer</h3>", *parts]) if parts else ""


def _map(label: str, path: Path) -> str:
    values = read_arrays(path)
    try:
        rows = [np.quantile(values[layer], [*_QUANTILES.values()]) for layer in values]
    except (ValueError, IndexError, TypeError) as error:
        raise not_readable(path, error) from error
    title = f"{label}, {path.stem}: 0 takes the received statistics, 1 those of each sample"
    return heat_map(title, list(_QUANTILES), list(values), np.array(rows).T, ".2f", 1.0)
