"""Draws what a run has of its data and predictions, as PNG, and writes data.json."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.adaptation import Adaptation, record_alphas, running
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.adaptation.choice import varied
from fedjax_bn.arguments.text import file_name
from fedjax_bn.data.domain import Dataset, Domain, Split, scored_part, select, splits, whole
from fedjax_bn.data.labels import (
    BOXES,
    CLASS,
    MASK,
    boxes_of,
    class_counts,
    counted,
    has_boxes,
    has_masks,
)
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.images import Prepare
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.federation import FederatedState, client_variables, global_variables
from fedjax_bn.models.classifier import FeaturesOf
from fedjax_bn.normalization.calls import in_forward_order
from fedjax_bn.sharing import Variables
from fedjax_bn.tasks.detection import PREDICTION, detect
from fedjax_bn.tasks.detection.found_boxes import BoxPicture, draw_box, found_boxes
from fedjax_bn.tasks.figures import in_lines, on_plot, png
from fedjax_bn.tasks.segmentation.overlays import class_legend, coloured
from fedjax_bn.training.evaluation.answers import small_mask, small_picture
from fedjax_bn.training.evaluation.scoring import SplitBatches
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.records import Record, some_of
from fedjax_bn.training.workdir import write_json, write_picture

_MOST_EMBEDDED = 1000  # samples drawn at random for t-SNE, whose time grows fast with their number
_IMAGES = 6  # of a client, with boxes
_CLIENTS = 8  # internal clients with boxes, and at most as many unseen ones
_SIDE = 128  # most pixels of a side of an image
_MOST_COUNTED = 200  # clients whose labels are shown
_MOST_SAMPLED = 40  # clients whose images are shown


def data_facts(internal: Dataset, unseen: Sequence[Domain], limit: int = 100) -> Record:
    """Returns the content of data.json, with `limit` clients at most, evenly spaced.

    A split has the number of its samples and, of each class, of its samples, boxes or pixels.
    Clients that are tested on their validation samples have no "test".
    """

    def counts(parts: Sequence[Split]) -> Record:
        # An unseen domain may use one split under several names: it is counted once.
        parts = {id(part): part for part in parts}.values()
        totals = sum(class_counts(p.labels, internal.num_classes) for p in parts)
        return {"samples": sum(len(p.images) for p in parts), "classes": [*map(int, totals)]}

    labels, clients = internal.domains[0].train.labels, {}
    for domain in (internal.domains[k] for k in some_of(len(internal.domains), limit)):
        clients[domain.name] = {name: counts([split]) for name, split in splits(domain)}
        if domain.test is domain.validation:
            del clients[domain.name]["test"]
    return {
        "classes": list(_class_names(internal)),
        "clients": clients,
        "unseen": {d.name: {"test": counts([split for _, split in splits(d)])} for d in unseen},
        "boxes": has_boxes(labels),
        "masks": has_masks(labels),
        "number": len(internal.domains),
    }


def write_data_plots(
    folder: Path, internal: Dataset, unseen: Sequence[Domain], limit: int = 100
) -> None:
    """Writes data.json, and plots of the clients' samples and of their class counts."""
    write_json(folder / "data.json", data_facts(internal, unseen, limit))
    shown = [internal.domains[k] for k in some_of(len(internal.domains), _MOST_SAMPLED)]
    masked = has_masks(internal.domains[0].train.labels)
    classes, place = _class_names(internal) if masked else (), folder / "plots"
    write_picture(place / "samples.png", lambda: samples([*shown, *unseen], classes=classes))
    write_picture(place / "class_counts.png", lambda: draw_class_counts(internal))


def samples(domains: list[Domain], count: int = 10, classes: Sequence[str] = ()) -> bytes:
    """Draws the first `count` samples of each client in a row, with masks of `classes` or boxes."""
    names = [in_lines(domain.name) for domain in domains]
    heights = [max(0.8, 0.16 * name.count("\n") + 0.2) for name in names]
    figure = Figure(figsize=(count * 0.75 + 1.5, sum(heights)), layout="constrained")
    grid = figure.subplots(len(domains), squeeze=False, height_ratios=heights)[:, 0]
    unlabelled = False
    for axes, domain, name in zip(grid, domains, names, strict=True):
        split = next(splits(domain))[1]
        images = np.stack([*islice(split.images, count)])
        if images.ndim == 4 and images.shape[-1] != 3 and not classes:
            images = images[..., :1].astype(float)  # so that each has its own range
        images = [small_picture(image, _SIDE) for image in images]
        if classes:
            masks = split.labels[MASK][:count]
            pairs = zip(images, masks, strict=True)
            images = [coloured(image, small_mask(mask, _SIDE)) for image, mask in pairs]
            unlabelled |= bool((masks == UNLABELLED).any())
        if images[0].ndim == 1:  # curves side by side on one scale
            width = len(images[0])
            for number, values in enumerate(images):
                place = number * 1.1 * width + np.arange(width)
                axes.plot(place, values, linewidth=0.8, color="C0")
            axes.set_xlim(-0.05 * width, (1.1 * count - 0.05) * width)
        else:
            width = images[0].shape[1]
            step = width + max(1, width // 10)  # with a white gap
            # One picture for a row, because matplotlib's time grows with the number of pictures.
            row = np.full((len(images[0]), width + (count - 1) * step, 3), 255, np.uint8)
            for number, image in enumerate(images):
                row[:, number * step : number * step + width] = image
            axes.imshow(row)
            for number, image in enumerate(images):
                for box in boxes_of(split.labels, number):
                    draw_box(axes, image, box, "", "lime", number * step)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    if classes:
        place = {"loc": "outside upper center", "ncols": 8, "fontsize": "small"}
        figure.legend(handles=class_legend(classes, unlabelled), **place)
    return png(figure)


def draw_class_counts(dataset: Dataset) -> bytes:
    """Draws the training samples, boxes or pixels by class and client (FedIG, Fig. 10)."""
    domains = [dataset.domains[k] for k in some_of(len(dataset.domains), _MOST_COUNTED)]
    counts = [class_counts(d.train.labels, dataset.num_classes) for d in domains]
    table = np.stack(counts, axis=1)
    classes, clients = table.shape
    size = (max(5, 2.5 + 0.42 * min(clients, 40)), max(3, 1.6 + 0.3 * min(classes, 20)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    if clients < len(dataset.domains):
        axes.set_title(f"{clients} of {len(dataset.domains):,} clients", fontsize=10)
    mesh = axes.pcolormesh(table, cmap="Blues", vmin=0)
    unit = counted(domains[0].train.labels)
    figure.colorbar(mesh, label=f"training {unit}", pad=0.01)
    axes.set(xticks=[], ylabel="class")
    if classes <= 20:
        labels = map(on_plot, _class_names(dataset))
        axes.set_yticks(np.arange(classes) + 0.5, labels, fontsize=8)
    if clients <= 40:
        names = (on_plot(domain.name) for domain in domains)
        axes.set_xticks(np.arange(clients) + 0.5, names, fontsize=8, rotation=30, ha="right")
    axes.invert_yaxis()
    return png(figure)


def alphas_of(
    model: nn.Module, prepare: Prepare, variables: Variables, split: Split, batch_size: int = 256
) -> dict[str, np.ndarray]:
    """Returns layer -> alpha f[N] of every sample, in forward order (FedIG, Fig. 4a, 7 to 9)."""
    alphas = _over_batches(record_alphas(model), prepare, variables, split, batch_size)
    images = prepare(jax.numpy.asarray(split.images[:2]), parameter_dtype(variables))
    return {name: alphas[name] for name in in_forward_order(alphas, model, variables, images)}


def features_of(
    make: Callable[[nn.Module], Adaptation],
    model: nn.Module,
    prepare: Prepare,
    variables: Variables,
    split: Split,
    batch_size: int = 256,
) -> np.ndarray:
    """Returns features f[N, F] before the classifier (FedIG, Fig. 4b), by `make(model)`."""
    adaptation = make(FeaturesOf(model))

    def features(variables: Variables, images: jax.Array) -> jax.Array:
        return adaptation.predict(variables, adaptation.init(variables), images)[0]

    return _over_batches(features, prepare, variables, split, batch_size)


def _over_batches(
    function: Callable[[Variables, jax.Array], Any],
    prepare: Prepare,
    variables: Variables,
    split: Split,
    batch_size: int,
) -> Any:
    """Returns the function's outputs for all samples, joined: arrays [N, ...]."""

    @jax.jit
    def run(variables: Variables, images: jax.Array) -> Any:
        dtype = parameter_dtype(variables)
        return jax.lax.map(lambda batch: function(variables, prepare(batch, dtype)), images)

    outputs = run(variables, SplitBatches([split], batch_size).all_at_once().images)
    size = len(split.images)
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:])[:size], outputs)


def masked_features(features: Mapping[str, np.ndarray], masks: np.ndarray) -> bytes:
    """Draws mean features f[N, F] of domains, before and after `masks` f[D, F] (FedCD, Fig. 4)."""
    figure = Figure(figsize=(5 * len(features), 5), layout="constrained")
    grid = figure.subplots(2, len(features), sharex=True, sharey="col", squeeze=False)
    for column, (name, values), mask in zip(grid.T, features.items(), masks, strict=True):
        stages = {"features": values, "masked features": values * mask}
        for row, (head, drawn) in enumerate(stages.items()):
            axes, means = column[row], drawn.mean(0)
            axes.bar(np.arange(len(means)), means, width=1, color=f"C{row}")
            axes.axhline(means.mean(), color="black", linestyle=":", linewidth=1)
            axes.set(title=f"{on_plot(name)}: {head}, mean {means.mean():.3g}")
            axes.grid(axis="y", alpha=0.3)
        column[-1].set_xlabel("channel")
    for axes in grid[:, 0]:
        axes.set_ylabel("mean over samples")
    return png(figure)


def ablations(
    scores: Mapping[str, Mapping[str, float]], score: str = "accuracy"
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yields (end of a file name, `draw() -> PNG`) for every key that adaptations of one name vary.

    `scores` are domain -> adaptation -> percent.
    """
    baseline = {d: row["running"] for d, row in scores.items() if "running" in row}
    for (name, key), choices in varied([*next(iter(scores.values()), {})]).items():
        values = {
            domain: {value: [row[adaptation]] for value, adaptation in choices.items()}
            for domain, row in scores.items()
        }
        options = {"label": f"{key} of {name}", "baseline": baseline, "score": score}
        draw = partial(ablation, values, logarithmic=key == "batch_size", **options)
        yield f"-{file_name(name)}-{file_name(key)}.png", draw


def alphas(by_layer: Mapping[str, np.ndarray], title: str = "") -> bytes:
    """Draws layer -> alpha f[N] of all test samples, and the layers' medians (FedIG, Fig. 4a)."""
    figure = Figure(figsize=(max(6, 0.4 * len(by_layer) + 2), 4), layout="constrained")
    axes = figure.subplots()
    random = np.random.default_rng(0)
    for place, values in enumerate(by_layer.values(), start=1):
        across = place + random.uniform(-0.3, 0.3, len(values))
        axes.plot(across, values, ".", markersize=2, alpha=0.3, rasterized=True)
        axes.plot([place - 0.4, place + 0.4], [np.median(values)] * 2, color="black")
    names = [on_plot(name) for name in by_layer]
    axes.set_xticks(range(1, len(by_layer) + 1), names, rotation=60, ha="right", fontsize=7)
    axes.set(ylabel="alpha", ylim=(-0.03, 1.03), title=on_plot(title, 80))
    axes.grid(axis="y", alpha=0.3)
    return png(figure)


def embeddings(
    features: Mapping[str, np.ndarray], labels: np.ndarray, classes: Sequence[str] = ()
) -> bytes:
    """Draws t-SNE of title -> features f[N, F], coloured by `labels` i32[N] (FedIG, Fig. 4b)."""
    from sklearn.manifold import TSNE

    labels = np.asarray(labels)
    chosen = np.random.default_rng(0).permutation(len(labels))[:_MOST_EMBEDDED]
    figure = Figure(figsize=(5 * len(features), 5), layout="constrained")
    panels = figure.subplots(1, len(features), squeeze=False)[0]
    for axes, (title, values) in zip(panels, features.items(), strict=True):
        # scikit-learn's t-SNE needs a perplexity below the number of samples.
        perplexity = min(30, (len(chosen) - 1) / 3)
        flat = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(values[chosen])
        for label in np.unique(labels):
            of_class = labels[chosen] == label
            name = classes[label] if classes else str(label)
            axes.plot(*flat[of_class].T, ".", markersize=3, label=on_plot(name))
        axes.set(xticks=[], yticks=[], title=on_plot(title))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5 * len(panels), markerscale=3)
    return png(figure)


def ablation(
    values: Mapping[str, Mapping[float, Sequence[float]]],
    label: str,
    baseline: Mapping[str, float] = {},
    logarithmic: bool = False,
    score: str = "accuracy",
) -> bytes:
    """Draws accuracy over a setting, the mean and range of each method (TsmoBN, Fig. 3).

    `values` are method -> setting -> percent of the repeats, `baseline` those of plain inference.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for i, (name, row) in enumerate(values.items()):
        # Settings that are no numbers, such as affine=mean, stand side by side.
        numeric = all(isinstance(place, int | float) for place in row)
        settings, color = sorted(row) if numeric else list(row), f"C{i}"
        repeats = [np.asarray(row[setting], float) for setting in settings]
        places = settings if numeric else [*map(str, settings)]
        axes.plot(places, [r.mean() for r in repeats], "o-", color=color, label=on_plot(name))
        lows, highs = [r.min() for r in repeats], [r.max() for r in repeats]
        axes.fill_between(places, lows, highs, color=color, alpha=0.2)
        if name in baseline:
            axes.axhline(baseline[name], color=color, linestyle=":")
    if logarithmic:
        axes.set_xscale("log", base=2)
    dotted = " (dotted: plain inference)" if baseline else ""
    axes.set(xlabel=on_plot(label), ylabel=f"{score}, %{dotted}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return png(figure)


def draw_boxes(experiment: Experiment, folder: Path, state: FederatedState) -> None:
    """Writes `plots/boxes.png`, the first tested images with the boxes that a detector finds."""

    @partial(jax.jit, static_argnums=0)
    def find(adaptation: Adaptation, variables: Variables, images: jax.Array) -> Any:
        read = experiment.prepare(images, parameter_dtype(variables))
        outputs, _ = adaptation.predict(variables, adaptation.init(variables), read)
        return detect(outputs, experiment.model.anchors, PREDICTION)

    def pictures(adaptation: Adaptation, variables: Variables, split: Split) -> list[BoxPicture]:
        samples_shown = select(split, np.arange(min(_IMAGES, len(split.images))))
        images = np.asarray(samples_shown.images)
        boxes = jax.device_get(find(adaptation, variables, images))
        true = samples_shown.labels[BOXES], samples_shown.labels[CLASS]
        return [BoxPicture(*arrays) for arrays in zip(images, *boxes, *true, strict=True)]

    def draw() -> bytes:
        rule, dataset, rows = experiment.method.statistics, experiment.internal, {}
        by_rule = of_clients(experiment.model, rule)
        served = by_rule if rule is None else running(experiment.model)
        for k, domain in enumerate(dataset.domains[:_CLIENTS]):
            name = of_part(domain.name, scored_part([domain]))
            rows[name] = pictures(by_rule, client_variables(state, k), domain.test)
        for domain in experiment.unseen[:_CLIENTS]:
            rows[domain.name] = pictures(served, global_variables(state), whole(domain))
        return found_boxes(rows, _class_names(dataset))

    write_picture(folder / "plots" / "boxes.png", draw)


def of_part(name: str, part: str) -> str:
    """Returns a name, with the part of the samples if these are not test samples."""
    return name if part == "test" else f"{name} ({part})"


def _class_names(dataset: Dataset) -> tuple[str, ...]:
    return dataset.classes or tuple(map(str, range(dataset.num_classes)))
