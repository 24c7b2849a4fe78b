"""Runs FedCD and its parts at sizes that two CPU cores can train, and the cow on the beach.

    python launch/sweeps/fedcd_small.py [--only 'beach/*'] [--data FOLDER]     see sweep.py

NAMEs of data: digits and pacs, as their config files take data.path. `digits/*` leaves one of five
digit domains out, `small/*` one of PACS at 32x32 pixels with three tenths of the images, and
`beach/*` is the cow on the beach (configs/cow_on_beach.py), which needs no data. All train SmallCNN
from random weights, so FedIG-A's CAFL is the mean over features (see configs/pacs.py).

A figure shows what trained masks suppress on the beach. In the zoo the ground's colour and the
digit are independent, so the colour explains one share of a channel's variance over the zoo's
images, and the digit another.

lambda and eta are 0.7 and 0.5 except in `beach/lambda*` and `beach/eta*`.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import fedcd
import figures
import numpy as np
import plan
from domains import DOMAINS
from matplotlib.figure import Figure as Canvas
from plan import MEAN, Column, Figure, Protocol, Row, Sweep, Table, Training, left_out, table
from sweep import main

from fedjax_bn.tasks.figures import png

ADAPTER = "zero_shot_adapter"
TRAININGS = {
    "FedAvg": fedcd.by_size("fedavg"),
    "FedProx": fedcd.by_size("fedprox"),
    "FedBN": fedcd.by_size("fedbn"),
    "FedIG-A": fedcd.by_size("fediga", "fedig-a", adaptations=("running", ADAPTER)),
    "REA": plan.training("fedavg", "rea", weigh="risk_extrapolation:eta=0.5"),
    "FedCD-SCI": fedcd.by_size("fedcd", "fedcd-sci"),
    "FedCD-SCI + REA": plan.training("fedcd:eta=0.5", "fedcd-sci-rea"),
}
METHODS = {
    label: Row((one,), ADAPTER if label == "FedIG-A" else "running")
    for label, one in TRAININGS.items()
}
SMALL = {
    **{"model": "SmallCNN", "batch_size": 16},
    **{"optimizer.learning_rate": 0.02, "optimizer.momentum": 0.9},
}
SMALL_PACS = Protocol(
    *("small", "configs/pacs.py:protocol=fedcd", left_out(DOMAINS["pacs"]), 2),
    {"data.path": "pacs"},
    {
        **{**SMALL, "rounds": 8, "data.image_size": 32, "data.fraction": 0.3},
        **{"data.augment": "none", "eval_every": 3},
    },
)
DIGITS = {name: name for name in ("mnist", "svhn", "usps", "fonts", "mnist_m")}
SMALL_DIGITS = Protocol(
    *("digits", "configs/digits.py", left_out(DIGITS), 2, {"data.path": "digits"}),
    # of an `.npz` of 554 to 743 images a domain
    {**SMALL, "data.fraction": 1.0, "data.truncate": False, "rounds": 20, "eval_every": 5},
)
PLACES = {
    "clients": Column(("",), MEAN),
    "zoo": Column(("",), "zoo"),  # the colour is independent of the class
    "beach": Column(("",), "beach"),  # the colour misleads
}
BEACH = Protocol("beach", "configs/cow_on_beach.py", PLACES, 3, {}, {})
TWO_SEEDS = BEACH._replace(seeds=2)


def on_the_beach(label: str) -> Training:
    """Returns a method's training, tested with all adaptations that its rows need."""
    known = TRAININGS[label].changes
    masked = ("running:mask=False",) if label.startswith("FedCD") else ()
    served = (*known.get("adaptations", ("running",)), "tsmobn", *masked)
    return TRAININGS[label]._replace(changes={**known, "adaptations": served})


def beach() -> Table:
    """Returns the table of the cow on the beach."""
    made = {label: on_the_beach(label) for label in TRAININGS}
    rows = {label: Row((one,), METHODS[label].adaptation) for label, one in made.items()}
    rows |= {f"{label} + TsmoBN": Row((one,), "tsmobn") for label, one in made.items()}
    for label in ("FedCD-SCI", "FedCD-SCI + REA"):
        rows[f"{label}, no mask"] = Row((made[label],), "running:mask=False")
    return table("beach", "The cow on the beach", BEACH, rows)


def suppressed(workdir: Path, names: Sequence[str]) -> bytes | None:
    """Draws a point for each channel of all finished runs; returns None if no run has finished.

    The left panel shows the shares of variance that colour and digit explain, with the mean mask as
    the point's colour; the right panel shows the mean mask over the difference of the shares.
    """
    runs = [_channels(workdir / name) for name in names if plan.finished(workdir, name)]
    if not runs:
        return None
    colour, digit, mask = (np.concatenate(parts) for parts in zip(*runs, strict=True))
    figure = Canvas(figsize=(10, 4.2), layout="constrained")
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


def _channels(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns three f[F] for the channels before the classifier in a run's selected round.

    They are the shares in [0, 1] of a channel's variance in the zoo that colour and digit explain,
    and the mean mask.
    """
    import jax

    from fedjax_bn.adaptation import running
    from fedjax_bn.data.domain import whole
    from fedjax_bn.data.sets.cow_on_beach import ground_of
    from fedjax_bn.federation import global_variables
    from fedjax_bn.run import train
    from fedjax_bn.run.files.finished_run import configuration, restore_state
    from fedjax_bn.training.plots import features_of

    config = configuration(json.loads((folder / "config.json").read_text())["config"])
    experiment, _, start = train.prepare(config)
    state, _ = restore_state(folder, jax.eval_shape(start))
    variables = global_variables(state)
    (zoo,) = (whole(domain) for domain in experiment.unseen if domain.name == "zoo")
    features = features_of(running, experiment.model, experiment.prepare, variables, zoo)
    colour = explained(features, ground_of(np.asarray(zoo.images)))
    mask = np.asarray(variables["mask"]["features"])
    return colour, explained(features, zoo.labels), mask


def explained(features: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns f[F], the share of each feature's variance (over N samples) between groups i[N]."""
    mean, total = features.mean(0), features.var(0)
    between = sum(
        (groups == g).mean() * np.square(features[groups == g].mean(0) - mean)
        for g in np.unique(groups)
    )
    return np.where(total > 0, between / np.where(total > 0, total, 1), 0)


BY_LAMBDA = {v: one._replace(folder=f"lambda{v}") for v, one in fedcd.SCI.items()}
BY_ETA = {v: one._replace(folder=f"eta{v}") for v, one in fedcd.REA.items()}
SETTINGS = {f"SCI, lambda = {value}": one for value, one in BY_LAMBDA.items()}
SETTINGS |= {f"REA, eta = {value}": one for value, one in BY_ETA.items()}
ON_BEACH = beach()
BARS = ON_BEACH._replace(rows={label: ON_BEACH.rows[label] for label in TRAININGS})
MASKED = on_the_beach("FedCD-SCI")
NORMS = {f"lambda = {v}": (TWO_SEEDS.names("", one), fedcd.NORM) for v, one in BY_LAMBDA.items()}
TABLES = (
    table(
        *("small", "PACS at 32x32, three tenths of the images, SmallCNN", SMALL_PACS),
        METHODS | {"FedProx": fedcd.by_size("fedprox:mu=0.1")},
        average="mean",
    ),
    table("digits", "Digits, leaving one domain out", SMALL_DIGITS, METHODS, average="mean"),
    ON_BEACH,
    table("beach-settings", "The cow on the beach: lambda and eta", TWO_SEEDS, SETTINGS),
)
FIGURES = (
    figures.bar_figure(
        "beach-bars",
        "The cow on the beach: how far methods fall from the clients to the zoo and the beach",
        BARS,
    ),
    Figure(
        "norms",
        "L1 norm of the clients' masks on the cow on the beach",
        TWO_SEEDS.runs(BY_LAMBDA.values()),
        partial(
            figures.curves,
            panels={"the cow on the beach": NORMS},
            ylabel="L1 norm of the masks, mean",
        ),
    ),
    Figure(
        "suppressed",
        "What the masks suppress: channels that follow the colour, and those that follow the digit",
        BEACH.runs([MASKED]),
        partial(suppressed, names=BEACH.names("", MASKED)),
    ),
)
SWEEP = Sweep("fedcd_small", "FedCD at a small size", TABLES, FIGURES)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
