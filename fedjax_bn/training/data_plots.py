"""Writes what a run records of its data: data.json, and plots of samples and class counts."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fedjax_bn.data import label_trees
from fedjax_bn.data.domain import Dataset, Domain, Split, splits
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.tasks.detection.found_boxes import draw_box
from fedjax_bn.tasks.figures import in_lines, on_plot, png
from fedjax_bn.tasks.segmentation.overlays import class_legend, coloured
from fedjax_bn.training.evaluation.groups import some_of
from fedjax_bn.training.evaluation.per_sample import class_names
from fedjax_bn.training.evaluation.pictures import small_mask, small_picture
from fedjax_bn.training.records import Record
from fedjax_bn.training.workdir import write_json, write_picture

_SIDE = 128  # most pixels of a side of an image with a mask
_MOST_COUNTED = 200  # clients whose labels are shown
_CONNECTOMES = "abide"  # the data set whose features are the upper triangles of matrices
_MOST_SAMPLED = 40  # clients whose images are shown


def data_facts(internal: Dataset, unseen: Sequence[Domain], limit: int = 100) -> Record:
    """Returns the content of data.json.

    Args:
      internal: the clients.
      unseen: the domains without a client; all their samples count as test samples.
      limit: the most clients that are listed; of more, an evenly spaced selection is.

    Returns:
      {"classes": names, "clients": {client: {split: counts}}, "unseen": {domain: {"test": counts}},
      without "test" for clients that are tested on their validation samples,
      "boxes" and "masks": whether boxes or pixels are counted by class, "number": of all clients},
      where counts are
      {"samples": n, "classes": [n of each class]}.
    """

    def counts(parts: Sequence[Split]) -> Record:
        # an unseen domain may use one split under several names: it is counted once
        parts = {id(part): part for part in parts}.values()
        totals = sum(label_trees.class_counts(part.labels, number) for part in parts)
        samples = sum(len(part.images) for part in parts)
        return {"samples": samples, "classes": [int(count) for count in totals]}

    number = internal.num_classes
    shown = [internal.domains[k] for k in some_of(len(internal.domains), limit)]
    return {
        "classes": list(internal.classes or map(str, range(number))),
        "clients": {
            domain.name: {
                name: counts([split])
                for name, split in splits(domain)
                if name != "test" or domain.test is not domain.validation
            }
            for domain in shown
        },
        "unseen": {
            domain.name: {"test": counts([split for _, split in splits(domain)])}
            for domain in unseen
        },
        "boxes": label_trees.has_boxes(internal.domains[0].train.labels),
        "masks": label_trees.has_masks(internal.domains[0].train.labels),
        "number": len(internal.domains),
    }


def write_data_plots(
    folder: Path, internal: Dataset, unseen: Sequence[Domain], limit: int = 100
) -> None:
    """Writes data.json, and plots of the clients' samples and of their class counts.

    An evenly spaced selection of many clients is shown; data.json lists at most `limit` clients.
    """
    write_json(folder / "data.json", data_facts(internal, unseen, limit))
    shown = [internal.domains[k] for k in some_of(len(internal.domains), _MOST_SAMPLED)]
    options = {"connectomes": True} if internal.name == _CONNECTOMES else {}
    if label_trees.has_masks(internal.domains[0].train.labels):
        options = {"classes": class_names(internal)}
    place = folder / "plots"
    write_picture(place / "samples.png", lambda: samples([*shown, *unseen], **options))
    write_picture(place / "class_counts.png", lambda: class_counts(internal))


def samples(
    domains: list[Domain], count: int = 10, connectomes: bool = False, classes: Sequence[str] = ()
) -> bytes:
    """Draws the first samples of each client in a row: images, connectomes, or profiles.

    They are from the first split that the client has: training, validation or test.

    Args:
      domains: the clients and unseen domains.
      count: the number of samples of each.
      connectomes: whether features f[F] are the upper triangle of a correlation matrix; other
        features are drawn as a curve over their index.
      classes: the names of the classes of masks, which are drawn in their colours.
    """
    names = [in_lines(domain.name) for domain in domains]
    heights = [max(0.8, 0.16 * name.count("\n") + 0.2) for name in names]
    figure = Figure(figsize=(count * 0.75 + 1.5, sum(heights)), layout="constrained")
    # One picture for a whole row, because matplotlib's time grows with the number of pictures.
    grid = figure.subplots(len(domains), squeeze=False, height_ratios=heights)[:, 0]
    unlabelled = False
    for axes, domain, name in zip(grid, domains, names, strict=True):
        split = next(splits(domain))[1]
        images = np.stack([*islice(split.images, count)])
        images = _as_matrices(images) if connectomes and images.ndim == 2 else images
        if classes:
            masks = split.labels[label_trees.MASK][:count]
            images = np.stack([*map(_with_mask, images, masks)])
            unlabelled |= bool((masks == UNLABELLED).any())
        if images.ndim == 2:  # profiles side by side on one scale
            width = images.shape[1]
            for number, values in enumerate(images):
                place = number * 1.1 * width + np.arange(width)
                axes.plot(place, values, linewidth=0.8, color="C0")
            axes.set_xlim(-0.05 * width, (1.1 * count - 0.05) * width)
        else:
            axes.imshow(_in_a_row(images, count), cmap="gray", vmin=0, vmax=1)
        for number, image in enumerate(images):
            offset = number * (image.shape[1] + _gap(images)) if image.ndim > 1 else 0
            for box in label_trees.boxes_of(split.labels, number):
                draw_box(axes, image, box, "", "lime", offset)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    if classes:
        place = {"loc": "outside upper center", "ncols": 8, "fontsize": "small"}
        figure.legend(handles=class_legend(classes, unlabelled), **place)
    return png(figure)


def _with_mask(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns a stored image [H, W, C] with its mask u8[H, W] in colours, u8[h, w, 3]."""
    return coloured(small_picture(image, _SIDE), small_mask(mask, _SIDE))


def _as_matrices(features: np.ndarray) -> np.ndarray:
    """Returns symmetric f[n, R, R, 1], diagonal 1, from upper triangles f[n, F], F = R(R - 1)/2."""
    regions = round((1 + np.sqrt(1 + 8 * features.shape[1])) / 2)
    above = np.zeros((len(features), regions, regions), features.dtype)
    above[:, *np.triu_indices(regions, 1)] = features
    return (above + above.transpose(0, 2, 1) + np.eye(regions, dtype=features.dtype))[..., None]


def _in_a_row(images: np.ndarray, count: int) -> np.ndarray:
    """Returns images [n, H, W, C] as one picture with room for `count` and white gaps.

    Three channels are colours, which are unchanged. Of other images the first channel is shown, as
    in `small_picture`, each scaled to [0, 1] by its own range.

    Returns:
      [H, width, 3] of colours, else f64[H, width] with NaN in the gaps.
    """
    if images.shape[-1] != 3:
        grey = images[..., 0].astype(float)
        low, high = (end(axis=(1, 2), keepdims=True) for end in (grey.min, grey.max))
        images, white = (grey - low) / np.where(high > low, high - low, 1), np.nan
    else:
        white = 255 if images.dtype == np.uint8 else 1
    gap = _gap(images)
    room = [(0, count - len(images)), (0, 0), (0, gap)] + [(0, 0)] * (images.ndim - 3)
    padded = np.pad(images, room, constant_values=white)
    return np.concatenate(padded, axis=1)[:, :-gap]


def _gap(images: np.ndarray) -> int:
    """Returns the width in pixels of the gap between two images [n, H, W, C] in a row."""
    return max(1, images.shape[2] // 10)


def class_counts(dataset: Dataset) -> bytes:
    """Draws the number of training samples by class (rows) and client (columns).

    FedIG's Fig. 10 is of this kind. If images have boxes or masks, boxes or pixels are counted. If
    there are many clients, an evenly spaced selection is shown.
    """
    domains = [dataset.domains[k] for k in some_of(len(dataset.domains), _MOST_COUNTED)]
    counts = [label_trees.class_counts(d.train.labels, dataset.num_classes) for d in domains]
    table = np.stack(counts, axis=1)  # [C, K]
    classes, clients = table.shape
    roomy = classes <= 20 and clients <= 40
    size = (max(5, 2.5 + 0.42 * min(clients, 40)), max(3, 1.6 + 0.3 * min(classes, 20)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    if clients < len(dataset.domains):
        axes.set_title(f"{clients} of {len(dataset.domains):,} clients", fontsize=10)
    mesh = axes.pcolormesh(table, cmap="Blues", vmin=0, edgecolors="0.85", linewidth=0.5 * roomy)
    unit = label_trees.counted(domains[0].train.labels)
    figure.colorbar(mesh, label=f"training {unit}", pad=0.01)
    if roomy:
        short = EngFormatter(places=1, sep="")  # 1.2M
        for (row, column), count in np.ndenumerate(table):
            color = "white" if count > 0.6 * table.max() else "black"
            count_text = str(count or "") if count < 10_000 else short(count)
            axes.text(
                column + 0.5, row + 0.5, count_text, ha="center", va="center", size=7, color=color
            )
    if classes <= 20:
        names = [on_plot(name) for name in dataset.classes or map(str, range(classes))]
        axes.set_yticks(np.arange(classes) + 0.5, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_ylabel("class")
    # "mnist/3" is client 3 of mnist: a number below each column, domains below the numbers
    places, _, numbers = zip(*(domain.name.rpartition("/") for domain in domains), strict=True)
    look = {"fontsize": 8} if any(places) else {"fontsize": 8, "rotation": 30, "ha": "right"}
    axes.set_xticks([])
    if clients <= 40:
        axes.set_xticks(np.arange(clients) + 0.5, map(on_plot, numbers), **look)
    starts = [k for k in range(clients) if k == 0 or places[k] != places[k - 1]]
    for start, end in zip(starts, [*starts[1:], clients], strict=True) if any(places) else ():
        axes.axvline(start, color="black", linewidth=1.2)
        below = {"xytext": (0, -18), "textcoords": "offset points", "ha": "center", "va": "top"}
        middle = ((start + end) / 2, 0)
        axes.annotate(on_plot(places[start]), middle, xycoords=("data", "axes fraction"), **below)
    return png(figure)
