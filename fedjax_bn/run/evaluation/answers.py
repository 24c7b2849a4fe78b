"""Measures the answers of classifiers, and writes and reads those that a run's folder keeps.

Measures are percentages, except the loss (nats) and the area under the curve (0 to 1).

`answers/internal.npz` has a row per client, `answers/unseen.npz` one per unseen domain and
adaptation. A row has the confusion matrix, which samples were answered right, and the most
confident mistakes with small pictures. The probabilities of all samples are written on request
(`config.predictions`).
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image
from scipy.special import logsumexp

from fedjax_bn.arguments.text import cell
from fedjax_bn.data.domain import Split
from fedjax_bn.run.evaluation.groups import by_client
from fedjax_bn.run.files.workdir import not_readable, read_arrays, write_atomically
from fedjax_bn.task import Score, Task, confusion

_FOLDER = "answers"
_FILES = ("internal", "unseen")
_MISTAKES = 6  # kept in a row
_MOST_CLASSES = 100  # with more, no confusion matrix is kept
_PIXELS = 64  # the longest side of a picture
_BINS = 15  # of confidence, for the calibration error


class Answers(NamedTuple):
    """A classifier's answers to the samples of a split, in the split's order.

    Attributes:
      logits: f[N, C].
      label: i32[N].
    """

    logits: np.ndarray
    label: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """Whether each answer is right, bool[N]."""
        return self.logits.argmax(-1).astype(self.label.dtype) == self.label

    @property
    def accuracy(self) -> float:
        """The accuracy in percent, as `task.classification` scores it; 0 without samples."""
        return float(100 * self.right.sum() / max(len(self.label), 1))

    @property
    def probabilities(self) -> np.ndarray:
        """Softmax of the logits, f64[N, C]."""
        logits = self.logits.astype(np.float64)
        return np.exp(logits - logsumexp(logits, axis=-1, keepdims=True))


class Kept(NamedTuple):
    """Answers, and the samples that were classified."""

    answers: Answers
    split: Split


Keep = dict[tuple[str, str], Kept]  # (client, "") or (unseen domain, adaptation) -> answers


def answering(task: Task) -> Task:
    """Returns the task with `Answers` as its score if it scores by accuracy, else unchanged."""
    if not task.classifies or task.score.name != "accuracy":
        return task

    def of_batch(logits: jax.Array, label: jax.Array, valid: jax.Array) -> tuple:
        return logits, label, valid

    def of_all(kept: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Answers:
        logits, label, valid = kept  # of batches [T, B, ...]
        return Answers(logits[valid], label[valid])

    return task._replace(score=Score("answers", of_batch, of_all))


def _measure(answers: Answers) -> dict[str, float]:
    """Returns name -> value of each measure; NaN if it is not defined.

    loss is the mean cross entropy. balanced_accuracy is the share of right answers in each class,
    averaged over the classes that occur (Brodersen et al. 2010). auc is the area under the curve of
    the second of two classes, else the mean over classes of one against all others. ece is the
    expected calibration error (Guo et al. 2017, Eq. 3) over 15 bins of confidence. Without samples
    no measure is defined; with samples of only one class, auc is not.
    """
    label, count = answers.label, len(answers.label)
    if not count:
        return dict.fromkeys(("loss", "balanced_accuracy", "auc", "ece"), np.nan)
    p, logits = answers.probabilities, answers.logits.astype(np.float64)
    loss = (logsumexp(logits, axis=-1) - logits[np.arange(count), label]).mean()
    matrix = confusion(answers.logits, label)
    occurs = matrix.sum(1) > 0
    recall = (matrix.diagonal()[occurs] / matrix.sum(1)[occurs]).mean()
    confidence = p.max(-1)
    # Bins (lower, upper] are weighted by their number of samples, so sums of gaps are enough.
    place = np.ceil(confidence * _BINS).clip(1, _BINS).astype(int) - 1
    gaps = np.bincount(place, confidence - answers.right, _BINS)
    return {
        "loss": float(loss),
        "balanced_accuracy": 100 * float(recall),
        "auc": _area(p, label),
        "ece": 100 * float(np.abs(gaps).sum() / count),
    }


def _area(probabilities: np.ndarray, label: np.ndarray) -> float:
    """Returns the area under the receiver operating characteristic (Mann and Whitney)."""
    # scikit-learn gives the same numbers (tests/run/test_answers.py) but takes 20 times as long,
    # for each client and evaluation: 50 ms instead of 2.5 for 200 samples and 7 classes.
    areas, classes = [], probabilities.shape[1]
    for one in [1] if classes == 2 else range(classes):
        own = label == one
        others, mine = np.sort(probabilities[~own, one]), probabilities[own, one]
        if len(others) and len(mine):
            # Others below a sample of the class count as 1, equal ones count as a half.
            below = sum(np.searchsorted(others, mine, side).sum() for side in ("left", "right"))
            areas.append(below / (2 * len(others) * len(mine)))
    return float(np.mean(areas)) if areas else float("nan")


def measures_by_client(
    names: Sequence[str], scores: Sequence[Answers | float], limit: int
) -> dict[str, Any]:
    """Returns {"measures": {name: {client: value, "mean": ...}}}; {} if scores are numbers.

    Means are over the clients that have a value. `limit` is the configuration's `clients_named`.
    """
    if not all(isinstance(one, Answers) for one in scores):
        return {}
    rows, found = [_measure(one) for one in scores], {}
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        known = values[np.isfinite(values)]
        mean = {"mean": float(known.mean()) if len(known) else None}
        found[name] = by_client(names, values, limit, mean=False) | mean
    return {"measures": found}


def measures_of(scores: Mapping[str, Answers | float]) -> dict[str, dict[str, float | None]]:
    """Returns adaptation -> measure -> value, None if it is not defined.

    The measures are "loss", "balanced_accuracy", "auc" and "ece". The result has no entry for a
    score that is a number.
    """
    return {
        text: {name: v if np.isfinite(v) else None for name, v in _measure(answers).items()}
        for text, answers in scores.items()
        if isinstance(answers, Answers)
    }


class Mistake(NamedTuple):
    """A wrong answer.

    Attributes:
      sample: its number in the split that was tested.
      label, answer: classes.
      confidence: the probability of the answer.
      picture: u8[H, W, 1 or 3]; f32[F] for samples that are not images.
    """

    sample: int
    label: int
    answer: int
    confidence: float
    picture: np.ndarray


class Answered(NamedTuple):
    """The answers of one client, or of one unseen domain and adaptation, as a folder keeps them.

    Attributes:
      right: bool[N].
      confusion: i64[C, C], class by answer; None for more than 100 classes.
      mistakes: the most confident first.
    """

    right: np.ndarray
    confusion: np.ndarray | None
    mistakes: list[Mistake]


def write_answers(folder: Path, keep: Keep, predictions: str = "") -> None:
    """Writes the files of `answers/` for internal and for unseen clients, if there are any.

    Args:
      folder: the workdir.
      keep: the answers.
      predictions: "csv" or "npz" to write all probabilities too; "" not to.

    Raises:
      WorkdirError: a file cannot be written.
    """
    for name in _FILES:
        mine = {key: kept for key, kept in keep.items() if bool(key[1]) == (name == "unseen")}
        if not mine:
            continue
        arrays = {"names": np.array(json.dumps(list(mine)))}
        for i, (answers, split) in enumerate(mine.values()):
            if answers.logits.shape[-1] <= _MOST_CLASSES:
                matrix = confusion(answers.logits, answers.label)
                arrays[f"confusion{i}"] = matrix.astype(np.int32)
            wrong = np.flatnonzero(~answers.right)
            sure = answers.probabilities[wrong].max(-1)
            # A stable sort, so that every machine keeps the first of equally confident samples.
            first = np.argsort(-sure, kind="stable")[:_MISTAKES]
            worst = wrong[first]
            columns = worst, answers.label[worst], answers.logits[worst].argmax(-1)
            arrays |= {
                f"right{i}": np.packbits(answers.right),
                f"samples{i}": len(answers.label),
                f"mistakes{i}": np.stack(columns, axis=1).astype(np.int32),
                f"confidence{i}": sure[first].astype(np.float32),
            }
            for j, sample in enumerate(worst):
                arrays[f"picture{i}.{j}"] = _picture_of(split, int(sample))
        write_atomically(folder / _FOLDER / f"{name}.npz", packed(arrays))
        if predictions:
            path = folder / _FOLDER / f"{name}-predictions.{predictions}"
            write_atomically(path, predictions_of(mine, predictions))


def read_answers(folder: Path) -> dict[tuple[str, str], Answered]:
    """Returns (client, "") or (unseen domain, adaptation) -> its answers in a workdir; may be {}.

    Raises:
      WorkdirError: a file is damaged.
    """
    found = {}
    for path in (folder / _FOLDER / f"{name}.npz" for name in _FILES):
        if not path.exists():
            continue
        stored = read_arrays(path)
        try:
            for i, key in enumerate(json.loads(str(stored["names"]))):
                count, bits = int(stored[f"samples{i}"]), np.unpackbits(stored[f"right{i}"])
                if not 0 <= count <= len(bits):  # `packbits` pads the last byte
                    raise ValueError(f"it holds {len(bits)} answers of {count} samples")
                confidence = stored[f"confidence{i}"].tolist()
                mistakes = [
                    Mistake(*row, confidence[j], stored[f"picture{i}.{j}"])
                    for j, row in enumerate(stored[f"mistakes{i}"].tolist())
                ]
                right, matrix = bits[:count].astype(bool), stored.get(f"confusion{i}")
                found[tuple(key)] = Answered(right, matrix, mistakes)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise not_readable(path, error) from error
    return found


def predictions_of(keep: Keep, form: str) -> str | bytes:
    """Returns the probabilities of every sample as the content of a file.

    Args:
      keep: the answers.
      form: "csv", a line per sample; or "npz": `names`, the keys of `keep` as JSON, and for row i
        `label{i}` i32[N] and `probabilities{i}` f32[N, C].
    """
    if form == "npz":
        arrays = {"names": np.array(json.dumps(list(keep)))}
        for i, (answers, _) in enumerate(keep.values()):
            arrays[f"label{i}"] = answers.label
            arrays[f"probabilities{i}"] = answers.probabilities.astype(np.float32)
        return packed(arrays)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    classes = max(answers.logits.shape[-1] for answers, _ in keep.values())
    numbered = (f"probability_{c}" for c in range(classes))
    writer.writerow(("client", "adaptation", "sample", "label", "answer", *numbered))
    for (name, adaptation), (answers, split) in keep.items():
        samples = range(len(answers.label))
        if split.names is not None:
            samples = [cell(str(one)) for one in split.names]
        rows = zip(samples, answers.label.tolist(), answers.probabilities, strict=True)
        for sample, label, row in rows:
            start = cell(name), cell(adaptation), sample, label, int(row.argmax())
            writer.writerow((*start, *map(repr, row.tolist())))  # all digits of f64
    return file.getvalue()


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns named arrays as the content of a compressed `.npz`."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _picture_of(split: Split, sample: int) -> np.ndarray:
    """Returns a small picture u8[H, W, 1 or 3]; f32[F] of a sample that is not an image."""
    stored = np.asarray(split.images[sample : sample + 1])[0]
    if stored.ndim < 3:
        return stored.astype(np.float32).reshape(-1)
    if stored.dtype != np.uint8:  # floats have no fixed range, so their own is shown
        low, high = float(stored.min()), float(stored.max())
        stored = ((stored - low) / ((high - low) or 1) * 255).astype(np.uint8)
    picture = Image.fromarray(stored if stored.shape[-1] == 3 else stored[..., 0])
    picture.thumbnail((_PIXELS, _PIXELS))
    return np.asarray(picture).reshape(picture.height, picture.width, -1)
