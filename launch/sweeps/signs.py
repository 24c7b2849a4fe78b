"""FedCD's detection at a size that two CPU cores carry: signs in the weather, and their shortcut.

    python launch/sweeps/signs.py [--only 'shortcut/*'] [--data FOLDER]     see sweep.py

`signs/*` is configs/signs.py, which needs no data: four scenes train, dusk is unseen, with the
statistics of training and with TsmoBN. `shortcut/*` is its variant, where the colour of the rim
mostly predicts the digit in the clients' scenes and misleads in dusk: how far a method falls from
the clients to dusk is how far it has learned the colour, beside how far it falls in `signs/*`,
where the weather alone differs. lambda and eta are 0.7 and 0.5. mAP50 in percent, 3 seeds.
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
SIGNS = Protocol("signs", "configs/signs.py", SCENES, 3, {}, {"baselines": ()})
SHORTCUT = SIGNS._replace(name="shortcut", changes={**SIGNS.changes, "data.name": "signs_shortcut"})


def scenes(name: str, title: str, protocol: Protocol) -> Table:
    """Returns the clients' scenes and dusk, with running statistics and with TsmoBN."""
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
