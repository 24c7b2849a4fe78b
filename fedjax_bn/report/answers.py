"""The report's HTML on predictions: measures beyond accuracy, confusions, and worst mistakes."""

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from PIL import Image

from fedjax_bn.arguments.text import on_page
from fedjax_bn.report import html_parts
from fedjax_bn.report.finished_runs import Run, Variant
from fedjax_bn.report.html_parts import cell, folded, heat_map, joined, paragraphs, sortable
from fedjax_bn.report.results import MEAN
from fedjax_bn.training.evaluation.classes_answered import Mistake

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
    "accuracy": "Measures of test samples in the selected round, means over seeds, best bold. "
    "Balanced accuracy is the mean over classes. AUC is the area under the ROC curve, for more "
    "than two classes the mean of each against all others. The calibration error (ECE) has 15 "
    "bins.",
    "Dice": "Measures of test masks in the selected round, means over volumes, then over seeds, "
    "best bold. HD95 is the greater of the 95th percentiles of the distances from either surface "
    "to the other, ASSD their mean. Both are undefined where one or both masks lack a class: such "
    "volumes and classes are counted in a column of their own, and are not part of the means, so "
    "that distances compare fairly only where these counts agree.",
}
_NO_MEASURES = (
    "These runs wrote no measures beyond accuracy, as versions before 0.2 did not: train again "
    "with this version to have them."
)
_NO_ANSWERS = (
    "These runs wrote no answers (answers/internal.npz), as versions before 0.2 did not: train "
    "again with this version to see confusions, accuracies by class and the worst mistakes."
)
_WIDE = 20  # classes whose confusions are a matrix; for more, the most frequent pairs are listed
_PAIRS = 15
_ROWS = 12  # clients, or domains and adaptations, whose mistakes are shown
# label -> measure -> column -> values of the seeds
_Rows = dict[str, dict[str, dict[str, list[float]]]]


def measured(variants: Sequence[Variant]) -> str:
    """Returns a table of all measures, and for each measure one by client and by unseen domain."""
    first = variants[0].runs[0]
    if first.score not in _ABOUT:
        return ""
    inside: _Rows = {}
    outside: _Rows = {}

    def add(rows: _Rows, label: str, name: str, column: str, value: float | None) -> None:
        if value is not None and np.isfinite(value):
            columns = rows.setdefault(label, {}).setdefault(name, {})
            columns.setdefault(column, []).append(value)

    for label, run in ((variant.label, run) for variant in variants for run in variant.runs):
        known = run.summary.get("measures", {})
        for name, values in known.get("internal", {}).items():
            for column in sorted(values, key=lambda column: column != MEAN):
                add(inside, label, name, column, values[column])
        for domain, rows in known.get("unseen", {}).items():
            for text, values in rows.items():
                for name, value in values.items():
                    add(outside, f"{label} [{text}]", name, domain, value)
    if not inside and not outside:
        return paragraphs([_NO_MEASURES], "missing")
    forms = measures_of_classes(first.data.get("classes", [])) | MEASURES
    parts, details = [paragraphs([_ABOUT[first.score]], "soft")], []
    for whom, rows in (("Internal clients, their mean", inside), ("Unseen domains", outside)):
        means = {  # the recorded mean over clients; unseen domains have none: the mean over all
            label: {n: c.get(MEAN) or [*chain(*c.values())] for n, c in measures.items()}
            for label, measures in rows.items()
        }
        shown = {name for measures in rows.values() for name in measures}
        parts.append(_table(whom, means, {k: form for k, form in forms.items() if k in shown}))
    for name, (head, form, more) in forms.items():
        for whom, rows in (("internal clients", inside), ("unseen domains", outside)):
            own = {label: values[name] for label, values in rows.items() if name in values}
            heads = {column: (column, form, more) for values in own.values() for column in values}
            details.append(_table(f"{head[:1].upper()}{head[1:]}, {whom}", own, heads))
    return joined(*parts, folded("By client and domain", joined(*details)))


def measures_of_classes(classes: Sequence[str]) -> dict[str, tuple[str, str, bool]]:
    """Returns what `MEASURES` has, of the Dice of each class without the background."""
    named = enumerate(classes[1:], start=1)
    return {f"dice_{number}": (f"Dice of {name} %", ".1f", True) for number, name in named}


def _table(
    caption: str,
    rows: Mapping[str, Mapping[str, list[float]]],
    columns: Mapping[str, tuple[str, str, bool]],
) -> str:
    """Returns a table of means over seeds, the best of each column bold; "" without rows.

    Args:
      caption: the text above the table.
      rows: label -> column -> values of the seeds.
      columns: column -> (head, number format, whether more is better).
    """
    made = [[label] for label in rows]
    for column, (_, form, more) in columns.items():
        means = [float(np.mean(row[column])) if column in row else None for row in rows.values()]
        known = [mean for mean in means if mean is not None]
        best = (max if more else min)(known) if len(known) > 1 else None
        for line, mean in zip(made, means, strict=True):
            line.append("" if mean is None else cell(f"{mean:{form}}", best=mean == best))
    heads = ["", *(head for head, _, _ in columns.values())]
    return sortable(caption, heads, made) if made else ""


def mistakes(variants: Sequence[Variant]) -> str:
    """Returns accuracy by class, confusions and mistakes, each from a variant's first seed."""
    if variants[0].runs[0].score != "accuracy":
        return ""
    runs = [(variant.label, variant.runs[0]) for variant in variants if variant.runs[0].answers]
    if not runs:
        return paragraphs([_NO_ANSWERS], "missing")
    first = runs[0][1]
    known = first.data.get("classes", [])
    seen = [one.confusion.shape[0] for one in first.answers.values() if one.confusion is not None]
    seen += [1 + max(m.label, m.answer) for one in first.answers.values() for m in one.mistakes]
    # classes without a name are shown by number
    names = [*known, *map(str, range(len(known), max(seen, default=0)))]
    recall, parts = {}, []
    for label, run in runs:
        for adaptation in dict.fromkeys(adaptation for _, adaptation in run.answers):
            whom = f"unseen [{adaptation}]" if adaptation else "internal"
            if (matrix := _together(run, adaptation)) is not None:
                count = matrix.sum(1)
                percent = 100 * matrix.diagonal() / np.maximum(count, 1)
                recall[f"{label}, {whom}"] = np.where(count > 0, percent, np.nan)
    if recall:
        title = "Accuracy by class in percent, the samples of all clients or domains together"
        parts += [heat_map(title, list(recall), names, np.stack([*recall.values()]), ".0f")]
    for label, run in runs:
        title = f"{label}, seed {run.seed}: classes (rows) by answers (columns), worst mistakes"
        matrices = [_matrix("internal clients together", _together(run, ""), names)]
        unseen = [(key, one) for key, one in run.answers.items() if key[1]][:_ROWS]
        matrices += [_matrix(f"{name} [{text}]", one.confusion, names)
                     for (name, text), one in unseen]  # fmt: skip
        worst = []
        for (name, adaptation), one in list(run.answers.items())[:_ROWS]:
            if one.mistakes:
                head = paragraphs([f"{name} [{adaptation}]" if adaptation else name], "soft")
                pictures = "".join(_picture(mistake, names) for mistake in one.mistakes)
                worst.append(f'{head}<div class="mistakes">{pictures}</div>')
        below = "<h3>Most confident mistakes</h3>" + "\n".join(worst) if worst else ""
        parts.append(
            folded(title, joined(html_parts.side_by_side(matrices), below), is_open=run is first)
        )
    return "\n".join(parts)


def _together(run: Run, adaptation: str) -> np.ndarray | None:
    """Returns the summed confusions i64[C, C] of all clients, or of all unseen domains, or None."""
    rows = [one for key, one in run.answers.items() if key[1] == adaptation]
    known = [one.confusion for one in rows if one.confusion is not None]
    return np.sum(known, axis=0) if known else None


def _matrix(title: str, matrix: np.ndarray | None, names: Sequence[str]) -> str:
    if matrix is None:
        return ""
    if len(names) <= _WIDE:
        # NaN leaves a cell empty, so that the confusions stand out
        shown = np.where(matrix > 0, matrix, np.nan).astype(float)
        np.fill_diagonal(shown, matrix.diagonal())
        return heat_map(title, names, names, shown, ".0f")
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_PAIRS]
    pairs = (np.unravel_index(place, wrong.shape) for place in order)
    rows = [(names[own], names[answer], wrong[own, answer])
            for own, answer in pairs if wrong[own, answer]]  # fmt: skip
    return sortable(f"{title}: most frequent confusions", ["is", "answer", "n"], rows)


def _picture(one: Mistake, names: Sequence[str]) -> str:
    """Returns a figure of a sample u8[H, W, 1 or 3], or f[F] as a strip, with label and answer."""
    picture = one.picture
    if picture.ndim == 1:
        low, high = float(picture.min()), float(picture.max())
        picture = ((picture - low) / ((high - low) or 1) * 255).astype(np.uint8)[None, :, None]
        # eight times as wide as high
        picture = np.repeat(picture, max(1, picture.shape[1] // 8), axis=0)
    file = io.BytesIO()
    Image.fromarray(picture.squeeze(-1) if picture.shape[-1] == 1 else picture).save(file, "PNG")
    answer = f"{names[one.answer]} ({100 * one.confidence:.0f} %)"
    text = on_page(f"sample {one.sample} is {names[one.label]}, answered {answer}")
    data = base64.b64encode(file.getvalue()).decode()
    image = f'<img alt="{text}" src="data:image/png;base64,{data}">'
    caption = f"{on_page(answer)}<br>is {on_page(names[one.label])}"
    return f'<figure title="{text}">{image}<figcaption>{caption}</figcaption></figure>'
