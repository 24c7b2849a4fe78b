"""Any folder of images with masks, as a federation of its domains.

    python -m fedjax_bn.main --config configs/masks.py --config.data.path=PATH

PATH is laid out as in fedjax_bn/data/masks/own.py.
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.baselines = ("fedavg",)
    config.model = "UNet:width=16"
    config.rounds = 30
    config.local_epochs = 1
    config.batch_size = 4
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.001
    config.optimizer.keep = True
    config.eval_every = 10
    config.eval_batch_size = 16
    config.adapt_batch_size = 8
    config.adaptations = ("running", "tsmobn")
    config.data.name = "masks"
    config.data.image_size = 128
    config.data.augment = "masks"
    config.data.validation = 0.1
    return override(config, changes)
