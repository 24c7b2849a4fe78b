"""The data of a run as HTML: samples of each domain, and how many of each class clients have."""

from collections.abc import Sequence

import numpy as np

from fedjax_bn.report import html_parts
from fedjax_bn.report.charts import heat_map
from fedjax_bn.report.finished_runs import Run
from fedjax_bn.report.variants import Variant

_MOST_CLASSES = 40  # named in the table of counts
_PICTURES = {
    "samples": "What the clients see",
    "boxes": "Boxes found in test images, and those missed",
    "masked_features": "Features of two clients, before and behind their masks",
}


def data_section(variants: Sequence[Variant]) -> str:
    """Pictures of the first run's data, and its class counts with names."""
    run = variants[0].runs[0]
    pictures = [
        html_parts.picture(run.folder / "plots" / f"{name}.png", text)
        for name, text in _PICTURES.items()
    ]
    counts = _class_counts(run)
    if not counts:  # of a version that wrote no data.json
        path = run.folder / "plots" / "class_counts.png"
        counts = html_parts.picture(path, "Training samples by class and client")
    return "\n".join(filter(None, (*pictures, counts)))


def _class_counts(run: Run) -> str:
    """Tables of training and of test samples, a row a client and a column a class; or nothing."""
    if not run.data:
        return ""
    data = run.data
    what = "boxes" if data["boxes"] else "samples"
    parts = [f"<h3>{what.capitalize()} by class and client</h3>"]
    if len(data["clients"]) < data["number"]:
        few = f"{len(data['clients'])} of {data['number']:,} clients."
        parts.append(html_parts.paragraphs([few], "soft"))
    for split in ("train", "validation", "test"):
        clients = {n: one[split] for n, one in data["clients"].items() if split in one}
        outside = {f"{n} (unseen)": one[split] for n, one in data["unseen"].items() if split in one}
        rows = clients | outside
        if rows:
            parts.append(_table(f"{split}: {what}", rows, data["classes"]))
    return "\n".join(parts)


def _table(title: str, rows: dict[str, dict], classes: Sequence[str]) -> str:
    counts = np.array([row["classes"] for row in rows.values()], float)
    if len(classes) > _MOST_CLASSES:
        ends = np.stack([counts.min(1), np.median(counts, 1), counts.max(1)], axis=1)
        heads = [f"least of {len(classes)} classes", "median", "most"]
        return heat_map(title, list(rows), heads, ends, ".0f")
    return heat_map(title, list(rows), list(classes), counts, ".0f")
