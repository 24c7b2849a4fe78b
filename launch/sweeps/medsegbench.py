"""Runs the two-dimensional tasks of FL-MedSegBench (Zhu et al., arXiv 2603.11659) with its methods.

    python launch/sweeps/medsegbench.py --data FOLDER [--only 'polyp/fedbn/*']     see sweep.py

FOLDER holds, of the tasks to run, the clients' folders of images and masks with equal names:

    polyp/CLIENT/{images,masks}       CVC-300, CVC-ClinicDB, CVC-ColonDB, EndoTect, ETISLaribPolypDB
    ultrasound/CLIENT/{images,masks}  BUID, BUSI, BUS_UC, BUS_UCLM
    pathology/CLIENT/{images,masks}   3d-1000, kfbio-400, teksqray-600p (COSAS 2024, task 2)
    vessel/CLIENT/{train,test}/{images,masks}  ChaseDB, DR-Hagis, DRIVE, HRF, LES-AV, ORVS
    prostate/SITE/                    as configs/prostate.py reads it

The protocol is that of the authors' code (meiluzhu/FL-MedSegBench: scripts/, main_seg.py,
datasets.py): 400 rounds of one epoch, batches of 8, Adam with rate 1e-4 (vessels 1e-3, halved after
each 100 rounds) and L2 penalty 5e-4, which clients keep, 256 x 256 pixels, flips and quarter turns,
half cross entropy and half Dice of each image, weights by size; 70, 10 and 20 % of a client's
images (vessels: a fifth of the training images validates) and seeds 0 to 2. Numbers are the Dice
of the foreground in percent.

What differs: the U-Net is ours (HarmoFL's form with 16 channels first; theirs has three
convolutions in a block); the round is chosen for all clients by their mean validation Dice, there
for each client in the second half; samples are divided by us; Dice of a patient's slices is taken
together; FedNova's Adam starts anew in each round; FedRoD's head has the same optimizer; FedLWS
shrinks no statistics. FedDyn is in their code, but not among their methods. Three tasks in three
dimensions and the glands (192 x 384 pixels) are left out. The paper's numbers are not beside ours:
the authors' code has no file of them, and we did not have the paper's tables at hand.
"""

import sys

from plan import MEAN, Column, Protocol, Sweep, Training, columns_of, table, training
from sweep import main

TURNS = "masks:quarters=1.0:rotate=0:scale=0:shift=0:brightness=0:contrast=0:gamma=0"
CHANGES = {
    "baselines": (),
    "adaptations": (),
    "task": "segmentation:by_sample=True",
    "model": "UNet:width=16",
    "rounds": 400,
    "batch_size": 8,
    "optimizer.learning_rate": 1e-4,
    "optimizer.weight_decay": 5e-4,
    "data.image_size": 256,
    "data.augment": TURNS,
}
FOLDERS = CHANGES | {"data.validation": 0.1, "data.test": 0.2}
VESSELS = CHANGES | {
    "data.split": "official",
    "data.validation": 0.2,
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "step:rounds=100:factor=0.5",
}
TASKS = {  # title, config, changes, clients
    "prostate": (
        *("Fed-Prostate", "configs/prostate.py:protocol=fl_medsegbench", CHANGES),
        ("BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL"),
    ),
    "polyp": (
        *("Fed-Polyp", "configs/masks.py", FOLDERS),
        ("CVC-300", "CVC-ClinicDB", "CVC-ColonDB", "EndoTect", "ETISLaribPolypDB"),
    ),
    "ultrasound": (
        *("Fed-BUS", "configs/masks.py", FOLDERS),
        ("BUID", "BUSI", "BUS_UC", "BUS_UCLM"),
    ),
    "pathology": (
        *("Fed-COSAS", "configs/masks.py", FOLDERS),
        ("3d-1000", "kfbio-400", "teksqray-600p"),
    ),
    "vessel": (
        *("Fed-Vessel", "configs/masks.py", VESSELS),
        ("ChaseDB", "DR-Hagis", "DRIVE", "HRF", "LES-AV", "ORVS"),
    ),
}


def methods(shrinking: str) -> dict[str, Training]:
    """Returns the rows of a table, with the limits of FedLWS's tau in a task."""
    return {
        "FedAvg": training("fedavg"),
        "FedProx": training("fedprox:mu=0.001"),
        "FedAWA": training("fedawa"),
        "FedRDN": training("fedrdn"),
        "FedLWS": training("fedlws", weigh=f"layer_shrinking:{shrinking}"),
        "MOON": training("moon:mu=0.01"),
        "FedNova": training("fednova", optimizer__keep=False),
        "PN": training("pn"),
        "FedDyn": training("feddyn:alpha=0.01", weigh="by_size"),
        "Ditto": training("ditto:weight=0.001"),
        "FedBN": training("fedbn"),
        "FedPer": training("fedavg", "fedper", share="all_but_head"),
        "FedRoD": training("fedrod"),
        "SiloBN": training("silobn"),
    }


def protocol(name: str) -> Protocol:
    """Returns the runs of a task: all of its clients train, and are tested."""
    _, config, changes, clients = TASKS[name]
    columns = columns_of({client: client for client in clients}) | {"mean": Column(("",), MEAN)}
    return Protocol(name, config, columns, 3, {"data.path": name}, changes)


LIMITS = {"polyp": "least=0.001:most=0.01"}
SWEEP = Sweep(
    "medsegbench",
    "FL-MedSegBench in two dimensions",
    tuple(
        table(name, task[0], protocol(name), methods(LIMITS.get(name, "least=0.01:most=0.05")))
        for name, task in TASKS.items()
    ),
)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
