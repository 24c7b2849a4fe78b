"""Plots of unseen clients, as PNG bytes: alphas, features, ablations of test-time statistics."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.adaptation.choice import varied
from fedjax_bn.arguments.text import file_name
from fedjax_bn.engine.figures import on_plot, png

_NO_AMOUNTS = ("order", "affine", "seed", "about")  # settings between which a line means nothing
_YLABEL, _DOTTED = "accuracy, %", " (dotted: plain inference)"


def ablations(scores: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, bytes]]:
    """Yields a plot for every key that adaptations of one name vary, as (file's name, PNG).

    Args:
      scores: domain -> adaptation -> accuracy in percent, such as a run's "unseen".
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
    """Returns a point for every test sample and layer, the layers' medians marked (FedIG, Fig. 4a).

    Args:
      by_layer: layer name -> alpha f[N] in [0, 1].
      title: above the plot.
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
    features: Mapping[str, np.ndarray],
    labels: np.ndarray,
    classes: Sequence[str] = (),
    most: int = 1000,
) -> bytes:
    """Returns t-SNE of features, one panel a method, a colour a class (FedIG, Fig. 4b).

    Args:
      features: title -> f[N, F].
      labels: i32[N].
      classes: their names, in the order of the labels.
      most: samples drawn at random where there are more.
    """
    from sklearn.manifold import TSNE

    labels = np.asarray(labels)
    chosen = np.random.default_rng(0).permutation(len(labels))[:most]
    figure = Figure(figsize=(5 * len(features), 5), layout="constrained")
    panels = figure.subplots(1, len(features), squeeze=False)[0]
    for axes, (title, values) in zip(panels, features.items(), strict=True):
        # t-SNE refuses perplexities of as many as its samples
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
    """Returns accuracy over a setting, a line a method: mean and range (TsmoBN, Fig. 3).

    Args:
      values: method -> setting -> accuracies of its repeats, percent.
      label: what the setting is, such as "momentum".
      baseline: method -> accuracy of plain inference, dotted.
      logarithmic: whether the setting's axis is, such as for batch sizes.
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
    """Accuracy by setting as bars, a group a method, as `ablation` (TsmoBN, Fig. 3c and 3d)."""
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
