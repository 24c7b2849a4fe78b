"""Runs PACS from ImageNet's weights with each domain left out once, at a size for two cores.

    python launch/sweeps/pacs_imagenet.py [--only 'pacs/sketch/*'] [--data FOLDER]     see sweep.py

NAMEs of data: maps, what launch/convert/frozen_maps.py makes; and resnet50, the file that
launch/convert/keras_resnet.py makes with --classes 7.

The recipe is protocol=small of configs/pacs.py, with three seeds. FedCD is in it too, with its
weights REA. States and rounds are not selected: the last round is tested. CAFL is a mean over the
2,048 features, because the sum diverges, with 0.4 for the paper's weight of 4, which costs two
points on photographs. FedIG is a run of FedIG-A that is tested without its
adapter, and FedAvg + TsmoBN a test of FedAvg; both act on the batch norms of the last block alone.
"""

import sys

from domains import DOMAINS
from plan import Protocol, Row, Sweep, left_out, table, training, where
from sweep import main

NEEDS = {"data.path": "maps", "pretrained": "resnet50"}
SMALL = "configs/pacs.py:protocol=small"
PACS = Protocol("pacs", SMALL, left_out(DOMAINS["pacs"]), 3, NEEDS, {})
ADAPTER = "zero_shot_adapter"
FEDAVG = training("fedavg", adaptations=("running", "tsmobn"))
FEDIGA = training("fediga:lambda_2=0.4", adaptations=("running", ADAPTER))
ROWS = {
    "FedAvg": Row((FEDAVG,)),
    "FedAvg + TsmoBN": Row((FEDAVG,), "tsmobn"),
    "FedBN": Row((training("fedbn", adaptations=("running",)),)),
    "FedIG": Row((FEDIGA,)),
    "FedIG-A": Row((FEDIGA,), ADAPTER),
    "FedCD-SCI + REA": Row((training("fedcd", weigh="", adaptations=("running",)),)),
}
SWEEP = Sweep(
    "pacs_imagenet",
    "PACS from ImageNet's weights",
    (
        table(
            "fedig",
            "PACS, beside FedIG's Table 5",
            PACS,
            ROWS,
            where("FedIG-A", 5, dataset="PACS"),
            "Avg",
        ),
        table(
            *("fedcd", "PACS, beside FedCD's Table 1", PACS),
            {label: ROWS[label] for label in ("FedAvg", "FedCD-SCI + REA")},
            where("FedCD", 1),
            "Avg",
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
