"""FedBN beside FedAvg in segmenting glands under simulated stains; no download.

python -m fedjax_bn.main --config configs/segmentation.py

"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.baselines = ("singleset", "fedavg")
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
