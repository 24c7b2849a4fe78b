"""Plots of features and of the masks that multiply them, as PNG bytes."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.engine.figures import png
from fedjax_bn.engine.names import on_plot


def masked_features(features: Mapping[str, np.ndarray], masks: np.ndarray) -> bytes:
    """Mean features by channel of some domains, before and behind their masks (FedCD, Fig. 4).

    Args:
      features: domain -> f[N, F], before the mask.
      masks: f[D, F], that of each domain.
    """
    figure = Figure(figsize=(5 * len(features), 5), layout="constrained")
    grid = figure.subplots(2, len(features), sharex=True, sharey="col", squeeze=False)
    for column, (name, values), mask in zip(grid.T, features.items(), masks, strict=True):
        title = on_plot(name)
        rows = {f"{title}: features": values, f"{title}: masked features": values * mask}
        for axes, (title, drawn), color in zip(column, rows.items(), ("C0", "C1"), strict=True):
            means = drawn.mean(0)
            axes.bar(np.arange(len(means)), means, width=1, color=color)
            axes.axhline(means.mean(), color="black", linestyle=":", linewidth=1)
            axes.set(title=f"{title}, mean {means.mean():.3g}")
            axes.grid(axis="y", alpha=0.3)
        column[-1].set_xlabel("channel")
    for axes in grid[:, 0]:
        axes.set_ylabel("mean over samples")
    return png(figure)
