"""What classifiers confuse: accuracy by class, confusions, the worst mistakes with pictures."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from PIL import Image

from fedjax_bn.arguments.text import on_page
from fedjax_bn.report import html_parts
from fedjax_bn.report.charts import heat_map
from fedjax_bn.report.finished_runs import Run
from fedjax_bn.report.variants import Variant
from fedjax_bn.run.evaluation.answers_file import Answered, Mistake

_WIDE = 20  # classes whose confusions are a matrix; of more the most frequent pairs are told
_PAIRS = 15
_ROWS = 12  # clients, or domains and adaptations, whose mistakes are shown
_MISSING = (
    "These runs wrote no answers (answers/internal.npz), as versions before 0.2 did not: train "
    "again with this version to see confusions, accuracies by class and the worst mistakes."
)
_Answers = Mapping[tuple[str, str], Answered]


def mistakes(variants: Sequence[Variant]) -> str:
    """Accuracy by class of all variants; confusions and mistakes of each, by the first seed."""
    if variants[0].runs[0].score != "accuracy":
        return ""
    runs = [(variant.label, variant.runs[0]) for variant in variants if variant.runs[0].answers]
    if not runs:
        return html_parts.paragraphs([_MISSING], "missing")
    names = _class_names(runs[0][1])
    parts = [_by_class(runs, names)]
    for label, run in runs:
        inside = "\n".join(filter(None, (_confusions(run, names), _worst(run, names))))
        seed = f", seed {run.summary['seed']}"
        title = on_page(f"{label}{seed}: classes (rows) by answers (columns), worst mistakes")
        parts.append(f"<details{' open' * (run is runs[0][1])}><summary>{title}</summary>{inside}")
        parts.append("</details>")
    return "\n".join(parts)


def _class_names(run: Run) -> list[str]:
    """The names of the classes, numbers where they have none."""
    known = run.data.get("classes", [])
    seen = [one.confusion.shape[0] for one in run.answers.values() if one.confusion is not None]
    seen += [1 + max(m.label, m.answer) for one in run.answers.values() for m in one.mistakes]
    return [*known, *map(str, range(len(known), max(seen, default=0)))]


def _by_class(runs: Sequence[tuple[str, Run]], names: Sequence[str]) -> str:
    """A row a variant, of unseen domains an adaptation, and a column a class."""
    rows = {}
    for label, run in runs:
        rows[f"{label}, internal"] = _recall(_total(_inside(run.answers)))
        for _, adaptation in _outside(run.answers):
            of_it = {key: one for key, one in run.answers.items() if key[1] == adaptation}
            rows[f"{label}, unseen [{adaptation}]"] = _recall(_total(of_it))
    rows = {label: row for label, row in rows.items() if row is not None}
    if not rows:
        return ""
    title = "Accuracy by class in percent, the samples of all clients or domains together"
    return heat_map(title, list(rows), list(names), np.stack(list(rows.values())), ".0f")


def _inside(answers: _Answers) -> dict[tuple[str, str], Answered]:
    return {key: one for key, one in answers.items() if not key[1]}


def _outside(answers: _Answers) -> dict[tuple[str, str], Answered]:
    return {key: one for key, one in answers.items() if key[1]}


def _total(answers: _Answers) -> np.ndarray | None:
    """Confusions of all together, i64[C, C]; None where they are not known."""
    known = [one.confusion for one in answers.values() if one.confusion is not None]
    return np.sum(known, axis=0) if known else None


def _recall(matrix: np.ndarray | None) -> np.ndarray | None:
    """Percent of each class f[C], NaN of one without samples."""
    if matrix is None:
        return None
    count = matrix.sum(1)
    return np.where(count > 0, 100 * matrix.diagonal() / np.maximum(count, 1), np.nan)


def _confusions(run: Run, names: Sequence[str]) -> str:
    """A matrix of the internal clients together, and one of each unseen domain and adaptation."""
    parts = [_matrix("internal clients together", _total(_inside(run.answers)), names)]
    parts += [
        _matrix(f"{domain} [{adaptation}]", one.confusion, names)
        for (domain, adaptation), one in list(_outside(run.answers).items())[:_ROWS]
    ]
    return f'<div class="side">{"".join(f"<div>{part}</div>" for part in parts if part)}</div>'


def _matrix(title: str, matrix: np.ndarray | None, names: Sequence[str]) -> str:
    if matrix is None:
        return ""
    if len(names) <= _WIDE:
        shown = np.where(matrix > 0, matrix, np.nan).astype(float)
        np.fill_diagonal(shown, matrix.diagonal())
        return heat_map(title, names, names, shown, ".0f")
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_PAIRS]
    pairs = (np.unravel_index(place, wrong.shape) for place in order)
    rows = [
        [html_parts.cell(text) for text in (names[own], names[said], wrong[own, said])]
        for own, said in pairs
        if wrong[own, said]
    ]
    return html_parts.sortable(f"{title}: most frequent confusions", ["is", "answer", "n"], rows)


def _worst(run: Run, names: Sequence[str]) -> str:
    """The most confident mistakes of some clients and domains, in a row each."""
    rows = [
        f'<p class="soft">{on_page(_name(*key))}</p><div class="mistakes">{"".join(pictures)}</div>'
        for key, one in list(run.answers.items())[:_ROWS]
        if (pictures := list(_pictures(one.mistakes, names)))
    ]
    return "<h3>Most confident mistakes</h3>" + "\n".join(rows) if rows else ""


def _name(name: str, adaptation: str) -> str:
    return f"{name} [{adaptation}]" if adaptation else name


def _pictures(mistakes: Sequence[Mistake], names: Sequence[str]) -> Iterator[str]:
    for one in mistakes:
        said = f"{names[one.answer]} ({100 * one.confidence:.0f} %)"
        text = f"sample {one.sample} is {names[one.label]}, answered {said}"
        image = f'<img alt="{on_page(text)}" src="{_data_url(one.picture)}">'
        caption = f"{on_page(said)}<br>is {on_page(names[one.label])}"
        yield f'<figure title="{on_page(text)}">{image}<figcaption>{caption}</figcaption></figure>'


def _data_url(picture: np.ndarray) -> str:
    """A picture u8[H, W, 1 or 3] as PNG; a vector f[F] as a strip from its least to its most."""
    if picture.ndim == 1:
        low, high = float(picture.min()), float(picture.max())
        picture = ((picture - low) / ((high - low) or 1) * 255).astype(np.uint8)[None, :, None]
        picture = np.repeat(picture, max(1, picture.shape[1] // 8), axis=0)
    file = io.BytesIO()
    Image.fromarray(picture.squeeze(-1) if picture.shape[-1] == 1 else picture).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
