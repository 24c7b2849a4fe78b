"""Writes what a run records of its data: data.json, and plots of samples and class counts."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.data import label_trees
from fedjax_bn.data.domain import Dataset, Domain, Split, splits
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.tasks.detection.found_boxes import draw_box
from fedjax_bn.tasks.figures import in_lines, on_plot, png
from fedjax_bn.tasks.segmentation.overlays import class_legend, coloured
from fedjax_bn.training.evaluation.answers import small_mask, small_picture
from fedjax_bn.training.evaluation.plots import class_names
from fedjax_bn.training.records import Record, some_of
from fedjax_bn.training.workdir import write_json, write_picture

_SIDE = 128  # most pixels of a side of an image with a mask
_MOST_COUNTED = 200  # clients whose labels are shown
_MOST_SAMPLED = 40  # clients whose images are shown


def data_facts(internal: Dataset, unseen: Sequence[Domain], limit: int = 100) -> Record:
    """Returns the content of data.json.

    At most `limit` clients are listed, evenly spaced. All samples of unseen domains count as test.

    Returns:
      {"classes": names, "clients": {client: {split: counts}}, "unseen": {domain: {"test": counts}},
      "boxes" and "masks": whether boxes or pixels are counted by class, "number": of all clients},
      where counts are {"samples": n, "classes": [n of each class]}. Clients that are tested on
      their validation samples have no "test".
    """

    def counts(parts: Sequence[Split]) -> Record:
        # An unseen domain may use one split under several names: it is counted once.
        parts = {id(part): part for part in parts}.values()
        totals = sum(label_trees.class_counts(p.labels, internal.num_classes) for p in parts)
        return {"samples": sum(len(p.images) for p in parts), "classes": [*map(int, totals)]}

    labels, clients = internal.domains[0].train.labels, {}
    for k in some_of(len(internal.domains), limit):
        domain = internal.domains[k]
        parts = {name: counts([split]) for name, split in splits(domain)}
        if domain.test is domain.validation:
            del parts["test"]
        clients[domain.name] = parts
    return {
        "classes": list(class_names(internal)),
        "clients": clients,
        "unseen": {d.name: {"test": counts([split for _, split in splits(d)])} for d in unseen},
        "boxes": label_trees.has_boxes(labels),
        "masks": label_trees.has_masks(labels),
        "number": len(internal.domains),
    }


def write_data_plots(
    folder: Path, internal: Dataset, unseen: Sequence[Domain], limit: int = 100
) -> None:
    """Writes data.json, and plots of the clients' samples and of their class counts."""
    write_json(folder / "data.json", data_facts(internal, unseen, limit))
    shown = [internal.domains[k] for k in some_of(len(internal.domains), _MOST_SAMPLED)]
    masked = label_trees.has_masks(internal.domains[0].train.labels)
    classes, place = class_names(internal) if masked else (), folder / "plots"
    write_picture(place / "samples.png", lambda: samples([*shown, *unseen], classes=classes))
    write_picture(place / "class_counts.png", lambda: draw_class_counts(internal))


def samples(domains: list[Domain], count: int = 10, classes: Sequence[str] = ()) -> bytes:
    """Draws the first `count` samples of each client in a row: images, or features as curves.

    Masks are drawn in the colours of their `classes`, boxes as frames.
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
        if classes:
            masks = split.labels[label_trees.MASK][:count]
            pairs = zip(images, masks, strict=True)
            images = np.stack(
                [coloured(small_picture(i, _SIDE), small_mask(m, _SIDE)) for i, m in pairs]
            )
            unlabelled |= bool((masks == UNLABELLED).any())
        if images.ndim == 2:  # curves side by side on one scale
            width = images.shape[1]
            for number, values in enumerate(images):
                place = number * 1.1 * width + np.arange(width)
                axes.plot(place, values, linewidth=0.8, color="C0")
            axes.set_xlim(-0.05 * width, (1.1 * count - 0.05) * width)
        else:
            axes.imshow(_in_a_row(images, count), cmap="gray", vmin=0, vmax=1)
            for number, image in enumerate(images):
                offset = number * (image.shape[1] + _gap(images))
                for box in label_trees.boxes_of(split.labels, number):
                    draw_box(axes, image, box, "", "lime", offset)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    if classes:
        place = {"loc": "outside upper center", "ncols": 8, "fontsize": "small"}
        figure.legend(handles=class_legend(classes, unlabelled), **place)
    return png(figure)


def _in_a_row(images: np.ndarray, count: int) -> np.ndarray:
    """Returns images [n, H, W, C] as one picture with room for `count` and white gaps.

    Three channels stay. Of others the first is scaled to [0, 1] by its own range: f64[H, width].
    """
    white = 255 if images.dtype == np.uint8 else 1
    if images.shape[-1] != 3:
        grey, white = images[..., 0].astype(float), np.nan
        low, high = (end(axis=(1, 2), keepdims=True) for end in (grey.min, grey.max))
        images = (grey - low) / np.where(high > low, high - low, 1)
    gap = _gap(images)
    room = [(0, count - len(images)), (0, 0), (0, gap)] + [(0, 0)] * (images.ndim - 3)
    padded = np.pad(images, room, constant_values=white)
    return np.concatenate(padded, axis=1)[:, :-gap]


def _gap(images: np.ndarray) -> int:
    return max(1, images.shape[2] // 10)  # pixels


def draw_class_counts(dataset: Dataset) -> bytes:
    """Draws the training samples, boxes or pixels by class and client (FedIG, Fig. 10)."""
    domains = [dataset.domains[k] for k in some_of(len(dataset.domains), _MOST_COUNTED)]
    counts = [label_trees.class_counts(d.train.labels, dataset.num_classes) for d in domains]
    table = np.stack(counts, axis=1)  # [C, K]
    classes, clients = table.shape
    size = (max(5, 2.5 + 0.42 * min(clients, 40)), max(3, 1.6 + 0.3 * min(classes, 20)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    if clients < len(dataset.domains):
        axes.set_title(f"{clients} of {len(dataset.domains):,} clients", fontsize=10)
    mesh = axes.pcolormesh(table, cmap="Blues", vmin=0)
    unit = label_trees.counted(domains[0].train.labels)
    figure.colorbar(mesh, label=f"training {unit}", pad=0.01)
    axes.set(xticks=[], ylabel="class")
    if classes <= 20:
        labels = map(on_plot, class_names(dataset))
        axes.set_yticks(np.arange(classes) + 0.5, labels, fontsize=8)
    if clients <= 40:
        names = (on_plot(domain.name) for domain in domains)
        axes.set_xticks(np.arange(clients) + 0.5, names, fontsize=8, rotation=30, ha="right")
    axes.invert_yaxis()
    return png(figure)
