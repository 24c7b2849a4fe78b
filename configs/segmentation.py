"""FedBN beside SingleSet in segmenting glands under simulated stains; no download.

    python -m fedjax_bn.main --config configs/segmentation.py

Eosin, silver, azan and fluorescence are clients, faded is left out
(fedjax_bn/data/sets/stains.py). A narrow U-Net segments walls and lumens, whose shapes are real
handwriting; scores are the mean Dice of both in percent. The data are those of seed 0 whatever the
seed.

    HarmoFL, which brings amplitudes together      --config.method=harmofl
    a U-Net as in HarmoFL's and FedDG's code       --config.model=UNet

    FedAvg, and faded, whose Dice differ by tens of points between seeds
                                                   --config.baselines=singleset,fedavg
                                                   --config.adaptations=running,tsmobn
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.baselines = ("singleset",)
    config.model = "UNet:width=8:levels=2"
    config.rounds = 30
    config.local_epochs = 1
    config.batch_size = 4
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.01
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_rounds = 3  # or some seeds lose a client at the first steps
    config.optimizer.keep = True
    config.eval_every = 10
    config.target = "faded"
    config.adaptations = ()
    config.data.name = "stains:seed=0"
    config.data.image_size = 64
    return override(config, changes)
