"""The report's section on masks: pictures with truth and prediction, and Dice by volume."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.report.blocks import Block, Folded, Heading, Paragraphs, Picture, picture_of_run
from fedjax_bn.report.finished_runs import Run, Variant, samples_scored, sizes_of_masks
from fedjax_bn.tasks.figures import on_plot, png
from fedjax_bn.training.evaluation.per_sample import of_part
from fedjax_bn.training.score_tables import heading

_MOST_RUNS = 6  # whose pictures are shown
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


def masks_section(variants: Sequence[Variant]) -> list[Block]:
    """Returns pictures of masks and the distributions of Dice; [] for runs without masks."""
    runs = [(variant.label, variant.runs[0]) for variant in variants if variant.runs[0].masks]
    if not runs:
        return []
    scored = f"Dice is of {samples_scored(variants)}."
    about = " ".join(filter(None, (_SPREAD, scored, sizes_of_masks(variants))))
    blocks: list[Block] = [Heading("Dice by volume"), Paragraphs([about], "soft")]
    for label, run in runs:
        blocks.append(Picture(f"Dice by volume, {label}, seed {run.seed}", _draw_spread(run)))
    blocks += [Heading("Truth and prediction"), Paragraphs([_PICTURES], "soft")]
    if len(runs) > _MOST_RUNS:
        blocks.append(Paragraphs([f"{_MOST_RUNS} of {len(runs)} runs are shown."], "soft"))
    for number, (label, run) in enumerate(runs[:_MOST_RUNS]):
        title = f"{label}, seed {run.seed}"
        inside = picture_of_run(run.folder / "plots" / "masks.png", f"Masks of {title}")
        blocks.append(Folded(title, inside, is_open=number == 0))
    return blocks


def _draw_spread(run: Run) -> bytes:
    """Draws Dice by volume as PNG: a box and a point per volume, for each client."""
    inside = [key for key in run.masks if not key[1]][:_COLUMNS]
    outside = [key for key in run.masks if key[1]][:_COLUMNS]
    names = [of_part(name, run.part()) for name, _ in inside] + [heading(key) for key in outside]
    values = [run.masks[key].dice.mean(-1) * 100 for key in (*inside, *outside)]
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
