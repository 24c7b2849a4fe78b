"""The report's sections on predictions: measures beyond accuracy, confusions, worst mistakes."""

import io
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from PIL import Image

from fedjax_bn.report.blocks import (
    Block,
    Folded,
    Group,
    Heading,
    HeatMap,
    Paragraphs,
    Picture,
    SortableTable,
    TableCell,
)
from fedjax_bn.report.finished_runs import (
    Run,
    Variant,
    samples_scored,
    sizes_of_masks,
    whose,
)
from fedjax_bn.report.results import MEAN
from fedjax_bn.training.evaluation.answers import Mistake
from fedjax_bn.training.evaluation.per_sample import of_part

# name in a summary -> (column head, number format, whether more is better)
MEASURES = {
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
_ABOUT = {
    "accuracy": "Measures of {} in the selected round, means over seeds, best bold. "
    "Balanced accuracy is the mean over classes. AUC is the area under the ROC curve, for more "
    "than two classes the mean of each against all others. The calibration error (ECE) has 15 "
    "bins.",
    "Dice": "Measures of {} in the selected round, means over volumes, then over seeds, "
    "best bold. HD95 is the greater of the 95th percentiles of the distances from either surface "
    "to the other, ASSD their mean. Both are undefined where one or both masks lack a class: such "
    "volumes and classes are counted in a column of their own, and are not part of the means, so "
    "that distances compare fairly only where these counts agree.",
}
_WIDE = 20  # classes whose confusions are a matrix; for more, the most frequent pairs are listed
_PAIRS = 15
_ROWS = 12  # clients, or domains and adaptations, whose mistakes are shown
# label -> measure -> column -> values of the seeds
_Rows = dict[str, dict[str, dict[str, list[float]]]]


def measures_section(variants: Sequence[Variant]) -> list[Block]:
    """Returns a table of all measures, and for each measure one by client and by unseen domain."""
    run = variants[0].runs[0]
    inside, outside = _measures_of(variants)
    if run.score not in _ABOUT or not (inside or outside):
        return []
    forms = measures_of_classes(run.data.get("classes", [])) | MEASURES
    about = _ABOUT[run.score].format(samples_scored(variants))
    about = " ".join(filter(None, (about, sizes_of_masks(variants))))
    clients, domains = whose(variants), whose(variants, "unseen")
    overview: list[Block] = [Paragraphs([about], "soft")]
    for whom, rows in ((f"{clients}, their mean", inside), (domains, outside)):
        means = {  # the recorded mean over clients; unseen domains have none: the mean over all
            label: {n: c.get(MEAN) or [*chain(*c.values())] for n, c in measures.items()}
            for label, measures in rows.items()
        }
        recorded = {name for measures in rows.values() for name in measures}
        columns = {name: form for name, form in forms.items() if name in recorded}
        overview += _table(f"{whom[:1].upper()}{whom[1:]}", means, columns)
    details: list[Block] = []
    for name, (head, form, is_gain) in forms.items():
        for whom, rows in ((clients, inside), (domains, outside)):
            scores = {label: values[name] for label, values in rows.items() if name in values}
            columns = {
                column: (column, form, is_gain) for values in scores.values() for column in values
            }
            details += _table(f"{head[:1].upper()}{head[1:]}, {whom}", scores, columns)
    return [*overview, Folded("By client and domain", details)]


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


def measures_of_classes(classes: Sequence[str]) -> dict[str, tuple[str, str, bool]]:
    """Returns what `MEASURES` has, of the Dice of each class without the background."""
    named = enumerate(classes[1:], start=1)
    return {f"dice_{number}": (f"Dice of {name} %", ".1f", True) for number, name in named}


def _table(
    caption: str,
    rows: Mapping[str, Mapping[str, list[float]]],
    columns: Mapping[str, tuple[str, str, bool]],
) -> list[Block]:
    """Returns a table of means over seeds, the best of each column bold; [] without rows.

    Args:
      caption: the text above the table.
      rows: label -> column -> values of the seeds.
      columns: column -> (head, number format, whether more is better).
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
    return [SortableTable(caption, ["", *(head for head, _, _ in columns.values())], cells)]


def mistakes_section(variants: Sequence[Variant]) -> list[Block]:
    """Returns accuracy by class, confusions and mistakes, each from a variant's first seed."""
    runs = [(variant.label, variant.runs[0]) for variant in variants if variant.runs[0].answers]
    if not runs or runs[0][1].score != "accuracy":
        return []
    names = _class_names(runs[0][1])
    recall = {}
    for label, run in runs:
        for adaptation in dict.fromkeys(adaptation for _, adaptation in run.answers):
            whom = f"unseen [{adaptation}]" if adaptation else of_part("internal", run.part())
            if (matrix := _summed_confusions(run, adaptation)) is not None:
                count = matrix.sum(1)
                percent = 100 * matrix.diagonal() / np.maximum(count, 1)
                recall[f"{label}, {whom}"] = np.where(count > 0, percent, np.nan)
    blocks: list[Block] = []
    if recall:
        title = "Accuracy by class in percent, the samples of all clients or domains together"
        blocks.append(HeatMap(title, list(recall), names, np.stack([*recall.values()]), ".0f"))
    for number, (label, run) in enumerate(runs):
        title = f"{label}, seed {run.seed}: classes (rows) by answers (columns), worst mistakes"
        clients = f"{whose([Variant(label, (run,))])} together"
        matrices = _confusions(clients, _summed_confusions(run, ""), names)
        unseen = [(key, answered) for key, answered in run.answers.items() if key[1]]
        for (domain, adaptation), answered in unseen[:_ROWS]:
            matrices += _confusions(f"{domain} [{adaptation}]", answered.confusion, names)
        inside = [Group(matrices, "side"), *_worst_mistakes(run, names)]
        blocks.append(Folded(title, inside, is_open=number == 0))
    return blocks


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


def _confusions(title: str, matrix: np.ndarray | None, names: Sequence[str]) -> list[Block]:
    if matrix is None:
        return []
    if len(names) <= _WIDE:
        # NaN leaves a cell empty, so that the confusions stand out
        values = np.where(matrix > 0, matrix, np.nan).astype(float)
        np.fill_diagonal(values, matrix.diagonal())
        return [HeatMap(title, names, names, values, ".0f")]
    mistaken = matrix.copy()
    np.fill_diagonal(mistaken, 0)
    order = np.argsort(-mistaken, axis=None, kind="stable")[:_PAIRS]
    pairs = [np.unravel_index(place, mistaken.shape) for place in order]
    rows = [
        (names[label], names[answer], mistaken[label, answer])
        for label, answer in pairs
        if mistaken[label, answer]
    ]
    return [SortableTable(f"{title}: most frequent confusions", ["is", "answer", "n"], rows)]


def _worst_mistakes(run: Run, names: Sequence[str]) -> list[Block]:
    """Returns the pictures of the most confident mistakes of some clients and domains."""
    blocks: list[Block] = []
    for (name, adaptation), answered in list(run.answers.items())[:_ROWS]:
        if answered.mistakes:
            whom = f"{name} [{adaptation}]" if adaptation else of_part(name, run.part())
            pictures = [_picture(mistake, names) for mistake in answered.mistakes]
            blocks += [Paragraphs([whom], "soft"), Group(pictures, "mistakes")]
    return [Heading("Most confident mistakes"), *blocks] if blocks else []


def _picture(mistake: Mistake, names: Sequence[str]) -> Picture:
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
    return Picture(title, file.getvalue(), (answer, f"is {names[mistake.label]}"))
