"""FedBN beside SingleSet in segmenting glands under simulated stains; no download.

    python -m fedjax_bn.main --config configs/segmentation.py

Eosin, silver, azan and fluorescence are clients, faded is the unseen stain
(fedjax_bn/data/sets/stains.py). A narrow U-Net segments walls and lumens, whose shapes are real
handwriting; scores are the mean Dice of both in percent.

    HarmoFL, which brings amplitudes together      --config.method=harmofl
    a U-Net as in HarmoFL's and FedDG's code       --config.model=UNet

    FedAvg, whose averaged statistics suit no stain:
    its Dice differs by tens of points between seeds
                                                   --config.baselines=singleset,fedavg
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.baselines = ("singleset",)
    config.model = "UNet:width=8:levels=2"
    config.rounds = 15
    config.local_epochs = 1
    config.batch_size = 4
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.01
    config.optimizer.schedule = "cosine"
    config.optimizer.keep = True
    config.eval_every = 5
    config.target = "faded"
    config.adaptations = ("running", "fixed_alpha", "tsmobn")
    config.data.name = "stains"
    config.data.image_size = 64
    return override(config, changes)
