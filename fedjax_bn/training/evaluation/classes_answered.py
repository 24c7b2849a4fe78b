"""Measures the answers of classifiers, and makes and reads their rows of `answers/`.

Measures are percentages, except the loss (nats) and the area under the curve (0 to 1). A row has
the confusion matrix, which samples were answered right, and the most confident mistakes with small
pictures.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.special import logsumexp

from fedjax_bn.data.domain import Split
from fedjax_bn.task import Score, Task, confusion
from fedjax_bn.training.evaluation.pictures import small_picture

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
    def percent(self) -> float:
        """The accuracy in percent, as `task.classification` scores it; 0 without samples."""
        return float(100 * self.right.sum() / max(len(self.label), 1))

    @property
    def probabilities(self) -> np.ndarray:
        """Softmax of the logits, f64[N, C]."""
        logits = self.logits.astype(np.float64)
        return np.exp(logits - logsumexp(logits, axis=-1, keepdims=True))

    def ordered(self, index: np.ndarray) -> "Answers":
        """Returns the answers to the samples at index i64[N]."""
        return Answers(self.logits[index], self.label[index])

    def measures(self, split: Split) -> dict[str, float]:
        """Returns name -> value of each measure of `_measure`."""
        del split  # which other kinds of answers need
        return _measure(self)

    def row(self, split: Split) -> dict[str, np.ndarray]:
        """Returns the arrays from which `read_row` makes a client's `Answered`."""
        mistaken = np.flatnonzero(~self.right)
        sure = self.probabilities[mistaken].max(-1)
        # A stable sort, so that every machine keeps the first of equally confident samples.
        worst_places = np.argsort(-sure, kind="stable")[:_MISTAKES]
        worst = mistaken[worst_places]
        columns = worst, self.label[worst], self.logits[worst].argmax(-1)
        arrays = {
            "right": np.packbits(self.right),
            "samples": np.array(len(self.label)),
            "mistakes": np.stack(columns, axis=1).astype(np.int32),
            "confidence": sure[worst_places].astype(np.float32),
        }
        if self.logits.shape[-1] <= _MOST_CLASSES:
            arrays["confusion"] = confusion(self.logits, self.label).astype(np.int32)
        for j, sample in enumerate(worst):
            image = np.asarray(split.images[sample : sample + 1])[0]
            arrays[f"picture.{j}"] = small_picture(image, _PIXELS)
        return arrays

    def predictions(self) -> dict[str, np.ndarray]:
        """Returns the arrays that `config.predictions=npz` writes."""
        return {"label": self.label, "probabilities": self.probabilities.astype(np.float32)}

    def table(self, split: Split) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Returns the heads and rows that `config.predictions=csv` writes, a row per sample."""
        samples = range(len(self.label)) if split.names is None else map(str, split.names)
        numbered = (f"probability_{c}" for c in range(self.logits.shape[-1]))
        rows = (
            (sample, label, int(row.argmax()), *row.tolist())
            for sample, label, row in zip(
                samples, self.label.tolist(), self.probabilities, strict=True
            )
        )
        return ("sample", "label", "answer", *numbered), rows


def answering_classes(task: Task) -> Task:
    """Returns a task that scores by accuracy with `Answers` as its score."""

    def of_batch(logits: jax.Array, label: jax.Array, valid: jax.Array) -> tuple:
        return logits, label, valid

    def of_all(batches: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Answers:
        logits, label, valid = batches  # of batches [T, B, ...]
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
    for number in [1] if classes == 2 else range(classes):
        is_class = label == number
        negatives, positives = (
            np.sort(probabilities[~is_class, number]),
            probabilities[is_class, number],
        )
        if len(negatives) and len(positives):
            # Others below a sample of the class count as 1, equal ones count as a half.
            below = sum(
                np.searchsorted(negatives, positives, side).sum() for side in ("left", "right")
            )
            areas.append(below / (2 * len(negatives) * len(positives)))
    return float(np.mean(areas)) if areas else float("nan")


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


def read_row(row: Mapping[str, np.ndarray]) -> Answered:
    """Returns a row that `Answers.row` made."""
    count, bits = int(row["samples"]), np.unpackbits(row["right"])
    if not 0 <= count <= len(bits):  # `packbits` pads the last byte
        raise ValueError(f"it holds {len(bits)} answers of {count} samples")
    confidence = row["confidence"].tolist()
    mistakes = [
        Mistake(*entry, confidence[j], row[f"picture.{j}"])
        for j, entry in enumerate(row["mistakes"].tolist())
    ]
    return Answered(bits[:count].astype(bool), row.get("confusion"), mistakes)
