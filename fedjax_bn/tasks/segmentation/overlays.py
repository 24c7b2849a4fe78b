"""Draws images with their masks, and with what is right, wrong and missed in a prediction."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.tasks.figures import on_plot, picture_rows

_SHARE = 0.6  # of the colour in a coloured pixel
# Of classes 1, 2, ...; later ones begin again.
_CLASSES = ("deepskyblue", "gold", "violet", "turquoise", "tan", "slateblue", "khaki", "hotpink")
_JUDGEMENTS = {"right": "lime", "wrong": "red", "missed": "cyan", "another class": "magenta"}
_UNKNOWN = "lightgrey"

# image u8[H, W, 1 or 3], true and predicted mask u8[H, W], and the text above them; masks have
# classes with 0 for the background, and 255 for no label
Picture = tuple[np.ndarray, np.ndarray, np.ndarray, str]


def coloured(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns an image u8[H, W, 3] with the colour of each class of a mask u8[H, W] in its pixels.

    The image is u8[H, W, 1 or 3]. The background keeps its pixels, and pixels without a label are
    light grey.
    """
    numbers = np.unique(mask[mask > 0]).tolist()
    return _painted(image, [(_colour(number), mask == number) for number in numbers])


def judged(image: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Returns an image u8[H, W, 3] whose colours show where a prediction is right.

    A pixel is right, wrong (a class is predicted in the background), missed (the background is
    predicted in a class), or of another class. Arguments are as in `Picture`.
    """
    in_truth, in_prediction, same = truth > 0, predicted > 0, truth == predicted
    parts = {
        "right": in_truth & same,
        "wrong": in_prediction & ~in_truth,
        "missed": in_truth & ~in_prediction,
        "another class": in_truth & in_prediction & ~same,
    }
    # 255 is above 0 too, but without a label no pixel is right or wrong.
    labelled = truth != UNLABELLED
    painted_parts = [(_JUDGEMENTS[kind], part & labelled) for kind, part in parts.items()]
    return _painted(image, [*painted_parts, (_UNKNOWN, ~labelled)])


def _colour(number: int) -> str:
    return _UNKNOWN if number == UNLABELLED else _CLASSES[(number - 1) % len(_CLASSES)]


def _painted(image: np.ndarray, parts: Iterable[tuple[str, np.ndarray]]) -> np.ndarray:
    """Returns an image u8[H, W, 3] with each colour mixed into its part bool[H, W]."""
    # A grey image has its one channel three times; the copy leaves the caller's image alone.
    pixels = np.broadcast_to(image, (*image.shape[:2], 3)).astype(float)
    for colour, part in parts:
        pixels[part] += _SHARE * (255 * np.array(to_rgb(colour)) - pixels[part])
    return pixels.round().astype(np.uint8)


def class_legend(names: Sequence[str], unlabelled: bool) -> list[Patch]:
    """Returns a legend of all classes but the first, the background, and of no label if needed."""
    entries = [(_colour(number), on_plot(name, 20)) for number, name in enumerate(names) if number]
    entries += [(_UNKNOWN, "no label")] * unlabelled
    return [Patch(facecolor=colour, edgecolor="grey", label=name) for colour, name in entries]


def overlays(rows: Mapping[str, Sequence[Picture]], names: Sequence[str]) -> bytes:
    """Draws images with truth and with prediction, see `picture_rows` and `class_legend`."""
    truths = [truth for pictures in rows.values() for _, truth, *_ in pictures]
    legend = class_legend(names, any((truth == UNLABELLED).any() for truth in truths))
    # With a single class no prediction can be of another one.
    kinds = [kind for kind in _JUDGEMENTS if kind != "another class" or len(names) > 2]
    legend += [
        Patch(facecolor=_JUDGEMENTS[kind], edgecolor="grey", label=f"prediction: {kind}")
        for kind in kinds
    ]

    def draw(axes: Axes, picture: Picture) -> None:
        image, truth, predicted, title = picture
        gap = np.full((len(image), max(1, image.shape[1] // 30), 3), 255, np.uint8)
        halves = coloured(image, truth), gap, judged(image, truth, predicted)
        axes.imshow(np.concatenate(halves, 1))
        axes.set_title(on_plot(title), fontsize=8)

    return picture_rows(rows, draw, legend, width=2.8, height=1.6)
