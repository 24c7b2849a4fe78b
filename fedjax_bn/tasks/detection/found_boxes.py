"""Draws images with their right, wrong and missed boxes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from fedjax_bn.tasks.detection.task import overlaps_of
from fedjax_bn.tasks.figures import on_plot, picture_rows

_OVERLAP = 0.5  # least IoU of a right box with a true box of its class, as for mAP50
_COLOURS = {"right": "lime", "wrong": "red", "missed": "orange"}


class BoxPicture(NamedTuple):
    """An image with its detections and true boxes."""

    image: np.ndarray  # u8[H, W, 3]
    boxes: np.ndarray  # corners f[D, 4] of the detections in [0, 1] of the image, best first
    scores: np.ndarray  # f[D]
    classes: np.ndarray  # i32[D]; -1 where there is nothing
    true_boxes: np.ndarray  # corners f[M, 4] in [0, 1] of the image
    true_classes: np.ndarray  # i32[M]; below 0 where there is nothing to find


def found_boxes(rows: Mapping[str, Sequence[BoxPicture]], names: Sequence[str]) -> bytes:
    """Draws images with right, wrong and missed boxes of named classes, see `picture_rows`."""
    captions = [on_plot(name, 12) for name in names]

    def draw(axes: Axes, picture: BoxPicture) -> None:
        axes.imshow(picture.image)
        right, missed = judge_boxes(picture)
        for m in np.flatnonzero(missed):
            box, caption = picture.true_boxes[m], captions[picture.true_classes[m]]
            draw_box(axes, picture.image, box, caption, _COLOURS["missed"], at_end=True)
        for d in np.flatnonzero(picture.classes >= 0)[::-1]:  # the best one on top
            caption = f"{captions[picture.classes[d]]} {picture.scores[d]:.2f}"
            colour = _COLOURS["right" if right[d] else "wrong"]
            draw_box(axes, picture.image, picture.boxes[d], caption, colour)

    legend = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    return picture_rows(rows, draw, legend, width=2, height=2)


def draw_box(
    axes: Axes,
    image: np.ndarray,
    box: np.ndarray,
    caption: str,
    colour: str,
    first_column: int = 0,
    at_end: bool = False,
) -> None:
    """Draws a box f[4] in [0, 1] with a caption on an image u8[H, W, C].

    The image starts at column `first_column`. The caption is above the box, or at the lower edge if
    there is no room; it is at the left side, or with `at_end` at the right side.
    """
    height, width = image.shape[:2]
    # Matplotlib's `imshow` puts the centres of pixels at whole numbers.
    x1, y1, x2, y2 = box * np.array([width, height] * 2) - 0.5
    x1, x2 = x1 + first_column, x2 + first_column
    axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, color=colour, linewidth=1.2))
    above = y1 > 0.1 * height
    if caption:
        axes.text(
            *(x2 if at_end else max(x1, first_column), y1 if above else min(y2, height - 1)),
            caption,
            color="black",  # on a background of the box's colour: legible on any image
            backgroundcolor=colour,
            size=6,
            ha="right" if at_end else "left",
            va="bottom",
            clip_on=True,
        ).get_bbox_patch().set_boxstyle("square", pad=0.1)


def judge_boxes(picture: BoxPicture) -> tuple[np.ndarray, np.ndarray]:
    """Returns which detections are right, bool[D], and which true boxes none matches, bool[M]."""
    right = np.zeros(len(picture.classes), bool)
    missed = picture.true_classes >= 0
    overlap = overlaps_of(picture.boxes, picture.true_boxes, np.False_)
    for d in np.flatnonzero(picture.classes >= 0):
        able = missed & (picture.true_classes == picture.classes[d])
        value = np.where(able, overlap[d], -1)
        if value.max(initial=-1) >= _OVERLAP:
            right[d] = True
            missed[value.argmax()] = False  # a true box matches at most one detection, the best
    return right, missed
