"""The report's sections on predictions: measures beyond the score, confusions, mistakes, masks."""

import io
from collections.abc import Mapping, Sequence
from itertools import chain, islice

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from fedjax_bn.data.domain import part_of_all
from fedjax_bn.report.blocks import TableCell, block, heat_map, picture
from fedjax_bn.report.finished_runs import Run, Variant, samples_scored
from fedjax_bn.report.results import MEAN
from fedjax_bn.tasks.figures import on_plot, png
from fedjax_bn.tasks.segmentation.overlays import overlays
from fedjax_bn.training.evaluation.answers import AnsweredMasks, Mistake
from fedjax_bn.training.evaluation.plots import of_part
from fedjax_bn.training.score_tables import heading

# name in a summary -> (column head, number format, whether more is better)
_MEASURES = {
    "balanced_accuracy": ("balanced accuracy %", ".1f", True),
    "auc": ("AUC", ".3f", True),
    "loss": ("cross entropy", ".3f", False),
    "ece": ("calibration error %", ".1f", False),
    "iou": ("IoU %", ".1f", True),
    "hd95_mm": ("HD95 mm", ".2f", False),
    "hd95_pixels": ("HD95 pixels", ".2f", False),
    "assd_mm": ("ASSD mm", ".2f", False),
    "assd_pixels": ("ASSD pixels", ".2f", False),
    "undefined": ("distances undefined", ".1f", False),
}
_WIDE = 20  # classes whose confusions are a matrix; for more, the most frequent pairs are listed
_PAIRS = 15
_ROWS = 12  # clients, or domains and adaptations, whose mistakes are shown
_BOXES = 16  # clients of a plot of Dice, and as many domains with adaptations
_MASKED_RUNS = 6  # whose pictures of masks are shown
_PICTURED = 8  # clients of such a picture, and as many domains with adaptations
# label -> measure -> column -> values of the seeds
_Rows = dict[str, dict[str, dict[str, list[float]]]]


def forms_of_measures(classes: Sequence[str]) -> dict[str, tuple[str, str, bool]]:
    """Returns `_MEASURES` with the Dice of each class but the background, which is the first."""
    named = enumerate(classes[1:], start=1)
    dice = {f"dice_{number}": (f"Dice of {name} %", ".1f", True) for number, name in named}
    return dice | _MEASURES


def measures_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns a table of all measures, and for each measure one by client and by unseen domain."""
    run = variants[0].runs[0]
    inside, outside = _measures_of(variants)
    if run.score not in ("accuracy", "Dice") or not (inside or outside):
        return []
    forms = forms_of_measures(run.data.get("classes", []))
    clients, domains = _whose(variants, "internal"), _whose(variants, "unseen")
    overview = [block("explanation", run.score, samples_scored(variants))]
    for whom, rows in ((f"{clients}, their mean", inside), (domains, outside)):
        means = {  # the recorded mean over clients; unseen domains have none: the mean over all
            label: {n: c.get(MEAN) or [*chain(*c.values())] for n, c in measures.items()}
            for label, measures in rows.items()
        }
        recorded = {name for measures in rows.values() for name in measures}
        overview += _table(whom, means, {n: form for n, form in forms.items() if n in recorded})
    details = []
    for name, (head, form, is_gain) in forms.items():
        for whom, rows in ((clients, inside), (domains, outside)):
            scores = {label: values[name] for label, values in rows.items() if name in values}
            columns = {
                column: (column, form, is_gain) for values in scores.values() for column in values
            }
            details += _table(f"{head}, {whom}", scores, columns)
    return [*overview, block("folded", "By client and domain", details)]


def _whose(variants: Sequence[Variant], whom: str) -> str:
    """Returns "internal clients" or "unseen domains", and their samples if not test samples."""
    part = part_of_all(run.part(whom) for variant in variants for run in variant.runs)
    name = {"internal": "internal clients", "unseen": "unseen domains"}[whom]
    return name if part == "test" else f"{name} ({part} samples)"


def _measures_of(variants: Sequence[Variant]) -> tuple[_Rows, _Rows]:
    """Returns the measures of the internal clients, the mean first, and of the unseen domains."""
    inside: _Rows = {}
    outside: _Rows = {}

    def add(rows: _Rows, label: str, name: str, column: str, value: float | None) -> None:
        if value is not None and np.isfinite(value):
            columns = rows.setdefault(label, {}).setdefault(name, {})
            columns.setdefault(column, []).append(value)

    for label, run in ((variant.label, run) for variant in variants for run in variant.runs):
        measures = run.summary.get("measures", {})
        for name, values in measures.get("internal", {}).items():
            for column in sorted(values, key=lambda column: column != MEAN):
                add(inside, label, name, column, values[column])
        for domain, rows in measures.get("unseen", {}).items():
            for adaptation, values in rows.items():
                for name, value in values.items():
                    add(outside, f"{label} [{adaptation}]", name, domain, value)
    return inside, outside


def _table(
    caption: str,
    rows: Mapping[str, Mapping[str, list[float]]],
    columns: Mapping[str, tuple[str, str, bool]],
) -> list[Markup]:
    """Returns a table of means over seeds, the best of each column bold; [] without rows.

    `rows` has label -> column -> values of the seeds, `columns` the forms of `forms_of_measures`.
    """
    if not rows:
        return []
    cells: list[list[object]] = [[label] for label in rows]
    for column, (_, form, is_gain) in columns.items():
        means = [float(np.mean(row[column])) if column in row else None for row in rows.values()]
        numbers = [mean for mean in means if mean is not None]
        best = (max if is_gain else min)(numbers) if len(numbers) > 1 else None
        for line, mean in zip(cells, means, strict=True):
            line.append("" if mean is None else TableCell(f"{mean:{form}}", best=mean == best))
    heads = ["", *(head for head, _, _ in columns.values())]
    return [block("sortable_table", caption[:1].upper() + caption[1:], heads, cells)]


def mistakes_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns accuracy by class, confusions and mistakes, each from a variant's first seed."""
    runs = [(variant, variant.runs[0]) for variant in variants if variant.runs[0].answers]
    if not runs or runs[0][1].score != "accuracy":
        return []
    names = _class_names(runs[0][1])
    recall = {}
    folds: list[Markup] = []
    for variant, run in runs:
        for adaptation in dict.fromkeys(adaptation for _, adaptation in run.answers):
            whom = f"unseen [{adaptation}]" if adaptation else of_part("internal", run.part())
            if (matrix := _summed_confusions(run, adaptation)) is not None:
                count = matrix.sum(1)
                percent = 100 * matrix.diagonal() / np.maximum(count, 1)
                recall[f"{variant.label}, {whom}"] = np.where(count > 0, percent, np.nan)
        clients = f"{_whose([variant], 'internal')} together"
        matrices = _confusions(clients, _summed_confusions(run, ""), names)
        unseen = [(key, answered) for key, answered in run.answers.items() if key[1]]
        for key, answered in unseen[:_ROWS]:
            matrices += _confusions(heading(key), answered.confusion, names)
        inside = [block("group", matrices, "side"), *_worst_mistakes(run, names)]
        title = f"{variant.label}, seed {run.seed}: classes (rows) by answers (columns)"
        folds.append(block("folded", title, inside, is_open=not folds))
    if recall:
        title = "Accuracy by class in percent, the samples of all clients or domains together"
        return [heat_map(title, [*recall], names, np.stack([*recall.values()]), "{:.0f}"), *folds]
    return folds


def _class_names(run: Run) -> list[str]:
    """Returns the names of the classes; those without a name are called by their numbers."""
    names = run.data.get("classes", [])
    sizes = [0]
    for answered in run.answers.values():
        sizes += [] if answered.confusion is None else [len(answered.confusion)]
        sizes += [1 + max(mistake.label, mistake.answer) for mistake in answered.mistakes]
    return [*names, *map(str, range(len(names), max(sizes)))]


def _summed_confusions(run: Run, adaptation: str) -> np.ndarray | None:
    """Returns the summed confusions i64[C, C] of all clients, or of all unseen domains, or None."""
    rows = [answered.confusion for key, answered in run.answers.items() if key[1] == adaptation]
    matrices = [matrix for matrix in rows if matrix is not None]
    return np.sum(matrices, axis=0) if matrices else None


def _confusions(title: str, matrix: np.ndarray | None, names: Sequence[str]) -> list[Markup]:
    if matrix is None:
        return []
    if len(names) <= _WIDE:
        # NaN leaves a cell empty, so that the confusions stand out
        values = np.where(matrix > 0, matrix, np.nan).astype(float)
        np.fill_diagonal(values, matrix.diagonal())
        return [heat_map(title, names, names, values, "{:.0f}")]
    mistaken = matrix.copy()
    np.fill_diagonal(mistaken, 0)
    order = np.argsort(-mistaken, axis=None, kind="stable")[:_PAIRS]
    pairs = zip(*np.unravel_index(order, mistaken.shape), strict=True)
    rows = [(names[i], names[j], mistaken[i, j]) for i, j in pairs if mistaken[i, j]]
    return [
        block("sortable_table", f"{title}: most frequent confusions", ["is", "answer", "n"], rows)
    ]


def _worst_mistakes(run: Run, names: Sequence[str]) -> list[Markup]:
    """Returns the pictures of the most confident mistakes of some clients and domains."""
    blocks = []
    for (name, adaptation), answered in list(run.answers.items())[:_ROWS]:
        if answered.mistakes:
            whom = f"{name} [{adaptation}]" if adaptation else of_part(name, run.part())
            pictures = [_picture(mistake, names) for mistake in answered.mistakes]
            blocks += [block("paragraphs", [whom], "soft"), block("group", pictures, "mistakes")]
    return [block("heading", "Most confident mistakes"), *blocks] if blocks else []


def _picture(mistake: Mistake, names: Sequence[str]) -> Markup:
    """Returns a sample u8[H, W, 1 or 3], or f[F] as a strip, with its label and the answer."""
    pixels = mistake.picture
    if pixels.ndim == 1:
        low, high = float(pixels.min()), float(pixels.max())
        pixels = ((pixels - low) / ((high - low) or 1) * 255).astype(np.uint8)[None, :, None]
        # eight times as wide as high
        pixels = np.repeat(pixels, max(1, pixels.shape[1] // 8), axis=0)
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
    answer = f"{names[mistake.answer]} ({100 * mistake.confidence:.0f} %)"
    title = f"sample {mistake.sample} is {names[mistake.label]}, answered {answer}"
    return picture(title, file.getvalue(), (answer, f"is {names[mistake.label]}"))


def masks_section(variants: Sequence[Variant]) -> list[Markup]:
    """Returns pictures of masks and the distributions of Dice; [] for runs without masks."""
    runs = [(variant.label, variant.runs[0]) for variant in variants if variant.runs[0].masks]
    if not runs:
        return []
    about = block("explanation", "spread", samples_scored(variants))
    blocks = [block("heading", "Dice by volume"), about]
    for label, run in runs:
        blocks.append(picture(f"Dice by volume, {label}, seed {run.seed}", _draw_spread(run)))
    blocks += [block("heading", "Truth and prediction"), block("explanation", "truth")]
    for number, (label, run) in enumerate(runs[:_MASKED_RUNS]):
        title, masks = f"{label}, seed {run.seed}", _labelled(run, _PICTURED)
        rows = {name: answered.pictures for name, answered in masks.items()}
        drawn = overlays(rows, run.data.get("classes", []))
        inside = [picture(f"Masks of {title}", drawn)]
        blocks.append(block("folded", title, inside, is_open=number == 0))
    return blocks


def _labelled(run: Run, most: int) -> dict[str, AnsweredMasks]:
    """Returns label -> the masks of at most `most` clients, and as many unseen domains."""
    answered = {key: masks for key, masks in run.masks.items() if masks.pictures}
    inside = {of_part(key[0], run.part()): answered[key] for key in answered if not key[1]}
    outside = {heading(key): answered[key] for key in answered if key[1]}
    return dict(chain(islice(inside.items(), most), islice(outside.items(), most)))


def _draw_spread(run: Run) -> bytes:
    """Draws Dice by volume as PNG: a box and a point per volume, for each client."""
    answered = _labelled(run, _BOXES)
    names, values = [*answered], [masks.dice.mean(-1) * 100 for masks in answered.values()]
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
