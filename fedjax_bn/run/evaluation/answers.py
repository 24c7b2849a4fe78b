"""What classifiers answered to all samples of a client, and what is measured of it on the host.

Percentages but for the loss (nats) and the area under the curve (0 to 1). Of a client without
samples, or of one class alone, the area is not defined, and None in records.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.special import logsumexp

from fedjax_bn.data.domain import Split
from fedjax_bn.run.evaluation.groups import by_client
from fedjax_bn.run.evaluation.scoring_data import places_in_order
from fedjax_bn.task import Score, Task, confusion

PyTree = Any
BINS = 15  # of confidences, for the calibration error
MEASURES = ("loss", "balanced_accuracy", "auc", "ece")


class Answers(NamedTuple):
    """A classifier's answers to samples, in the order in which they lie.

    Attributes:
      logits: f[N, C].
      label: i32[N].
    """

    logits: np.ndarray
    label: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """Which answers are right, bool[N]."""
        return self.logits.argmax(-1).astype(self.label.dtype) == self.label

    @property
    def accuracy(self) -> float:
        """Percent, as `task.classification` scores it; 0 without samples."""
        return float(100 * self.right.sum() / max(len(self.label), 1))

    @property
    def probabilities(self) -> np.ndarray:
        """f64[N, C], softmax of the logits."""
        logits = self.logits.astype(np.float64)
        return np.exp(logits - logsumexp(logits, axis=-1, keepdims=True))


class Kept(NamedTuple):
    """Answers with the samples that they were given to."""

    answers: Answers
    split: Split


Keep = dict[tuple[str, str], Kept]  # (client, "") or (unseen domain, adaptation) -> answers


def answering(task: Task) -> Task:
    """The task with a score that gives `Answers` where it is accuracy; any other as it is."""
    if not task.classifies or task.score.name != "accuracy":
        return task
    return task._replace(score=Score("answers", _keep, _collect))


def keep_answers(
    keep: Keep | None, told: Mapping[tuple[str, str], tuple[Answers | float, Split]]
) -> None:
    """Puts what was answered to which samples into a dict, if there is one; numbers are left out.

    Args:
      keep: the dict; None for none.
      told: (client, "") or (unseen domain, adaptation) -> what was told, to which samples.
    """
    if keep is not None:
        keep |= {k: Kept(*one) for k, one in told.items() if isinstance(one[0], Answers)}


def as_they_lie(told: Answers | float, order: int) -> Answers | float:
    """What was told of a stream, in the order in which its samples lie.

    Args:
      told: answers in the order of the stream, or a score, which has no order.
      order: the seed of that order, from 0; see `scoring_data.places_in_order`.
    """
    if not isinstance(told, Answers):
        return told
    back = np.argsort(places_in_order(len(told.label), order))
    return Answers(told.logits[back], told.label[back])


def percent(told: Answers | float) -> float:
    """The score of a client: the accuracy of answers; a number as it is."""
    return told.accuracy if isinstance(told, Answers) else told


def measure(answers: Answers) -> dict[str, float]:
    """Name -> value of each of MEASURES; NaN where it is not defined.

    loss is the mean cross entropy; balanced_accuracy the mean share of right answers of each class
    that occurs (Brodersen et al. 2010); auc that of the second class of two, else the mean over
    classes of one against all others; ece the expected calibration error (Guo et al. 2017, Eq. 3)
    over 15 bins of confidence.
    """
    # scikit-learn gives the same numbers (tests/run/test_answers.py) in 15 times the time, which
    # every client takes at every evaluation: 25 ms instead of 1.7 for 200 samples, 7 classes.
    label, count = answers.label, len(answers.label)
    if not count:
        return dict.fromkeys(MEASURES, np.nan)
    p = answers.probabilities
    logits = answers.logits.astype(np.float64)
    loss = (logsumexp(logits, axis=-1) - logits[np.arange(count), label]).mean()
    matrix = confusion(answers.logits, label)
    there = matrix.sum(1) > 0
    recall = (matrix.diagonal()[there] / matrix.sum(1)[there]).mean()
    return {
        "loss": float(loss),
        "balanced_accuracy": 100 * float(recall),
        "auc": area(p, label),
        "ece": 100 * calibration_error(p.max(-1), answers.right),
    }


def area(probabilities: np.ndarray, label: np.ndarray) -> float:
    """Area under the receiver operating characteristic, by ranks (Mann and Whitney).

    Args:
      probabilities: f[N, C]; of two classes the second one's counts, of more each against all
        others that has samples and is not alone, and the mean is taken.
      label: i32[N].

    Returns:
      0 to 1; NaN where only one class has samples.
    """
    from scipy.stats import rankdata  # half a second, which a start does not wait for

    count, classes = probabilities.shape
    chosen = np.array([1]) if classes == 2 else np.arange(classes)
    own = label[:, None] == chosen
    positive = own.sum(0)
    defined = (positive > 0) & (positive < count)
    if not defined.any():
        return float("nan")
    own, positive = own[:, defined], positive[defined]
    ranks = rankdata(probabilities[:, chosen[defined]], axis=0)
    above = np.where(own, ranks, 0).sum(0) - positive * (positive + 1) / 2
    return float((above / (positive * (count - positive))).mean())


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """Mean distance of confidence and share of right answers over equal bins, by their samples.

    Args:
      confidence: f[N] in [0, 1].
      right: bool[N].
      bins: (lower, upper], of equal width.
    """
    place = np.ceil(confidence * bins).clip(1, bins).astype(int) - 1
    gaps = np.bincount(place, confidence - right, bins)
    return float(np.abs(gaps).sum() / max(len(confidence), 1))


def measures_by_client(
    names: Sequence[str], told: Sequence[Answers | float], limit: int
) -> dict[str, Any]:
    """{"measures": {name: {client: value, "mean": ...}}}, means over who has a value; or {}.

    Args:
      names: of the clients.
      told: of each, its answers; of a task that gives none, its score.
      limit: the configuration's `clients_named`.
    """
    if not all(isinstance(one, Answers) for one in told):
        return {}
    rows = [measure(one) for one in told]
    found = {}
    for name in MEASURES:
        values = np.array([row[name] for row in rows])
        known = values[np.isfinite(values)]
        mean = {"mean": float(known.mean()) if len(known) else None}
        found[name] = by_client(names, values, limit, mean=False) | mean
    return {"measures": found}


def measures_of(told: Mapping[str, Answers | float]) -> dict[str, dict[str, float | None]]:
    """Adaptation -> measures; of a task that gives no answers {}."""
    return {
        text: {name: v if np.isfinite(v) else None for name, v in measure(answers).items()}
        for text, answers in told.items()
        if isinstance(answers, Answers)
    }


def _keep(logits: jax.Array, label: jax.Array, valid: jax.Array) -> tuple:
    return logits, label, valid


def _collect(kept: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Answers:
    """The answers to the valid samples of batches [T, B, ...]."""
    logits, label, valid = kept
    return Answers(logits[valid], label[valid])
