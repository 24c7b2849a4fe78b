"""Keeps the answers of clients: their measures, and the files that a run's folder has of them."""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from scipy.special import logsumexp

from fedjax_bn.arguments.text import cell
from fedjax_bn.data.domain import Rows, Split
from fedjax_bn.data.labels import MASK, SPACING
from fedjax_bn.engine.segmentation import Overlaps, as_classes, dice_and_iou
from fedjax_bn.task import Score, Task, auc, confusion
from fedjax_bn.tasks.segmentation.overlays import Picture
from fedjax_bn.tasks.segmentation.surfaces import surface_scores, volumes_of
from fedjax_bn.training.workdir import read_arrays, write_atomically

_MISTAKES = 6  # kept in a row
_MOST_CLASSES = 100  # with more, no confusion matrix is kept
_PIXELS, _MASK_PIXELS = 64, 160  # the longest side of a picture, without and with a mask
_BINS = 15  # of confidence, for the calibration error
_KINDS = "internal", "unseen"  # a file each


class Answers(NamedTuple):
    """A classifier's answers f[N, C] to the samples of a split, in its order, and labels i32[N]."""

    logits: np.ndarray
    label: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """Returns whether each answer is right, bool[N]."""
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
        """Returns the answers at index i64[N]."""
        return Answers(self.logits[index], self.label[index])

    def measures(self, split: Split) -> dict[str, Any]:
        """Returns percentages, except the loss (nats), `auc` and its interval (`task.auc`).

        balanced_accuracy is the mean recall of the classes that occur (Brodersen et al. 2010),
        sensitivity that of the second of two classes, ece the calibration error (Guo et al. 2017,
        Eq. 3), `counts` are the samples of each class. What needs two classes is NaN with one.
        """
        label, p, logits = self.label, self.probabilities, self.logits.astype(np.float64)
        loss = (logsumexp(logits, axis=-1) - logits[np.arange(len(label)), label]).mean()
        matrix, (area, *interval) = confusion(self.logits, label), auc(p, label)
        counts = matrix.sum(1)
        occurs = (counts > 0) & (np.count_nonzero(counts) > 1)
        recall = np.full(len(counts), np.nan)
        recall[occurs] = 100 * matrix.diagonal()[occurs] / counts[occurs]
        confidence = p.max(-1)
        # Bins (lower, upper] are weighted by their number of samples, so sums of gaps are enough.
        place = np.ceil(confidence * _BINS).clip(1, _BINS).astype(int) - 1
        gaps = np.bincount(place, confidence - self.right, _BINS)
        return {
            "loss": float(loss),
            "balanced_accuracy": _mean(recall),
            **({"sensitivity": float(recall[1])} if len(recall) == 2 else {}),
            "auc": area,
            "auc_interval": interval,
            "ece": 100 * float(np.abs(gaps).sum() / len(label)),
            "counts": counts.tolist(),
        }

    def row(self, split: Split) -> dict[str, np.ndarray]:
        """Returns what `read_answers` reads."""
        mistaken = np.flatnonzero(~self.right)
        sure = self.probabilities[mistaken].max(-1)
        # A stable sort, so that every machine keeps the first of equally confident samples.
        order = np.argsort(-sure, kind="stable")[:_MISTAKES]
        worst = mistaken[order]
        columns = worst, self.label[worst], self.logits[worst].argmax(-1)
        arrays = {
            "right": np.packbits(self.right),
            "samples": np.array(len(self.label)),
            "mistakes": np.stack(columns, axis=1).astype(np.int32),
            "confidence": sure[order].astype(np.float32),
        }
        if self.logits.shape[-1] <= _MOST_CLASSES:
            arrays["confusion"] = confusion(self.logits, self.label).astype(np.int32)
        for j, sample in enumerate(worst):
            arrays[f"picture.{j}"] = small_picture(_image(split, sample), _PIXELS)
        return arrays

    def predictions(self) -> dict[str, np.ndarray]:
        """Returns the arrays that `config.predictions=npz` writes."""
        return {"label": self.label, "probabilities": self.probabilities.astype(np.float32)}

    def table(self, split: Split) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Returns the heads and rows, one per sample, that `config.predictions=csv` writes."""
        heads = (f"probability_{c}" for c in range(self.logits.shape[-1]))
        samples = range(len(self.label)) if split.names is None else map(str, split.names)
        columns = zip(samples, self.label.tolist(), self.probabilities, strict=True)
        rows = ((sample, label, int(p.argmax()), *p.tolist()) for sample, label, p in columns)
        return ("sample", "label", "answer", *heads), rows


class _MaskAnswers(NamedTuple):
    """Predicted masks u8[N, H, W] of a split, in its order; the methods are those of `Answers`."""

    predicted: np.ndarray
    overlaps: Overlaps
    percent: float  # the task's score
    nested: bool

    def ordered(self, index: np.ndarray) -> "_MaskAnswers":
        overlaps = jax.tree.map(lambda leaf: leaf[index], self.overlaps)
        return self._replace(predicted=self.predicted[index], overlaps=overlaps)

    def measures(self, split: Split) -> dict[str, float]:
        """Returns means over a client's volumes, or over its images if they are of no volume.

        iou and dice_C (of class C, if there are several regions) are percentages; hd95 and assd are
        in "mm" or "pixels", and `undefined` counts the volumes and regions without distances,
        because a mask lacks the region. Regions are the classes without the background.
        """
        _, (dice, iou, hd95, assd), unit = self._scores(split)
        classes = range(dice.shape[1]) if dice.shape[1] > 1 else ()
        return {
            "iou": 100 * _mean(iou),
            **{f"dice_{c + 1}": 100 * _mean(dice[:, c]) for c in classes},
            f"hd95_{unit}": _mean([*map(_mean, hd95)]),  # of each volume first
            f"assd_{unit}": _mean([*map(_mean, assd)]),
            "undefined": float(np.isnan(hd95).sum()),
        }

    def _scores(self, split: Split) -> tuple[list[np.ndarray], list[np.ndarray], str]:
        """Returns volumes or images, their Dice, IoU, HD95 and ASSD f[V, R], and the unit."""
        volumes, masks = _volumes(split), (self.predicted, split.labels)
        far = surface_scores(*masks, 1 + self.overlaps.counts.shape[1], volumes, nested=self.nested)
        overlap = [of[[samples[0] for samples in volumes]] for of in dice_and_iou(self.overlaps)[0]]
        unit = "mm" if SPACING in split.labels else "pixels"
        return volumes, [*overlap, *np.moveaxis(far, -1, 0)], unit

    def row(self, split: Split) -> dict[str, np.ndarray]:
        volumes = _volumes(split)
        dice = dice_and_iou(self.overlaps)[0][0][[samples[0] for samples in volumes]]
        arrays, titles = {"dice": dice.astype(np.float32)}, []
        order = np.argsort(-dice.mean(-1), kind="stable").tolist()
        moments = {}  # volume -> moment, each volume once; the best of one volume, not its worst
        if order:
            moments = {order[len(order) // 2]: "median", order[-1]: "worst", order[0]: "best"}
        for j, (number, moment) in enumerate(sorted(moments.items(), key=itemgetter(1))):
            # The slice with the most pixels in either mask.
            shared, predicted, true = self.overlaps.counts[volumes[number]].sum(1).T
            sample = int(volumes[number][(predicted + true - shared).argmax()])
            masks = split.labels[MASK][sample], self.predicted[sample]
            arrays[f"picture.{j}"] = small_picture(_image(split, sample), _MASK_PIXELS)
            arrays[f"masks.{j}"] = np.stack([small_mask(mask, _MASK_PIXELS) for mask in masks])
            titles.append(f"{moment}, {100 * dice[number].mean():.1f} %: {_name(split, sample)}")
        return arrays | {"titles": np.array(json.dumps(titles))}

    def predictions(self) -> dict[str, np.ndarray]:
        return {"predicted": self.predicted}

    def table(self, split: Split) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        volumes, scores, unit = self._scores(split)
        rows = (
            (_name(split, volumes[v][0]), r + 1, *(float(score[v, r]) for score in scores))
            for v, r in np.ndindex(scores[0].shape)
        )
        return ("sample", "class", "dice", "iou", f"hd95_{unit}", f"assd_{unit}"), rows


def _volumes(split: Split) -> list[np.ndarray]:
    order = split.images.index if isinstance(split.images, Rows) else None
    return volumes_of(split.labels, order)  # slices in the order in which they are stored


def _name(split: Split, sample: int) -> str:
    return str(sample if split.names is None else split.names[sample])


def _image(split: Split, sample: int) -> np.ndarray:
    return np.asarray(split.images[sample : sample + 1])[0]


def _mean(values: Any) -> float:
    """Returns the mean of the values that are defined; NaN if none are."""
    finite = np.asarray(values)[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else np.nan


AnyAnswers = Answers | _MaskAnswers
# (client, "") or (unseen domain, adaptation) -> answers, the samples, and their part of the data
Keep = dict[tuple[str, str], tuple[AnyAnswers, Split, str]]


def answering(task: Task) -> Task:
    """Returns the task with answers as its score if it scores by accuracy or by masks."""
    score = task.score

    def classes(logits: jax.Array, label: jax.Array, valid: jax.Array) -> tuple:
        return logits, label, valid

    def all_classes(batches: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Answers:
        logits, label, valid = batches  # [T, B, ...]
        return Answers(logits[valid], label[valid])

    def masks(logits: jax.Array, label: Any, valid: jax.Array) -> tuple[Overlaps, jax.Array]:
        # One byte for each pixel, where logits would take four for each class.
        predicted = as_classes(logits).argmax(-1).astype(jnp.uint8)
        return score.of_batch(logits, label, valid), predicted

    def all_masks(batches: tuple[Overlaps, np.ndarray]) -> _MaskAnswers:
        overlaps, predicted = batches
        of_samples = jax.tree.map(lambda leaf: leaf[overlaps.valid], overlaps)
        percent = float(score.of_all(overlaps))
        return _MaskAnswers(predicted[overlaps.valid], of_samples, percent, task.nested)

    if task.segments:
        return task._replace(score=Score("answers", masks, all_masks))
    if task.classifies and score.name == "accuracy":
        return task._replace(score=Score("answers", classes, all_classes))
    return task


def write_answers(folder: Path, keep: Keep, predictions: str = "") -> None:
    """Writes the files of `answers/` for internal and for unseen clients, if there are any.

    `predictions` is the form of `predictions_of`, or "" to leave these out.
    """
    for unseen, kind in enumerate(_KINDS):
        # An unseen domain's key names an adaptation, a client's does not.
        of_kind = {key: entry for key, entry in keep.items() if bool(key[1]) == bool(unseen)}
        if not of_kind:
            continue
        rows = [answers.row(split) for answers, split, _ in of_kind.values()]
        write_atomically(folder / "answers" / f"{kind}.npz", _packed_rows(of_kind, rows))
        if predictions:
            path = folder / "answers" / f"{kind}-predictions.{predictions}"
            write_atomically(path, predictions_of(of_kind, predictions))


def _packed_rows(keep: Keep, rows: Sequence[Mapping[str, np.ndarray]]) -> bytes:
    """Returns a file `.npz` with the number of its row in the name of each array."""
    parts = [part for _, _, part in keep.values()]
    arrays = {"names": np.array(json.dumps(list(keep))), "parts": np.array(json.dumps(parts))}
    for i, row in enumerate(rows):
        for name, array in row.items():
            stem, dot, ending = name.partition(".")
            arrays[f"{stem}{i}{dot}{ending}"] = array
    return npz_bytes(arrays)


class Mistake(NamedTuple):
    """A wrong answer to a sample of a split, whose picture is u8[H, W, 1 or 3] or f32[F]."""

    sample: int
    label: int
    answer: int
    confidence: float
    picture: np.ndarray


class Answered(NamedTuple):
    """The answers of one client, or of one unseen domain and adaptation, as a folder keeps them."""

    right: np.ndarray  # bool[N]
    confusion: np.ndarray | None  # i64[C, C], class by answer; None for more than 100 classes
    mistakes: list[Mistake]  # the most confident ones


class AnsweredMasks(NamedTuple):
    """What a folder keeps of the masks of one client, or of one unseen domain and adaptation."""

    dice: np.ndarray  # f32[V, R] in [0, 1], of each volume or image and region
    pictures: list[Picture]  # of the best, the median and the worst


def read_answers(folder: Path) -> dict[tuple[str, str], Answered | AnsweredMasks]:
    """Returns (client, "") or (unseen domain, adaptation) -> its answers in a workdir, if any."""
    answers = {}
    for path in filter(Path.exists, (folder / "answers" / f"{kind}.npz" for kind in _KINDS)):
        stored = read_arrays(path)
        for i, key in enumerate(json.loads(str(stored["names"]))):
            of_row = re.compile(rf"([a-z]+){i}(\.\d+)?")
            names = {name: of_row.fullmatch(name) for name in stored}
            row = {m[1] + (m[2] or ""): stored[name] for name, m in names.items() if m}
            if "dice" in row:
                titles = enumerate(json.loads(str(row["titles"])))
                pictures = [(row[f"picture.{j}"], *row[f"masks.{j}"], title) for j, title in titles]
                answers[tuple(key)] = AnsweredMasks(row["dice"], pictures)
                continue
            right = np.unpackbits(row["right"], count=int(row["samples"])).astype(bool)
            pairs = zip(row["mistakes"].tolist(), row["confidence"].tolist(), strict=True)
            mistakes = [Mistake(*m, p, row[f"picture.{j}"]) for j, (m, p) in enumerate(pairs)]
            answers[tuple(key)] = Answered(right, row.get("confusion"), mistakes)
    return answers


def predictions_of(keep: Keep, form: str) -> str | bytes:
    """Returns all predictions, of one kind of answers, as the content of a file.

    "csv" has a line per sample, or per volume and class of masks. "npz" has `names`, the keys of
    `keep` as JSON, `parts` likewise, and for row i `label{i}` i32[N] and `probabilities{i}`
    f32[N, C], or `predicted{i}` u8[N, H, W].
    """
    if form == "npz":
        return _packed_rows(keep, [answers.predictions() for answers, _, _ in keep.values()])
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for number, ((name, adaptation), (answers, split, part)) in enumerate(keep.items()):
        heads, rows = answers.table(split)
        if not number:
            writer.writerow(("client", "adaptation", "part", *heads))
        for row in rows:  # `repr` writes all digits of f64
            texts = (cell(x) if isinstance(x, str) else repr(x) for x in row)
            writer.writerow((cell(name), cell(adaptation), part, *texts))
    return file.getvalue()


def npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns named arrays as the content of a compressed `.npz`."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def small_picture(stored: np.ndarray, side: int) -> np.ndarray:
    """Returns a picture u8[h, w, 1 or 3] of a stored image, its sides at most `side` pixels."""
    if stored.ndim < 3:  # features
        return stored.astype(np.float32).reshape(-1)
    if stored.dtype != np.uint8:
        low, high = float(stored.min()), float(stored.max())
        stored = ((stored - low) / ((high - low) or 1) * 255).astype(np.uint8)
    picture = Image.fromarray(stored if stored.shape[-1] == 3 else stored[..., 0])
    picture.thumbnail((side, side))
    return np.asarray(picture).reshape(picture.height, picture.width, -1)


def small_mask(mask: np.ndarray, side: int) -> np.ndarray:
    """Returns a mask u8[H, W] in the size of `small_picture`, u8[h, w], by the nearest pixel."""
    picture = Image.fromarray(mask)
    picture.thumbnail((side, side), Image.Resampling.NEAREST)
    return np.asarray(picture)
