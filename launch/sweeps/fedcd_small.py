"""FedCD and its parts at sizes that two CPU cores carry, and the cow on the beach.

    python launch/sweeps/fedcd_small.py [--only 'beach/*'] [--data FOLDER]     see sweep.py

NAMEs of data: digits and pacs, as their config files take data.path. `digits/*` leaves one of five
digit domains out, `small/*` one of PACS at 32x32 pixels with three tenths of the images, and
`beach/*` is the cow on the beach (configs/cow_on_beach.py), which needs no data; all with SmallCNN
from random weights, so that FedIG-A's CAFL is the mean over features (see configs/pacs.py).

lambda and eta are 0.7 and 0.5 but in `beach/lambda*` and `beach/eta*`.
"""

import sys
from functools import partial

import curves
import figures
import suppression
from plan import MEAN, Figure, Sweep, Table
from rows import Column, Protocol, Row, Training, left_out, names, runs_of, table
from sweep import main

ADAPTER = "zero_shot_adapter"
SIZE = {"weigh": "by_size"}
# row -> its folder and what it changes
TRAININGS = {
    "FedAvg": Training("fedavg", {"method": "fedavg", **SIZE}),
    "FedProx": Training("fedprox", {"method": "fedprox", **SIZE}),
    "FedBN": Training("fedbn", {"method": "fedbn", **SIZE}),
    "FedIG-A": Training(
        "fedig-a", {"method": "fediga", **SIZE, "adaptations": ("running", ADAPTER)}
    ),
    "REA": Training("rea", {"method": "fedavg", "weigh": "risk_extrapolation:eta=0.5"}),
    "FedCD-SCI": Training("fedcd-sci", {"method": "fedcd", **SIZE}),
    "FedCD-SCI + REA": Training("fedcd-sci-rea", {"method": "fedcd", "fedcd.eta": 0.5}),
}
METHODS = {
    label: Row((one,), ADAPTER if label == "FedIG-A" else "running")
    for label, one in TRAININGS.items()
}
PACS = {"P": "photo", "A": "art_painting", "C": "cartoon", "S": "sketch"}
DIGITS = ("mnist", "svhn", "usps", "fonts", "mnist_m")
LAMBDAS = (0.5, 0.7, 0.8, 0.9, 1.0)
ETAS = (0.3, 0.5, 0.8)
SMALL = {
    "model": "SmallCNN",
    "batch_size": 16,
    "optimizer.learning_rate": 0.02,
    "optimizer.momentum": 0.9,
}
SMALL_PACS = Protocol(
    "small",
    "configs/pacs.py:protocol=fedcd",
    left_out(PACS),
    2,
    {"data.path": "pacs"},
    {
        **SMALL,
        "rounds": 8,
        "data.image_size": 32,
        "data.fraction": 0.3,
        "data.augment": "none",
        "eval_every": 3,
    },
)
SMALL_DIGITS = Protocol(
    "digits",
    "configs/digits.py",
    left_out({name: name for name in DIGITS}),
    2,
    {"data.path": "digits"},
    # of an `.npz` of 554 to 743 images a domain
    {**SMALL, "data.fraction": 1.0, "data.truncate": False, "rounds": 20, "eval_every": 5},
)
BEACH = Protocol(
    "beach",
    "configs/cow_on_beach.py",
    {
        "clients": Column(("",), MEAN),
        "zoo": Column(("",), "zoo"),  # the colour tells nothing
        "beach": Column(("",), "beach"),  # tells wrong
    },
    3,
    {},
    {},
)
TWO_SEEDS = BEACH._replace(seeds=2)


def on_the_beach(label: str) -> Training:
    """A method with all adaptations that its rows need."""
    training = TRAININGS[label]
    own = training.changes.get("adaptations", ("running",))
    masked = ("running:mask=False",) if label.startswith("FedCD") else ()
    return training._replace(changes={**training.changes, "adaptations": (*own, "tsmobn", *masked)})


def beach() -> Table:
    """The cow on the beach."""
    made = {label: on_the_beach(label) for label in TRAININGS}
    rows = {label: Row((one,), METHODS[label].adaptation) for label, one in made.items()}
    rows |= {f"{label} + TsmoBN": Row((one,), "tsmobn") for label, one in made.items()}
    for label in ("FedCD-SCI", "FedCD-SCI + REA"):
        rows[f"{label}, no mask"] = Row((made[label],), "running:mask=False")
    return table("beach", "The cow on the beach", BEACH, rows)


BY_LAMBDA = {
    value: Training(f"lambda{value}", {"method": "fedcd", **SIZE, "fedcd.lambda_sci": value})
    for value in LAMBDAS
}
BY_ETA = {
    value: Training(f"eta{value}", {"method": "fedavg", "weigh": f"risk_extrapolation:eta={value}"})
    for value in ETAS
}
SETTINGS = {f"SCI, lambda = {value}": Row((one,)) for value, one in BY_LAMBDA.items()}
SETTINGS |= {f"REA, eta = {value}": Row((one,)) for value, one in BY_ETA.items()}
ON_BEACH = beach()
BARS = ON_BEACH._replace(rows={label: ON_BEACH.rows[label] for label in TRAININGS})
MASKED = on_the_beach("FedCD-SCI")
NORMS = {f"lambda = {value}": names(TWO_SEEDS, "", one) for value, one in BY_LAMBDA.items()}

SWEEP = Sweep(
    "fedcd_small",
    "FedCD at a small size",
    (
        table(
            "small",
            "PACS at 32x32, three tenths of the images, SmallCNN",
            SMALL_PACS,
            METHODS,
            average="mean",
        ),
        table("digits", "Digits, leaving one domain out", SMALL_DIGITS, METHODS, average="mean"),
        ON_BEACH,
        table("beach-settings", "The cow on the beach: lambda and eta", TWO_SEEDS, SETTINGS),
    ),
    (
        Figure(
            "beach-bars",
            "The cow on the beach: how far methods fall from the clients to the zoo and the beach",
            ON_BEACH.runs,
            partial(figures.bars, table=BARS),
        ),
        Figure(
            "norms",
            "L1 norm of the clients' masks on the cow on the beach",
            runs_of(TWO_SEEDS, BY_LAMBDA.values()),
            partial(curves.norms, panels={"the cow on the beach": NORMS}),
        ),
        Figure(
            "suppressed",
            "What the masks suppress: channels that follow the colour, and those that follow the "
            "digit",
            runs_of(BEACH, [MASKED]),
            partial(suppression.draw, names=names(BEACH, "", MASKED)),
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
