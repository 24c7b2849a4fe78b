"""CIFAR-10-C at a size that two CPU cores carry (after UniFed: Tables 2 and 3, Fig. 3).

    python -m fedjax_bn.main --config configs/cifar10_c_small.py --config.data.path=PATH

PATH is CIFAR-10-C as published, see configs/cifar10_c.py, whose protocols these are:

    15 internal clients    --config.target= --config.data.validation=0.1 --config.data.test=0.2
    external clients       --config.target=noise    (blur, weather, digital)

Differs from the paper: images of 32x32, a network of three convolutions from random weights instead
of a pretrained AlexNet, severity 5 instead of 1 so that this network sees the corruptions, and few
rounds at a larger learning rate.
"""

from ml_collections import ConfigDict

from fedjax_bn.data.sets.cifar10_c import INTERNAL
from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedavg"
    config.model = "SmallCNN"
    config.rounds = 12
    config.batch_size = 32
    config.optimizer.learning_rate = 0.3
    config.target = "noise"
    config.adaptations = ("running", "tsmobn")
    config.eval_every = 4  # the evaluated round with the best mean validation accuracy is reported
    config.checkpoint_every = 4
    config.data.name = "cifar10_c"
    config.data.image_size = 32
    config.data.domains = INTERNAL
    config.data.severities = ("5",)
    config.data.split = "holdout"
    config.data.validation = 0.2
    config.data.fraction = 0.5  # of the training samples
    return override(config, changes)
