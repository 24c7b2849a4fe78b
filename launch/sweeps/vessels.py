"""Runs segmentation of retinal vessels with each of four cameras left out once.

    python launch/sweeps/vessels.py --data FOLDER [--only 'vessels/STARE/*']     see sweep.py

FOLDER/vessels holds CHASEDB, DRIVE, STARE and VEVIO (24, 15, 12 and 16 images with masks), each
with folders images and masks. Three cameras train, with a fifth of their images for testing and
the eyes of one child together; the fourth is unseen. Images are stretched to 128 pixels, where
thin vessels are narrower than a pixel: the scores are below those of the full size. Numbers are
the Dice of the vessels in percent over 3 seeds. All methods have the same rate and rounds, which
were not tuned. HarmoFL and FedDG have the options of their authors' code for
segmentation, but FedDG differentiates its inner step too (feddg:order=2), which that code does not.
Of FedDG, each client sends the mean amplitudes of 4 images.
"""

import sys

from plan import MEAN, Column, Protocol, Row, Sweep, Training, left_out, table, training
from sweep import main

CAMERAS = {name: name for name in ("CHASEDB", "DRIVE", "STARE", "VEVIO")}
CHANGES = {
    "baselines": (),
    "model": "UNet:width=8:levels=3",
    "rounds": 50,
    "eval_every": 50,
    "optimizer.learning_rate": 0.003,
    "optimizer.schedule": "cosine",
    "data.test": 0.2,
    "data.pairs": (
        *("images/{}_training.tif", "masks/{}_manual1.gif"),  # DRIVE
        *("images/{}.ppm", "masks/{}.ah.pgm"),  # STARE
        *("images/{}.jpg", "masks/{}_1stHO.png"),  # CHASEDB
        *("images/{}.png", "masks/bw_{}_black.png"),  # VEVIO
    ),
}
UNSEEN = Protocol(
    "vessels", "configs/masks.py", left_out(CAMERAS), 3, {"data.path": "vessels"}, CHANGES
)
CLIENTS = UNSEEN._replace(columns={name: Column((name,), MEAN) for name in CAMERAS})
METHODS: dict[str, Training] = {
    "FedAvg": training("fedavg"),
    "FedBN": training("fedbn"),
    "HarmoFL": training("harmofl"),
    "FedDG": training("feddg:spectra=4"),
}
ROWS = {
    label + served: Row((one,), adaptation)
    for served, adaptation in {"": "running", " + TsmoBN": "tsmobn"}.items()
    for label, one in METHODS.items()
}
SWEEP = Sweep(
    "vessels",
    "Retinal vessels of four cameras",
    (
        table("unseen", "The camera that is left out", UNSEEN, ROWS, average="mean"),
        table("clients", "Mean of the three that train, by the one left out", CLIENTS, METHODS),
    ),
)

if __name__ == "__main__":
    sys.exit(main(SWEEP))
