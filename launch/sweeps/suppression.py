"""What trained masks suppress: channels of a run on the cow on the beach, told apart by a test.

In the zoo the ground's colour and the digit are independent, so a channel's variance over its
images has a share that the colour explains and one that the digit does.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from plan import finished

from fedjax_bn.engine.figures import png


class Channels(NamedTuple):
    """The channels of one run before the classifier.

    Attributes:
      colour, digit: f[F], shares of a channel's variance in the zoo that each explains, in [0, 1].
      mask: f[F], the mean mask.
    """

    colour: np.ndarray
    digit: np.ndarray
    mask: np.ndarray


def draw(workdir: Path, names: Sequence[str]) -> bytes | None:
    """A point a channel of all finished runs: share by colour and by digit, coloured by its mask.

    Beside it the mean mask of channels by which of the two explains more.
    """
    runs = [read_channels(workdir / name) for name in names if finished(workdir, name)]
    if not runs:
        return None
    colour, digit, mask = (np.concatenate(parts) for parts in zip(*runs, strict=True))
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = np.abs(mask - 1).max()
    points = left.scatter(
        colour, digit, c=mask, s=14, cmap="coolwarm", vmin=1 - width, vmax=1 + width
    )
    figure.colorbar(points, ax=left, label="mean mask (it starts at 1)")
    left.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
    left.set(xlabel="variance explained by the colour", ylabel="variance explained by the digit")
    lean = colour - digit
    right.scatter(lean, mask, s=14, color="C0")
    slope, height = np.polyfit(lean, mask, 1)
    ends = np.array([lean.min(), lean.max()])
    correlation = np.corrcoef(lean, mask)[0, 1]
    right.plot(ends, slope * ends + height, color="black", label=f"correlation {correlation:.2f}")
    right.axhline(1, color="0.6", linewidth=0.8)
    right.set(xlabel="explained by colour minus by digit", ylabel="mean mask")
    right.legend()
    return png(figure)


def read_channels(folder: Path) -> Channels:
    """The channels of a finished run's selected round, with the features of the zoo."""
    import jax

    from fedjax_bn.adaptation import running
    from fedjax_bn.data.domain import whole
    from fedjax_bn.data.sets.cow_on_beach import ground_of
    from fedjax_bn.federation import global_variables
    from fedjax_bn.run.evaluation.per_sample import features_of
    from fedjax_bn.run.files.finished import configuration, restore_state
    from fedjax_bn.run.training import train

    config = configuration(json.loads((folder / "config.json").read_text())["config"])
    experiment, _, start = train.prepare(config)
    state, _ = restore_state(folder, jax.eval_shape(start))
    variables = global_variables(state)
    (zoo,) = (whole(domain) for domain in experiment.unseen if domain.name == "zoo")
    features = features_of(running, experiment.model, experiment.prepare, variables, zoo)
    return Channels(
        explained(features, ground_of(np.asarray(zoo.images))),
        explained(features, zoo.labels),
        np.asarray(variables["mask"]["features"]),
    )


def explained(features: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """f[F]: the share of each feature's variance over N samples that lies between groups i[N]."""
    mean, total = features.mean(0), features.var(0)
    between = sum(
        (groups == g).mean() * np.square(features[groups == g].mean(0) - mean)
        for g in np.unique(groups)
    )
    return np.where(total > 0, between / np.where(total > 0, total, 1), 0)
