"""Keeps the answers of clients: their measures, and the files that a run's folder has of them.

Answers are those of a classifier (`classes_answered`) or masks (`masks_answered`). Both have

    percent                the task's score
    ordered(index)         the answers to samples in another order
    measures(split)        name -> value
    row(split)             the arrays that the report needs
    predictions(), table(split)    what `config.predictions` writes, npz or csv

`answers/internal.npz` has a row per client, `answers/unseen.npz` one per unseen domain and
adaptation. All predictions are written on request (`config.predictions`).
"""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.text import cell
from fedjax_bn.data.domain import Split
from fedjax_bn.task import Task
from fedjax_bn.training.evaluation import classes_answered, masks_answered
from fedjax_bn.training.evaluation.classes_answered import Answered, Answers, answering_classes
from fedjax_bn.training.evaluation.groups import by_client
from fedjax_bn.training.evaluation.masks_answered import AnsweredMasks, MaskAnswers, answering_masks
from fedjax_bn.training.workdir import not_readable, read_arrays, write_atomically

_FOLDER = "answers"
_FILES = ("internal", "unseen")


AnyAnswers = Answers | MaskAnswers


class Kept(NamedTuple):
    """Answers, the samples that they are of, and the part of the data that these are."""

    answers: AnyAnswers
    split: Split
    part: str = "test"


Keep = dict[tuple[str, str], Kept]  # (client, "") or (unseen domain, adaptation) -> answers


def answering(task: Task) -> Task:
    """Returns the task with answers as its score if it scores by accuracy or by masks."""
    if task.segments:
        return answering_masks(task)
    if not task.classifies or task.score.name != "accuracy":
        return task
    return answering_classes(task)


def measures_by_client(
    names: Sequence[str], answered: Sequence[tuple[AnyAnswers | float, Split]], limit: int
) -> dict[str, Any]:
    """Returns {"measures": {name: {client: value, "mean": ...}}}; {} if scores are numbers.

    Means are over the clients that have a value. `limit` is the configuration's `clients_named`.
    """
    rows = [
        answers.measures(split) for answers, split in answered if isinstance(answers, AnyAnswers)
    ]
    if len(rows) < len(answered):
        return {}
    measures = {}
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        finite = values[np.isfinite(values)]
        mean = {"mean": float(finite.mean()) if len(finite) else None}
        measures[name] = by_client(names, values, limit, mean=False) | mean
    return {"measures": measures}


def measures_of(
    scores: Mapping[str, AnyAnswers | float], split: Split
) -> dict[str, dict[str, float | None]]:
    """Returns adaptation -> measure -> value, None if it is not defined.

    The result has no entry for a score that is a number.
    """
    return {
        adaptation: {
            name: value if np.isfinite(value) else None
            for name, value in answers.measures(split).items()
        }
        for adaptation, answers in scores.items()
        if isinstance(answers, AnyAnswers)
    }


def write_answers(folder: Path, keep: Keep, predictions: str = "") -> None:
    """Writes the files of `answers/` for internal and for unseen clients, if there are any.

    Args:
      folder: the workdir.
      keep: the answers.
      predictions: "csv" or "npz" to write what `predictions_of` returns too; "" not to.

    Raises:
      WorkdirError: a file cannot be written.
    """
    for name in _FILES:
        is_unseen = name == "unseen"
        of_kind = {key: answered for key, answered in keep.items() if bool(key[1]) == is_unseen}
        if not of_kind:
            continue
        rows = [answered.answers.row(answered.split) for answered in of_kind.values()]
        write_atomically(folder / _FOLDER / f"{name}.npz", _packed_rows(of_kind, rows))
        if predictions:
            path = folder / _FOLDER / f"{name}-predictions.{predictions}"
            write_atomically(path, predictions_of(of_kind, predictions))


def _packed_rows(keep: Keep, rows: Sequence[Mapping[str, np.ndarray]]) -> bytes:
    """Returns a file `.npz` with the number of its row in the name of each array."""
    parts = [answered.part for answered in keep.values()]
    arrays = {"names": np.array(json.dumps(list(keep))), "parts": np.array(json.dumps(parts))}
    for i, row in enumerate(rows):
        for name, array in row.items():
            stem, dot, ending = name.partition(".")
            arrays[f"{stem}{i}{dot}{ending}"] = array
    return packed(arrays)


def read_answers(folder: Path) -> dict[tuple[str, str], Answered | AnsweredMasks]:
    """Returns (client, "") or (unseen domain, adaptation) -> its answers in a workdir; may be {}.

    Raises:
      WorkdirError: a file is damaged.
    """
    answers = {}
    for path in (folder / _FOLDER / f"{name}.npz" for name in _FILES):
        if not path.exists():
            continue
        stored = read_arrays(path)
        try:
            for i, key in enumerate(json.loads(str(stored["names"]))):
                of_row = re.compile(rf"([a-z]+){i}(\.\d+)?")
                names = {name: of_row.fullmatch(name) for name in stored}
                row = {m[1] + (m[2] or ""): stored[name] for name, m in names.items() if m}
                kind = masks_answered if "dice" in row else classes_answered
                answers[tuple(key)] = kind.read_row(row)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise not_readable(path, error) from error
    return answers


def predictions_of(keep: Keep, form: str) -> str | bytes:
    """Returns all predictions as the content of a file.

    Args:
      keep: the answers, of one kind.
      form: "csv", a line per sample with probabilities, or per volume and class with the scores of
        its masks; or "npz": `names`, the keys of `keep` as JSON, `parts` likewise, and for row i
        `label{i}` i32[N] and `probabilities{i}` f32[N, C], or `predicted{i}` u8[N, H, W].
    """
    if form == "npz":
        return _packed_rows(keep, [answered.answers.predictions() for answered in keep.values()])
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for number, ((name, adaptation), (answers, split, part)) in enumerate(keep.items()):
        heads, rows = answers.table(split)
        if not number:
            writer.writerow(("client", "adaptation", "part", *heads))
        for row in rows:
            # All digits of f64; names go through `cell`.
            texts = (cell(x) if isinstance(x, str) else repr(x) for x in row)
            writer.writerow((cell(name), cell(adaptation), part, *texts))
    return file.getvalue()


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns named arrays as the content of a compressed `.npz`."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()
