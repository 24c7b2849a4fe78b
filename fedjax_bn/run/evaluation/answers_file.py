"""answers/*.npz: what a run's report tells of the answers of its selected round, in little room.

`internal.npz` has a row a client, `unseen.npz` one an unseen domain and adaptation: confusions, who
was right on which sample, and the most confident mistakes with small pictures. Every sample's
probabilities are written on request alone (`config.predictions`).
"""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedjax_bn.arguments.text import cell
from fedjax_bn.data.domain import Split
from fedjax_bn.run.evaluation.answers import Keep, Kept
from fedjax_bn.run.files.workdir import not_readable, read_arrays, write_atomically
from fedjax_bn.task import confusion

FOLDER = "answers"
MISTAKES = 6  # of a row
_MOST_CLASSES = 100  # whose confusions are kept
_PIXELS = 64  # the longer side of a picture at most
_FILES = ("internal", "unseen")


class Mistake(NamedTuple):
    """A wrong answer.

    Attributes:
      sample: its number in the split that was tested.
      label, answer: classes.
      confidence: the probability of the answer.
      picture: u8[H, W, 1 or 3]; of samples that are no images, f32[F] as they are.
    """

    sample: int
    label: int
    answer: int
    confidence: float
    picture: np.ndarray


class Answered(NamedTuple):
    """A row: what is known of the answers of one client, or in one domain by one adaptation.

    Attributes:
      right: bool[N].
      confusion: i64[C, C], class by answer; None of too many classes.
      mistakes: the most confident first.
    """

    right: np.ndarray
    confusion: np.ndarray | None
    mistakes: list[Mistake]


def write_answers(folder: Path, keep: Keep, predictions: str = "") -> None:
    """Writes the files of a run's folder of which there is something.

    Args:
      folder: the workdir.
      keep: what was answered.
      predictions: "csv" or "npz" for every sample's probabilities too; "" for none.

    Raises:
      WorkdirError: they cannot be written.
    """
    for name in _FILES:
        mine = {key: kept for key, kept in keep.items() if bool(key[1]) == (name == "unseen")}
        if not mine:
            continue
        write_atomically(folder / FOLDER / f"{name}.npz", _packed(mine))
        if predictions:
            path = folder / FOLDER / f"{name}-predictions.{predictions}"
            write_atomically(path, predictions_of(mine, predictions))


def read_answers(folder: Path) -> dict[tuple[str, str], Answered]:
    """(client, "") or (unseen domain, adaptation) -> what is known; {} of a run that wrote nothing.

    Raises:
      WorkdirError: a file is damaged.
    """
    found = {}
    for name in _FILES:
        path = folder / FOLDER / f"{name}.npz"
        if path.exists():
            stored = read_arrays(path)
            try:
                found |= _unpacked(stored)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise not_readable(path, error) from error
    return found


def predictions_of(keep: Keep, form: str) -> str | bytes:
    """The probabilities of every sample as the content of a file.

    Args:
      keep: what was answered.
      form: "csv", a line a sample; or "npz": `names`, the rows of `keep` as JSON, and of row i
        `label{i}` i32[N] and `probabilities{i}` f32[N, C].
    """
    return _as_csv(keep) if form == "csv" else _as_npz(keep)


def _packed(keep: Keep) -> bytes:
    arrays = {"names": np.array(json.dumps(list(keep)))}
    for i, (answers, split) in enumerate(keep.values()):
        arrays[f"right{i}"], arrays[f"samples{i}"] = np.packbits(answers.right), len(answers.label)
        if answers.logits.shape[-1] <= _MOST_CLASSES:
            arrays[f"confusion{i}"] = confusion(answers.logits, answers.label).astype(np.int32)
        wrong = np.flatnonzero(~answers.right)
        sure = answers.probabilities[wrong].max(-1)
        worst = wrong[np.argsort(-sure, kind="stable")[:MISTAKES]]
        arrays[f"mistakes{i}"] = np.stack(
            [worst, answers.label[worst], answers.logits[worst].argmax(-1)], axis=1
        ).astype(np.int32)
        arrays[f"confidence{i}"] = np.float32(np.sort(-sure)[:MISTAKES] * -1)
        for j, sample in enumerate(worst):
            arrays[f"picture{i}.{j}"] = picture_of(split, int(sample))
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _unpacked(stored: dict[str, np.ndarray]) -> dict[tuple[str, str], Answered]:
    found = {}
    for i, (name, adaptation) in enumerate(json.loads(str(stored["names"]))):
        count, bits = int(stored[f"samples{i}"]), np.unpackbits(stored[f"right{i}"])
        if not 0 <= count <= len(bits):
            raise ValueError(f"it holds {len(bits)} answers of {count} samples")
        right = bits[:count].astype(bool)
        rows = zip(stored[f"mistakes{i}"].tolist(), stored[f"confidence{i}"].tolist(), strict=True)
        mistakes = [
            Mistake(*row, confidence, stored[f"picture{i}.{j}"])
            for j, (row, confidence) in enumerate(rows)
        ]
        found[name, adaptation] = Answered(right, stored.get(f"confusion{i}"), mistakes)
    return found


def picture_of(split: Split, sample: int) -> np.ndarray:
    """A sample as a small picture u8[H, W, 1 or 3]; one that is no image as f32[F]."""
    stored = np.asarray(split.images[sample : sample + 1])[0]
    if stored.ndim < 3:
        return stored.astype(np.float32).reshape(-1)
    if stored.dtype != np.uint8:
        low, high = float(stored.min()), float(stored.max())
        stored = ((stored - low) / ((high - low) or 1) * 255).astype(np.uint8)
    stored = stored if stored.shape[-1] == 3 else stored[..., :1]
    most = max(stored.shape[:2])
    if most <= _PIXELS:
        return stored
    size = [max(1, round(side * _PIXELS / most)) for side in stored.shape[1::-1]]
    small = np.asarray(Image.fromarray(stored.squeeze()).resize(size))
    return small.reshape(*small.shape[:2], -1)


def _as_csv(keep: Keep) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    classes = max(kept.answers.logits.shape[-1] for kept in keep.values())
    numbered = (f"probability_{c}" for c in range(classes))
    writer.writerow(("client", "adaptation", "sample", "label", "answer", *numbered))
    for (name, adaptation), kept in keep.items():
        answers, start = kept.answers, (cell(name), cell(adaptation))
        rows = zip(_samples(kept), answers.label.tolist(), answers.probabilities, strict=True)
        for sample, label, row in rows:
            writer.writerow((*start, sample, label, int(row.argmax()), *map(repr, row.tolist())))
    return file.getvalue()


def _samples(kept: Kept) -> Sequence[str | int]:
    """The names of the samples where they have some, else their numbers."""
    names = kept.split.names
    return range(len(kept.answers.label)) if names is None else [cell(str(n)) for n in names]


def _as_npz(keep: Keep) -> bytes:
    arrays = {"names": np.array(json.dumps(list(keep)))}
    for i, kept in enumerate(keep.values()):
        arrays[f"label{i}"] = kept.answers.label
        arrays[f"probabilities{i}"] = kept.answers.probabilities.astype(np.float32)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()
