"""The report's HTML on masks: pictures with truth and prediction, and Dice by volume."""

import base64
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.arguments.text import on_page
from fedjax_bn.report.finished_runs import Run, Variant, samples_scored, sizes_of_masks
from fedjax_bn.report.html_parts import folded, joined, paragraphs, picture
from fedjax_bn.tasks.figures import on_plot, png
from fedjax_bn.training.evaluation.per_sample import of_part
from fedjax_bn.training.score_tables import heading

_MOST = 6  # runs whose pictures are shown
_COLUMNS = 16  # clients of a plot, and as many domains with adaptations
_PICTURES = (
    "The best, the median and the worst volume or image by Dice, of the selected round and the "
    "first seed. Left: the image with its true mask. Right: where the prediction is right, wrong "
    "or missed. A volume is shown by the slice with the most pixels in either mask."
)
_SPREAD = (
    "Dice by volume or image, in percent, mean over the classes without the background. A point is "
    "a volume, the box holds the middle half, and the line is the median."
)


def masks_section(variants: Sequence[Variant]) -> str:
    """Returns pictures of masks and the distributions of Dice; "" for runs without masks."""
    runs = [(variant.label, variant.runs[0]) for variant in variants if variant.runs[0].masks]
    if not runs:
        return ""
    scored = f"Dice is of {samples_scored(variants)}."
    about = " ".join(filter(None, (_SPREAD, scored, sizes_of_masks(variants))))
    parts = ["<h3>Dice by volume</h3>", paragraphs([about], "soft")]
    for label, run in runs:
        data = base64.b64encode(_spread(run)).decode()
        name = on_page(f"Dice by volume, {label}, seed {run.seed}")
        parts.append(f'<img alt="{name}" title="{name}" src="data:image/png;base64,{data}">')
    parts += ["<h3>Truth and prediction</h3>", paragraphs([_PICTURES], "soft")]
    if len(runs) > _MOST:
        parts.append(paragraphs([f"{_MOST} of {len(runs)} runs are shown."], "soft"))
    for number, (label, run) in enumerate(runs[:_MOST]):
        title = f"{label}, seed {run.seed}"
        inside = picture(run.folder / "plots" / "masks.png", f"Masks of {title}")
        parts.append(folded(title, inside, is_open=not number))
    return joined(*parts)


def _spread(run: Run) -> bytes:
    """Draws Dice by volume as PNG: a box and a point per volume, for each client."""
    kept = [[k for k in run.masks if bool(k[1]) == unseen][:_COLUMNS] for unseen in (False, True)]
    rows = {
        heading(key) if key[1] else of_part(key[0], run.part()): run.masks[key].dice.mean(-1) * 100
        for keys in kept
        for key in keys
    }
    figure = Figure(figsize=(max(5, 0.7 * len(rows) + 1.5), 3.6), layout="constrained")
    axes = figure.subplots()
    values = [*rows.values()]
    axes.boxplot(values, widths=0.6, showfliers=False, medianprops={"color": "black"})
    random = np.random.default_rng(0)  # so that equal runs draw equal plots
    for place, one in enumerate(values, start=1):
        across = place + random.uniform(-0.2, 0.2, len(one))
        axes.plot(across, one, ".", markersize=4, alpha=0.5)
    names = [on_plot(name) for name in rows]
    axes.set_xticks(range(1, len(rows) + 1), names, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="Dice, %", ylim=(-3, 103))
    axes.grid(axis="y", alpha=0.3)
    return png(figure)
