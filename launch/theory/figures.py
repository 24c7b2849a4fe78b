"""Figures of the theory as PNG bytes, with numbers from `theory`."""

from collections.abc import Mapping

import jax
import numpy as np
from matplotlib.figure import Figure

from fedjax_bn.tasks.figures import png
from theory.convergence import Course, gram, same_client, sampled_gram
from theory.toy import ToyRegression


def gram_matrices(key: jax.Array, points: jax.Array, client: jax.Array, samples: int) -> bytes:
    """Draws G, G* and the deviation of a Monte Carlo estimate from G in standard errors.

    Args:
      key: random key.
      points: f[P, d].
      client: i32[P], sorted, so that G* is block diagonal.
      samples: number of draws of the Monte Carlo estimate.
    """
    exact = gram(points)
    estimate, error = sampled_gram(key, points, samples)
    own = same_client(exact, client)
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    shown = {
        "G, averaged batch norm": exact,
        "G*, client-specific batch norm": own,
        f"Monte Carlo ({samples:,} v) minus G,\nin standard errors": (estimate - exact) / error,
    }
    for axes, (title, matrix) in zip(panels, shown.items(), strict=True):
        last = axes is panels[-1]
        limits = {"vmin": -4, "vmax": 4, "cmap": "RdBu"} if last else {"vmin": 0}
        image = axes.imshow(np.asarray(matrix), **limits)
        axes.set(title=title, xlabel="point q", ylabel="point p")
        figure.colorbar(image, shrink=0.8)
    return png(figure)


def spectra(matrices: Mapping[str, jax.Array]) -> bytes:
    """Draws eigenvalues of Gram matrices in rising order, one line for each matrix."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, matrix in matrices.items():
        values = np.linalg.eigvalsh(np.asarray(matrix))
        axes.plot(np.arange(1, len(values) + 1), values, ".-", label=f"{name}: {values[0]:.3g}")
    axes.set(xlabel="number", ylabel="eigenvalue", yscale="log", title="the least in the legend")
    axes.grid(alpha=0.3)
    axes.legend()
    return png(figure)


def courses(by_data: Mapping[str, Mapping[str, Course]]) -> bytes:
    """Draws |f(t) - y|^2 of both networks (solid) and the predicted linear rate (dashed).

    Args:
      by_data: title of a panel -> result of `theory.race`.
    """
    figure = Figure(figsize=(6 * len(by_data), 4.6), layout="constrained")
    panels = figure.subplots(1, len(by_data), squeeze=False)[0]
    for axes, (title, both) in zip(panels, by_data.items(), strict=True):
        for color, (name, course) in zip(("C0", "C1"), both.items(), strict=True):
            label = f"{name} scale, least eigenvalue {float(course.eigenvalue):.2g}"
            axes.plot(course.losses / course.losses[0], color=color, label=label)
            axes.plot(course.bound / course.bound[0], "--", color=color)
        axes.set(title=title, xlabel="step", ylabel="|f - y|² / |f(0) - y|²", yscale="log")
        axes.grid(alpha=0.3)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        axes.legend(fontsize="small", title="dashed: predicted rate", **below)
    return png(figure)


def toy_errors(toy: ToyRegression) -> bytes:
    """Draws errors over w, without batch norm and with local batch norm (FedBN, Fig. 1)."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("without batch norm", "with local batch norm")
    for axes, title, errors in zip(panels, titles, (toy.plain, toy.normalized), strict=True):
        for k, own in enumerate(errors):
            axes.plot(toy.weights, own, label=f"client {k + 1}")
        axes.plot(toy.weights, errors.mean(0), "k--", label="mean")
        axes.set(title=title, xlabel="w")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean squared error")
    panels[0].legend()
    return png(figure)


def toy_surfaces(toy: ToyRegression) -> bytes:
    """Draws each client's errors over w and gamma, and marks the means (FedBN, Fig. 2)."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    weight, gamma = toy.best.mean(), toy.local_gammas.mean()
    for k, axes in enumerate(panels):
        mesh = axes.pcolormesh(
            toy.weights, toy.gammas, toy.surface[k], cmap="viridis", rasterized=True
        )
        points = {
            "own w, own gamma": ("wo", toy.best[k], toy.local_gammas[k]),
            "mean w, mean gamma": ("rX", weight, gamma),
            "mean w, own gamma": ("w+", weight, toy.local_gammas[k]),
        }
        for name, (mark, w, g) in points.items():
            error = np.mean((np.cos(w / g * toy.x[k]) - toy.y[k]) ** 2)
            style = {"markeredgecolor": "k"} if mark != "w+" else {"markeredgewidth": 2}
            axes.plot(w, g, mark, markersize=10, label=f"{name}: {error:.2f}", **style)
        axes.set(title=f"client {k + 1}", xlabel="w")
        axes.legend(fontsize="small", facecolor="0.7")
    panels[0].set_ylabel("gamma")
    figure.colorbar(mesh, ax=panels, label="mean squared error")
    return png(figure)
