"""Draws images with their masks, and with what is right, wrong and missed in a prediction."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.tasks.figures import in_lines, on_plot, png

_SHARE = 0.6  # of the colour in a coloured pixel
# Of classes 1, 2, ...; later ones begin again.
_CLASSES = ("deepskyblue", "gold", "violet", "turquoise", "tan", "slateblue", "khaki", "hotpink")
_FOUND = {"right": "lime", "wrong": "red", "missed": "cyan", "another class": "magenta"}
_UNKNOWN = "lightgrey"


# image u8[H, W, 1 or 3], true and predicted mask u8[H, W], and the text above them; masks have
# classes with 0 for the background, and 255 for no label
Picture = tuple[np.ndarray, np.ndarray, np.ndarray, str]


def coloured(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns an image u8[H, W, 3] with the colour of each class of a mask u8[H, W] in its pixels.

    Args:
      image: u8[H, W, 1 or 3].
      mask: classes; the background keeps its pixels, and pixels without a label are light grey.
    """
    numbers = np.unique(mask[mask > 0]).tolist()
    return _painted(image, [(_colour(number), mask == number) for number in numbers])


def judged(image: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Returns an image u8[H, W, 3] whose colours show where a prediction is right.

    A pixel is right, wrong (a class is predicted in the background), missed (the background is
    predicted in a class), or of another class.

    Args:
      image, truth, predicted: as in `Picture`.
    """
    labelled, is_region, is_predicted = truth != UNLABELLED, truth > 0, predicted > 0
    same = truth == predicted
    parts_of_image = (
        is_region & is_predicted & same,
        is_predicted & ~is_region,
        is_region & ~is_predicted,
        is_region & is_predicted & ~same,
    )
    parts = [
        (name, part & labelled) for name, part in zip(_FOUND.values(), parts_of_image, strict=True)
    ]
    return _painted(image, [*parts, (_UNKNOWN, ~labelled)])


def _colour(number: int) -> str:
    return _UNKNOWN if number == UNLABELLED else _CLASSES[(number - 1) % len(_CLASSES)]


def _painted(image: np.ndarray, parts: Iterable[tuple[str, np.ndarray]]) -> np.ndarray:
    """Returns an image u8[H, W, 3] with each colour mixed into its part bool[H, W]."""
    pixels = np.broadcast_to(image, (*image.shape[:2], 3)).astype(float)
    for colour, part in parts:
        pixels[part] += _SHARE * (255 * np.array(to_rgb(colour)) - pixels[part])
    return pixels.round().astype(np.uint8)


def class_legend(names: Sequence[str], unlabelled: bool) -> list[Patch]:
    """Returns what a legend shows of the classes without the background.

    Args:
      names: of all classes, the background first.
      unlabelled: whether there are pixels without a label.
    """
    shown = [(_colour(number), on_plot(name, 20)) for number, name in enumerate(names) if number]
    shown += [(_UNKNOWN, "no label")] * unlabelled
    return [Patch(facecolor=colour, edgecolor="grey", label=name) for colour, name in shown]


def overlays(rows: Mapping[str, Sequence[Picture]], names: Sequence[str]) -> bytes:
    """Draws a row of images for each client, with truth and with prediction, as PNG bytes.

    Args:
      rows: client -> its pictures; a shorter row leaves places empty.
      names: of the classes, the background first.
    """
    count = max(map(len, rows.values()))
    all_pictures = [picture for pictures in rows.values() for picture in pictures]
    legend = class_legend(names, any((truth == UNLABELLED).any() for _, truth, *_ in all_pictures))
    legend += [
        Patch(facecolor=colour, edgecolor="grey", label=f"prediction: {kind}")
        for kind, colour in [*_FOUND.items()][: 4 if len(names) > 2 else 3]
    ]
    size = 2.8 * count + 0.6, 1.6 * len(rows) + 0.3 + 0.25 * len(legend) / count
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), count, squeeze=False)
    for row, (client, pictures) in zip(grid, rows.items(), strict=True):
        for axes in row:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for axes, (image, truth, predicted, title) in zip(row, pictures, strict=False):
            gap = np.full((len(image), max(1, image.shape[1] // 30), 3), 255, np.uint8)
            halves = coloured(image, truth), gap, judged(image, truth, predicted)
            axes.imshow(np.concatenate(halves, 1))
            axes.set_title(on_plot(title), fontsize=8)
        row[0].set_ylabel(in_lines(client, 20, 60), fontsize=9)
    figure.legend(handles=legend, loc="outside upper center", ncols=count, fontsize="small")
    return png(figure)
