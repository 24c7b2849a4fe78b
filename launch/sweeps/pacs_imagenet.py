"""Runs PACS from ImageNet's weights with each domain left out once, at a size for one core.

    python launch/sweeps/pacs_imagenet.py [--only 'pacs/sketch/*'] [--data FOLDER]     see sweep.py

NAMEs of data: pacs, as configs/pacs.py takes data.path; and resnet50, the file that
launch/convert/keras_resnet.py makes, --data.resnet50=FILE.

ResNet-50 in Keras' form starts from these weights. Three clients train on batches of 8 images of 96
pixels for 10 rounds of 40 steps; one seed. All methods have the rate, momentum and augmentation
of configs/pacs.py, and FedCD is in FedIG's protocol with them. States and rounds are not selected:
the last round is tested. CAFL is a mean over the 2,048 features, because the sum diverges. FedIG is
a run of FedIG-A that is tested without its adapter.
"""

import sys

from domains import DOMAINS
from plan import Protocol, Row, Sweep, left_out, table, training, where
from sweep import main

CHANGES = {
    "model": "ResNet50:keras=True",
    "baselines": (),
    "rounds": 10,
    "local_steps": 40,
    "local_selection": 0,
    "batch_size": 8,
    "eval_every": 10,
    "checkpoint_every": 2,
    "data.image_size": 96,
}
NEEDS = {"data.path": "pacs", "pretrained": "resnet50"}
PACS = Protocol("pacs", "configs/pacs.py", left_out(DOMAINS["pacs"]), 1, NEEDS, CHANGES)
ADAPTER = "zero_shot_adapter"
FEDAVG = training("fedavg", adaptations=("running", "tsmobn"))
FEDIGA = training("fediga", adaptations=("running", ADAPTER))
ROWS = {
    "FedAvg": Row((FEDAVG,)),
    "FedAvg + TsmoBN": Row((FEDAVG,), "tsmobn"),
    "FedBN": Row((training("fedbn", adaptations=("running",)),)),
    "FedIG": Row((FEDIGA,)),
    "FedIG-A": Row((FEDIGA,), ADAPTER),
    "FedCD-SCI + REA": Row((training("fedcd", adaptations=("running",)),)),
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
