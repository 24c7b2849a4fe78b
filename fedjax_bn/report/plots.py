"""Draws plots of a run, its data and its unseen clients, as PNG bytes."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.adaptation.choice import varied
from fedjax_bn.arguments.text import file_name
from fedjax_bn.data import label_trees
from fedjax_bn.data.domain import Dataset, Domain, splits
from fedjax_bn.detection.found_boxes import draw_box
from fedjax_bn.engine.figures import in_lines, on_plot, png
from fedjax_bn.report.tables import columns, heading, score_of
from fedjax_bn.run.evaluation.groups import some_of
from fedjax_bn.run.training.records import Record

_MOST_EMBEDDED = 1000  # samples drawn at random for t-SNE, whose time grows fast with their number
_NO_AMOUNTS = ("order", "affine", "seed", "about")  # settings without an order: bars, not a line
_YLABEL, _DOTTED = "accuracy, %", " (dotted: plain inference)"
_MOST_COUNTED = 200  # clients whose labels are shown


def curves(records: list[Record], key: str, label: str) -> bytes:
    """Draws `key` (such as "loss") over rounds, a line for each client and the mean in black."""
    records = [record for record in records if key in record]
    rounds = [record["round"] for record in records]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in records[0][key]:
        # JSON has null for a value that is not finite
        values = [np.nan if r[key][name] is None else r[key][name] for r in records]
        style = {"color": "black", "linewidth": 2.5} if name == "mean" else {}
        style["marker"] = "." if len(rounds) < 50 else ""
        axes.plot(rounds, values, label=on_plot(name), **style)
    axes.set(xlabel="round", ylabel=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside upper center", ncols=min(6, len(records[0][key])))
    return png(figure)


def methods(summaries: list[Record]) -> bytes:
    """Draws bars of test accuracy by client (and unseen domain), one colour for each method."""
    rows = [columns(summary) for summary in summaries]
    heads = list(rows[0])
    width = 0.8 / len(rows)
    figure = Figure(figsize=(max(7, 1.2 * len(heads)), 4), layout="constrained")
    axes = figure.subplots()
    for i, (row, summary) in enumerate(zip(rows, summaries, strict=True)):
        place = np.arange(len(heads)) + (i - (len(rows) - 1) / 2) * width
        values = [row.get(head, np.nan) for head in heads]
        bars = axes.bar(place, values, width, label=on_plot(summary["method"]))
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    titles = [on_plot(heading(head)).replace(" ", "\n") for head in heads]
    axes.set_xticks(range(len(heads)), titles, fontsize=8)
    axes.set(ylabel=f"test {score_of(summaries[0])}, %", ylim=(0, 105))
    figure.legend(fontsize="small", loc="outside upper center", ncols=len(rows))
    return png(figure)


def samples(domains: list[Domain], count: int = 10, connectomes: bool = False) -> bytes:
    """Draws the first samples of each client in a row: images, connectomes, or profiles.

    They are from the first split that the client has: training, validation or test.

    Args:
      domains: the clients and unseen domains.
      count: the number of samples of each.
      connectomes: whether features f[F] are the upper triangle of a correlation matrix; other
        features are drawn as a curve over their index.
    """
    names = [in_lines(domain.name) for domain in domains]
    heights = [max(0.8, 0.16 * name.count("\n") + 0.2) for name in names]
    figure = Figure(figsize=(count * 0.75 + 1.5, sum(heights)), layout="constrained")
    # One picture for a whole row, because matplotlib's time grows with the number of pictures.
    grid = figure.subplots(len(domains), squeeze=False, height_ratios=heights)[:, 0]
    for axes, domain, name in zip(grid, domains, names, strict=True):
        first = next(splits(domain))[1]
        images = np.stack([*islice(first.images, count)])
        images = _as_matrices(images) if connectomes and images.ndim == 2 else images
        if images.ndim == 2:  # profiles side by side on one scale
            width = images.shape[1]
            for number, values in enumerate(images):
                place = number * 1.1 * width + np.arange(width)
                axes.plot(place, values, linewidth=0.8, color="C0")
            axes.set_xlim(-0.05 * width, (1.1 * count - 0.05) * width)
        else:
            axes.imshow(_in_a_row(images, count), cmap="gray", vmin=0, vmax=1)
        for number, image in enumerate(images):
            left = number * (image.shape[1] + _gap(images)) if image.ndim > 1 else 0
            for box in label_trees.boxes_of(first.labels, number):
                draw_box(axes, image, box, "", "lime", left)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    return png(figure)


def _as_matrices(features: np.ndarray) -> np.ndarray:
    """Returns symmetric f[n, R, R, 1], diagonal 1, from upper triangles f[n, F], F = R(R - 1)/2."""
    regions = round((1 + np.sqrt(1 + 8 * features.shape[1])) / 2)
    above = np.zeros((len(features), regions, regions), features.dtype)
    above[:, *np.triu_indices(regions, 1)] = features
    return (above + above.transpose(0, 2, 1) + np.eye(regions, dtype=features.dtype))[..., None]


def _in_a_row(images: np.ndarray, count: int) -> np.ndarray:
    """Returns images [n, H, W, C] as one picture with room for `count` and white gaps.

    Colours are unchanged; each grey image is scaled to [0, 1] by its own range.

    Returns:
      [H, width, C] if C > 1, else f64[H, width] with NaN in the gaps.
    """
    if images.shape[-1] == 1:
        grey = images.reshape(images.shape[:3]).astype(float)
        least, most = (end(axis=(1, 2), keepdims=True) for end in (grey.min, grey.max))
        images, white = (grey - least) / np.where(most > least, most - least, 1), np.nan
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

    FedIG's Fig. 10 is of this kind. If images have boxes, boxes are counted. If there are many
    clients, an evenly spaced selection is shown.
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
    what = "boxes" if label_trees.has_boxes(domains[0].train.labels) else "samples"
    figure.colorbar(mesh, label=f"training {what}", pad=0.01)
    if roomy:
        for (row, column), count in np.ndenumerate(table):
            color = "white" if count > 0.6 * table.max() else "black"
            text = str(count or "")
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", size=7, color=color)
    if classes <= 20:
        names = [on_plot(name) for name in dataset.classes or map(str, range(classes))]
        axes.set_yticks(np.arange(classes) + 0.5, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_ylabel("class")
    # "mnist/3" is client 3 of mnist: a number below each column, domains below the numbers
    places, _, own = zip(*(domain.name.rpartition("/") for domain in domains), strict=True)
    look = {"fontsize": 8} if any(places) else {"fontsize": 8, "rotation": 30, "ha": "right"}
    axes.set_xticks([])
    if clients <= 40:
        axes.set_xticks(np.arange(clients) + 0.5, map(on_plot, own), **look)
    starts = [k for k in range(clients) if k == 0 or places[k] != places[k - 1]]
    for start, end in zip(starts, [*starts[1:], clients], strict=True) if any(places) else ():
        axes.axvline(start, color="black", linewidth=1.2)
        below = {"xytext": (0, -18), "textcoords": "offset points", "ha": "center", "va": "top"}
        middle = ((start + end) / 2, 0)
        axes.annotate(on_plot(places[start]), middle, xycoords=("data", "axes fraction"), **below)
    return png(figure)


def masked_features(features: Mapping[str, np.ndarray], masks: np.ndarray) -> bytes:
    """Draws each domain's mean features by channel, before and after its mask (FedCD, Fig. 4).

    Args:
      features: domain -> f[N, F], before the mask.
      masks: f[D, F], the mask of each domain.
    """
    figure = Figure(figsize=(5 * len(features), 5), layout="constrained")
    grid = figure.subplots(2, len(features), sharex=True, sharey="col", squeeze=False)
    for column, (name, values), mask in zip(grid.T, features.items(), masks, strict=True):
        title = on_plot(name)
        rows = {f"{title}: features": values, f"{title}: masked features": values * mask}
        for axes, (head, drawn), color in zip(column, rows.items(), ("C0", "C1"), strict=True):
            means = drawn.mean(0)
            axes.bar(np.arange(len(means)), means, width=1, color=color)
            axes.axhline(means.mean(), color="black", linestyle=":", linewidth=1)
            axes.set(title=f"{head}, mean {means.mean():.3g}")
            axes.grid(axis="y", alpha=0.3)
        column[-1].set_xlabel("channel")
    for axes in grid[:, 0]:
        axes.set_ylabel("mean over samples")
    return png(figure)


def ablations(scores: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, bytes]]:
    """Yields (end of a file name, PNG) for every key that adaptations of one name vary.

    Args:
      scores: domain -> adaptation -> accuracy in percent, as "unseen" in a run's summary.
    """
    texts = list(next(iter(scores.values()), {}))
    baseline = {d: row["running"] for d, row in scores.items() if "running" in row}
    for (name, key), choices in varied(texts).items():
        values = {
            domain: {value: [row[text]] for value, text in choices.items()}
            for domain, row in scores.items()
        }
        label = f"{key} of {name}"
        if key in _NO_AMOUNTS:
            picture = _bars(values, label, baseline)
        else:
            picture = ablation(values, label, baseline, logarithmic=key == "batch_size")
        yield f"-{file_name(name)}-{file_name(key)}.png", picture


def alphas(by_layer: Mapping[str, np.ndarray], title: str = "") -> bytes:
    """Draws a point for every test sample and layer, and the layers' medians (FedIG, Fig. 4a).

    Args:
      by_layer: layer name -> alpha f[N] in [0, 1].
      title: the text above the plot.
    """
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
    """Draws t-SNE of features, a panel for each method, a colour for each class (FedIG, Fig. 4b).

    Args:
      features: panel title -> f[N, F]; of more than 1,000 samples, 1,000 are drawn at random.
      labels: i32[N].
      classes: the class names, in the order of the labels.
    """
    from sklearn.manifold import TSNE

    labels = np.asarray(labels)
    chosen = np.random.default_rng(0).permutation(len(labels))[:_MOST_EMBEDDED]
    figure = Figure(figsize=(5 * len(features), 5), layout="constrained")
    panels = figure.subplots(1, len(features), squeeze=False)[0]
    for axes, (title, values) in zip(panels, features.items(), strict=True):
        # scikit-learn's t-SNE needs a perplexity below the number of samples
        perplexity = min(30, (len(chosen) - 1) / 3)
        flat = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(values[chosen])
        for label in np.unique(labels):
            own = labels[chosen] == label
            name = classes[label] if classes else str(label)
            axes.plot(*flat[own].T, ".", markersize=3, label=on_plot(name))
        axes.set(xticks=[], yticks=[], title=on_plot(title))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5 * len(panels), markerscale=3)
    return png(figure)


def ablation(
    values: Mapping[str, Mapping[float, Sequence[float]]],
    label: str,
    baseline: Mapping[str, float] = {},
    logarithmic: bool = False,
) -> bytes:
    """Draws accuracy over a setting, the mean and range of each method (TsmoBN, Fig. 3).

    Args:
      values: method -> setting -> accuracies of the repeats, percent.
      label: the name of the setting, such as "momentum".
      baseline: method -> accuracy of plain inference, drawn dotted.
      logarithmic: whether the setting's axis is logarithmic, such as for batch sizes.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for i, (name, row) in enumerate(values.items()):
        places, color = sorted(row), f"C{i}"
        repeats = [np.asarray(row[place], float) for place in places]
        axes.plot(places, [r.mean() for r in repeats], "o-", color=color, label=on_plot(name))
        axes.fill_between(
            places, [r.min() for r in repeats], [r.max() for r in repeats], color=color, alpha=0.2
        )
        if name in baseline:
            axes.axhline(baseline[name], color=color, linestyle=":")
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set(xlabel=on_plot(label), ylabel=_YLABEL + _DOTTED * bool(baseline))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return png(figure)


def _bars(
    values: Mapping[str, Mapping[object, Sequence[float]]],
    label: str,
    baseline: Mapping[str, float],
) -> bytes:
    """Draws `ablation` as bars, a group for each method (TsmoBN, Fig. 3c and 3d)."""
    figure = Figure(figsize=(max(6, 1.5 * len(values) + 2), 4), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(setting for row in values.values() for setting in row))
    width = 0.8 / len(names)
    for i, setting in enumerate(names):
        rows = [np.asarray(row.get(setting, [np.nan]), float) for row in values.values()]
        means = np.array([row.mean() for row in rows])
        reach = np.abs([[row.min(), row.max()] for row in rows] - means[:, None]).T
        places = np.arange(len(rows)) + (i - (len(names) - 1) / 2) * width
        axes.bar(places, means, width, yerr=reach, capsize=2, label=on_plot(str(setting)))
    for i, name in enumerate(values):
        if name in baseline:
            axes.plot([i - 0.45, i + 0.45], [baseline[name]] * 2, ":", color="black")
    axes.set_xticks(range(len(values)), [on_plot(name) for name in values])
    axes.set(ylabel=_YLABEL + _DOTTED * bool(baseline), title=on_plot(label))
    axes.grid(axis="y", alpha=0.3)
    figure.legend(fontsize="small", loc="outside right upper")
    return png(figure)
