"""Measures predicted masks, and makes and reads the rows of `answers/` that a report needs.

The measures of a client are means over its volumes, or over its images if they are of no volume:

    iou           percent, mean over the regions, which are the classes without the background
    dice_C        percent, of class C, if there are several regions
    hd95_U        mean over the regions of both masks, U is "mm" or "pixels"
    assd_U        likewise
    undefined     number of volumes and regions without distances, because a mask lacks the region

Distances are computed at every evaluation, although on the host: a network takes much longer.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.domain import Rows, Split
from fedjax_bn.data.label_trees import MASK, SPACING
from fedjax_bn.run.evaluation.pictures import small_mask, small_picture
from fedjax_bn.segmentation.loss import as_classes
from fedjax_bn.segmentation.overlap import Overlaps, score_of
from fedjax_bn.segmentation.surfaces import surface_scores, volumes_of
from fedjax_bn.task import Score, Task

_SIDE = 160  # of a picture
_MOMENTS = ("best", "median", "worst")  # volumes by Dice, of each of which a slice is kept


class MaskAnswers(NamedTuple):
    """Predicted masks of the samples of a split, in the split's order.

    Attributes:
      predicted: u8[N, H, W].
      found: `segmentation.overlaps` of the samples.
      percent: the task's score.
      nested: as in `task.segmentation`.
    """

    predicted: np.ndarray
    found: Overlaps
    percent: float
    nested: bool

    def ordered(self, index: np.ndarray) -> "MaskAnswers":
        """Returns the answers to the samples at index i64[N]."""
        found = jax.tree.map(lambda leaf: leaf[index], self.found)
        return self._replace(predicted=self.predicted[index], found=found)

    def measures(self, split: Split) -> dict[str, float]:
        """Returns name -> value of each measure of the module; NaN if it is not defined."""
        unit = "mm" if SPACING in split.labels else "pixels"
        dice, iou, far = self._scores(split)
        classes = range(1, 1 + dice.shape[1]) if dice.shape[1] > 1 else ()
        return {
            "iou": 100 * _mean(iou),
            **{f"dice_{number}": 100 * _mean(dice[:, number - 1]) for number in classes},
            **{f"{name}_{unit}": _mean([*map(_mean, far[..., n].T)]) for n, name in _DISTANCES},
            "undefined": float(np.isnan(far[..., 0]).sum()),
        }

    def _scores(self, split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns Dice f[V, R], IoU f[V, R], and HD95 and ASSD f[V, R, 2] of volumes or images."""
        classes, order = 1 + self.found.counts.shape[1], _order(split)
        first = [samples[0] for samples in volumes_of(split.labels, order)]
        (dice, iou), _ = score_of(self.found)
        given = self.predicted, split.labels, classes
        return dice[first], iou[first], surface_scores(*given, nested=self.nested, order=order)

    def row(self, split: Split) -> dict[str, np.ndarray]:
        """Returns the arrays from which `read_row` makes a client's `AnsweredMasks`."""
        volumes = volumes_of(split.labels, _order(split))
        dice = score_of(self.found)[0][0][[samples[0] for samples in volumes]]
        arrays, shown = {"dice": dice.astype(np.float32)}, []
        for number, moment in _by_moment(dice.mean(-1)):
            # The slice with the most pixels in either mask.
            both, own, true = np.moveaxis(self.found.counts[volumes[number]].sum(1), -1, 0)
            sample = int(volumes[number][(own + true - both).argmax()])
            masks = split.labels[MASK][sample], self.predicted[sample]
            image = np.asarray(split.images[sample : sample + 1])[0]
            arrays[f"picture.{len(shown)}"] = small_picture(image, _SIDE)
            arrays[f"masks.{len(shown)}"] = np.stack([small_mask(one, _SIDE) for one in masks])
            name = str(sample if split.names is None else split.names[sample])
            shown.append([moment, name, 100 * float(dice[number].mean())])
        return arrays | {"shown": np.array(json.dumps(shown))}

    def predictions(self) -> dict[str, np.ndarray]:
        """Returns the arrays that `config.predictions=npz` writes."""
        return {"predicted": self.predicted}

    def table(self, split: Split) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Returns the heads and rows that `config.predictions=csv` writes, by volume and class."""
        first = [samples[0] for samples in volumes_of(split.labels, _order(split))]
        names = [int(n) if split.names is None else str(split.names[n]) for n in first]
        unit = "mm" if SPACING in split.labels else "pixels"
        dice, iou, far = self._scores(split)
        rows = (
            (names[v], r + 1, *map(float, (dice[v, r], iou[v, r], *far[v, r])))
            for v, r in np.ndindex(dice.shape)
        )
        return ("sample", "class", "dice", "iou", f"hd95_{unit}", f"assd_{unit}"), rows


_DISTANCES = tuple(enumerate(("hd95", "assd")))


def answering_masks(task: Task) -> Task:
    """Returns a task of `task.segmentation` with `MaskAnswers` as its score."""
    score = task.score

    def of_batch(logits: jax.Array, label: Any, valid: jax.Array) -> tuple[Overlaps, jax.Array]:
        # One byte for each pixel, where logits would take four for each class.
        predicted = as_classes(logits).argmax(-1).astype(jnp.uint8)
        return score.of_batch(logits, label, valid), predicted

    def of_all(kept: tuple[Overlaps, np.ndarray]) -> MaskAnswers:
        found, predicted = kept  # of batches [T, B, ...]
        own = jax.tree.map(lambda leaf: leaf[found.valid], found)
        percent = float(score.of_all(found))
        return MaskAnswers(predicted[found.valid], own, percent, task.nested)

    return task._replace(score=Score("answers", of_batch, of_all))


def _order(split: Split) -> np.ndarray | None:
    """Returns the places i64[N] where samples are stored, in whose order slices are stored."""
    return split.images.index if isinstance(split.images, Rows) else None


def _mean(values: Any) -> float:
    """Returns the mean of the values that are defined; NaN if none are."""
    known = np.asarray(values)[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan


def _by_moment(dice: np.ndarray) -> list[tuple[int, str]]:
    """Returns (volume, moment) of the best, median and worst Dice f[V], each volume once."""
    order = np.argsort(-dice, kind="stable").tolist()
    if not order:
        return []
    found = {order[len(order) // 2]: 1, order[-1]: 2, order[0]: 0}
    return [(one, _MOMENTS[found[one]]) for one in sorted(found, key=found.__getitem__)]


class MaskPicture(NamedTuple):
    """A sample with its masks.

    Attributes:
      moment: "best", "median" or "worst" of the client's volumes or images by Dice.
      name: of the sample.
      dice: of its volume, percent.
      image: u8[h, w, 1 or 3].
      truth, predicted: u8[h, w], as `label_trees` defines masks.
    """

    moment: str
    name: str
    dice: float
    image: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray


class AnsweredMasks(NamedTuple):
    """What a folder keeps of the masks of one client, or of one unseen domain and adaptation.

    Attributes:
      dice: f32[V, R] in [0, 1], of each volume or image and region.
      pictures: the best, the median and the worst, fewer of fewer volumes.
    """

    dice: np.ndarray
    pictures: list[MaskPicture]


def read_row(row: Mapping[str, np.ndarray]) -> AnsweredMasks:
    """Returns a row that `MaskAnswers.row` made.

    Raises:
      ValueError, KeyError, TypeError: an array is missing or damaged.
    """
    if row["dice"].ndim != 2 or row["dice"].dtype.kind != "f":
        raise ValueError(f"its Dice scores are {row['dice'].dtype}{row['dice'].shape}, not f[V, R]")
    pictures = []
    for j, (moment, name, dice) in enumerate(json.loads(str(row["shown"]))):
        truth, predicted = row[f"masks.{j}"]
        picture = MaskPicture(moment, name, dice, row[f"picture.{j}"], truth, predicted)
        pictures.append(picture)
    return AnsweredMasks(row["dice"], pictures)
