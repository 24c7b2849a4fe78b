"""Runs FedBN and TsmoBN in segmentation at a size that two CPU cores can train: glands in stains.

    python launch/sweeps/segmentation.py [--only 'stains/fedbn/*']     see sweep.py

The runs are those of configs/segmentation.py, which needs no data: four stains train, and faded is
unseen, with the statistics of training (running), with half of its own statistics (alpha 0.5) and
with TsmoBN. Numbers are the mean Dice of walls and lumens in percent over 3 seeds. Seeds share
compiled programs if the environment has JAX_COMPILATION_CACHE_DIR=FOLDER.
"""

import sys

from plan import MEAN, Column, Protocol, Row, Sweep, columns_of, table, training
from sweep import main

CLIENTS = ("eosin", "silver", "azan", "fluorescence")
COLUMNS = {
    **columns_of({name: name for name in CLIENTS}),
    "clients": Column(("",), MEAN),
    "faded": Column(("",), "faded"),
}
STAINS = Protocol("stains", "configs/segmentation.py", COLUMNS, 3, {}, {"baselines": ()})
ADAPTATIONS = {"": "running", ", alpha 0.5": "fixed_alpha", " + TsmoBN": "tsmobn"}
METHODS = {"SingleSet": "singleset", "FedAvg": "fedavg", "FedBN": "fedbn"}
ROWS = {
    label + served: Row((training(method),), adaptation)
    for served, adaptation in ADAPTATIONS.items()
    for label, method in METHODS.items()
}
SWEEP = Sweep(
    "segmentation",
    "Segmentation at a small size",
    (table("stains", "Glands in stains", STAINS, ROWS),),
)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
