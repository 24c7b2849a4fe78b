"""Runs FedCD's detection at a size that two CPU cores can train: signs in weather, and a shortcut.

    python launch/sweeps/signs.py [--only 'shortcut/*'] [--data FOLDER]     see sweep.py

`signs/*` is configs/signs.py, which needs no data: four scenes train, and dusk is unseen, with the
statistics of training and with TsmoBN. In its variant `shortcut/*` the colour of the rim mostly
predicts the digit in the clients' scenes and misleads in dusk. A method that has learned the colour
loses more from the clients to dusk there than in `signs/*`, where only the weather differs. lambda
and eta are 0.7 and 0.5. Numbers are mAP50 in percent over 3 seeds.
"""

import sys

from fedcd import by_size
from fedcd_small import TRAININGS
from plan import MEAN, Column, Protocol, Row, Sweep, Table, columns_of, table
from sweep import main

METHODS = {"SingleSet": by_size("singleset")}
METHODS |= {label: one for label, one in TRAININGS.items() if label != "FedIG-A"}
SCENES = {
    **columns_of({name: name for name in ("clear", "night", "fog", "rain")}),
    "clients": Column(("",), MEAN),
    "dusk": Column(("",), "dusk"),
}
CHANGES = {"baselines": (), "data.name": "signs", "adaptations": ("running", "tsmobn")}
SIGNS = Protocol("signs", "configs/signs.py", SCENES, 3, {}, CHANGES)
SHORTCUT = SIGNS._replace(name="shortcut", changes={**SIGNS.changes, "data.name": "signs_shortcut"})


def scenes(name: str, title: str, protocol: Protocol) -> Table:
    """Returns a table of the clients' scenes and dusk, with running statistics and with TsmoBN."""
    rows = {label: Row((one,)) for label, one in METHODS.items()}
    rows |= {f"{label} + TsmoBN": Row((one,), "tsmobn") for label, one in METHODS.items()}
    return table(name, title, protocol, rows)


SWEEP = Sweep(
    "signs",
    "FedCD's detection at a small size",
    (
        scenes("signs", "Signs in the weather", SIGNS),
        scenes("shortcut", "Signs whose rim predicts the digit, but not in dusk", SHORTCUT),
    ),
)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
