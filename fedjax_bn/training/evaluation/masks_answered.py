"""Measures predicted masks, and makes and reads the rows of `answers/` that a report needs.

The measures of a client are means over its volumes, or over its images if they are of no volume:

    iou           percent, mean over the regions, which are the classes without the background
    dice_C        percent, of class C, if there are several regions
    hd95_U        mean over the regions of both masks, U is "mm" or "pixels"
    assd_U        likewise
    undefined     number of volumes and regions without distances, because a mask lacks the region

Distances are computed at every evaluation, on the host: about 0.1 s for an image of 512 x 512
pixels that is full of vessels, and much less for one organ.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.domain import Rows, Split
from fedjax_bn.data.label_trees import MASK, SPACING
from fedjax_bn.engine.mask_loss import as_classes
from fedjax_bn.engine.overlap import Overlaps, score_of
from fedjax_bn.task import Score, Task
from fedjax_bn.tasks.segmentation.surfaces import surface_scores, volumes_of
from fedjax_bn.training.evaluation.pictures import small_mask, small_picture

_SIDE = 160  # of a picture
_MOMENTS = ("best", "median", "worst")  # volumes by Dice, of each of which a slice is kept


class MaskAnswers(NamedTuple):
    """Predicted masks of the samples of a split, in the split's order.

    Attributes:
      predicted: u8[N, H, W].
      overlaps: `segmentation.overlaps` of the samples.
      percent: the task's score.
      nested: as in `task.segmentation`.
    """

    predicted: np.ndarray
    overlaps: Overlaps
    percent: float
    nested: bool

    def ordered(self, index: np.ndarray) -> "MaskAnswers":
        """Returns the answers to the samples at index i64[N]."""
        overlaps = jax.tree.map(lambda leaf: leaf[index], self.overlaps)
        return self._replace(predicted=self.predicted[index], overlaps=overlaps)

    def measures(self, split: Split) -> dict[str, float]:
        """Returns name -> value of each measure of the module; NaN if it is not defined."""
        _, (dice, iou, hd95, assd), unit = self._scores(split)
        classes = range(dice.shape[1]) if dice.shape[1] > 1 else ()
        return {
            "iou": 100 * _mean(iou),
            **{f"dice_{c + 1}": 100 * _mean(dice[:, c]) for c in classes},
            # Of each volume first.
            f"hd95_{unit}": _mean([*map(_mean, hd95)]),
            f"assd_{unit}": _mean([*map(_mean, assd)]),
            "undefined": float(np.isnan(hd95).sum()),
        }

    def _scores(self, split: Split) -> tuple[list[np.ndarray], list[np.ndarray], str]:
        """Returns volumes or images, their Dice, IoU, HD95 and ASSD f[V, R], and the unit."""
        volumes, masks = _volumes(split), (self.predicted, split.labels)
        far = surface_scores(*masks, 1 + self.overlaps.counts.shape[1], volumes, nested=self.nested)
        overlap = [of[[samples[0] for samples in volumes]] for of in score_of(self.overlaps)[0]]
        unit = "mm" if SPACING in split.labels else "pixels"
        return volumes, [*overlap, *np.moveaxis(far, -1, 0)], unit

    def row(self, split: Split) -> dict[str, np.ndarray]:
        """Returns the arrays from which `read_row` makes a client's `AnsweredMasks`."""
        volumes = _volumes(split)
        dice = score_of(self.overlaps)[0][0][[samples[0] for samples in volumes]]
        arrays, titles = {"dice": dice.astype(np.float32)}, []
        for number, moment in _by_moment(dice.mean(-1)):
            # The slice with the most pixels in either mask.
            shared, predicted, true = np.moveaxis(
                self.overlaps.counts[volumes[number]].sum(1), -1, 0
            )
            sample = int(volumes[number][(predicted + true - shared).argmax()])
            masks = split.labels[MASK][sample], self.predicted[sample]
            image = np.asarray(split.images[sample : sample + 1])[0]
            arrays[f"picture.{len(titles)}"] = small_picture(image, _SIDE)
            arrays[f"masks.{len(titles)}"] = np.stack([small_mask(mask, _SIDE) for mask in masks])
            titles.append(f"{moment}, {100 * dice[number].mean():.1f} %: {_name(split, sample)}")
        return arrays | {"titles": np.array(json.dumps(titles))}

    def predictions(self) -> dict[str, np.ndarray]:
        """Returns the arrays that `config.predictions=npz` writes."""
        return {"predicted": self.predicted}

    def table(self, split: Split) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Returns the heads and rows that `config.predictions=csv` writes, by volume and class."""
        volumes, scores, unit = self._scores(split)
        rows = (
            (_name(split, volumes[v][0]), r + 1, *(float(score[v, r]) for score in scores))
            for v, r in np.ndindex(scores[0].shape)
        )
        return ("sample", "class", "dice", "iou", f"hd95_{unit}", f"assd_{unit}"), rows


def answering_masks(task: Task) -> Task:
    """Returns a task of `task.segmentation` with `MaskAnswers` as its score."""
    score = task.score

    def of_batch(logits: jax.Array, label: Any, valid: jax.Array) -> tuple[Overlaps, jax.Array]:
        # One byte for each pixel, where logits would take four for each class.
        predicted = as_classes(logits).argmax(-1).astype(jnp.uint8)
        return score.of_batch(logits, label, valid), predicted

    def of_all(batches: tuple[Overlaps, np.ndarray]) -> MaskAnswers:
        overlaps, predicted = batches  # of batches [T, B, ...]
        of_samples = jax.tree.map(lambda leaf: leaf[overlaps.valid], overlaps)
        percent = float(score.of_all(overlaps))
        return MaskAnswers(predicted[overlaps.valid], of_samples, percent, task.nested)

    return task._replace(score=Score("answers", of_batch, of_all))


def _volumes(split: Split) -> list[np.ndarray]:
    """Returns `volumes_of` the samples, slices in the order in which they are stored."""
    order = split.images.index if isinstance(split.images, Rows) else None
    return volumes_of(split.labels, order)


def _name(split: Split, sample: int) -> str:
    return str(sample if split.names is None else split.names[sample])


def _mean(values: Any) -> float:
    """Returns the mean of the values that are defined; NaN if none are."""
    finite = np.asarray(values)[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else np.nan


def _by_moment(dice: np.ndarray) -> list[tuple[int, str]]:
    """Returns (volume, moment) of the best, median and worst Dice f[V], each volume once."""
    order = np.argsort(-dice, kind="stable").tolist()
    if not order:
        return []
    moments = {order[len(order) // 2]: 1, order[-1]: 2, order[0]: 0}
    return [
        (volume, _MOMENTS[moments[volume]]) for volume in sorted(moments, key=moments.__getitem__)
    ]


class AnsweredMasks(NamedTuple):
    """What a folder keeps of the masks of one client, or of one unseen domain and adaptation.

    Attributes:
      dice: f32[V, R] in [0, 1], of each volume or image and region.
      pictures: of the best, the median and the worst, fewer of fewer volumes; as in
        `segmentation.overlays`.
    """

    dice: np.ndarray
    pictures: list[tuple[np.ndarray, np.ndarray, np.ndarray, str]]


def read_row(row: Mapping[str, np.ndarray]) -> AnsweredMasks:
    """Returns a row that `MaskAnswers.row` made.

    Raises:
      ValueError, KeyError, TypeError: an array is missing or damaged.
    """
    if row["dice"].ndim != 2 or row["dice"].dtype.kind != "f":
        raise ValueError(f"its Dice scores are {row['dice'].dtype}{row['dice'].shape}, not f[V, R]")
    pictures = []
    for j, title in enumerate(json.loads(str(row["titles"]))):
        truth, predicted = row[f"masks.{j}"]
        pictures.append((row[f"picture.{j}"], truth, predicted, title))
    return AnsweredMasks(row["dice"], pictures)
