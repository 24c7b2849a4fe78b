"""FedBN's Fig. 6: images of every client, and how their pixel values are distributed."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from plan import finished

from fedjax_bn.data.domain import Dataset
from fedjax_bn.engine.figures import png
from fedjax_bn.run.errors import UserError

IMAGES = 8  # shown of a client
SAMPLES = 100  # whose pixels are counted


def draw(workdir: Path, runs: Sequence[str]) -> bytes | None:
    """The data of the first run that has finished; None where there is none, or no data any more.

    Args:
      workdir: of the sweep.
      runs: names.
    """
    for name in filter(lambda name: finished(workdir, name), runs):
        try:
            return histograms(_clients(workdir / name))
        except (UserError, OSError, ValueError) as error:
            print(f"Fig. 6 is left out: {error}", file=sys.stderr)
    return None


def _clients(folder: Path) -> Dataset:
    """The clients of a finished run, read again."""
    from fedjax_bn.run.experiment.datasets import configured_clients
    from fedjax_bn.run.experiment.readers import DATASETS
    from fedjax_bn.run.files.finished import configuration

    config = configuration(json.loads((folder / "config.json").read_text())["config"])
    return configured_clients(DATASETS[config.data.name](config), config)[0]


def histograms(clients: Dataset) -> bytes:
    """A row a client: training images, and behind them the histogram of their pixels."""
    figure = Figure(figsize=(0.8 * IMAGES + 4, len(clients.domains)), layout="constrained")
    widths = [1] * IMAGES + [4]
    rows = len(clients.domains)
    grid = figure.subplots(rows, IMAGES + 1, squeeze=False, width_ratios=widths)
    for row, domain in zip(grid, clients.domains, strict=True):
        images = np.asarray(domain.train.images[:SAMPLES])
        for axes in row[:-1]:
            axes.set(xticks=[], yticks=[])
        for axes, image in zip(row[:-1], images, strict=False):
            axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
        row[0].set_ylabel(domain.name, rotation=0, ha="right", va="center")
        row[-1].hist(images.ravel(), bins=64, range=(0, 255), density=True)
        row[-1].set_yticks([])
    return png(figure)
