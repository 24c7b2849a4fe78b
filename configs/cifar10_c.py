"""CIFAR-10-C, leaving one corruption type out (TsmoBN: Table 1; UniFed: Tables 2 and 3).

    python -m fedjax_bn.main --config configs/cifar10_c.py --config.data.path=PATH

PATH is the published folder, see fedjax_bn/data/sets/cifar10_c.py. Every one of the 15 common
corruptions, at severity 1, is a client. Those of the target type, one of noise, blur, weather and
digital, are unseen; TsmoBN normalizes them by statistics tracked on their own stream.

TsmoBN's Table 1 (200 rounds, 3 runs), accuracy on unseen clients in percent:

             noise                blur                       weather
             gauss  shot  impulse defoc  glass  motion zoom   snow   frost  fog
    FedAvg   58.30  71.09 30.46   96.17  66.46  92.58  88.50  95.07  95.16  96.34
    +TsmoBN  92.99  94.20 79.68   96.29  87.33  95.79  95.70  95.77  96.02  96.38
    FedBN    55.87  68.84 28.44   96.04  64.56  90.38  84.95  94.38  94.42  96.06
    +TsmoBN  91.53  93.01 77.30   96.42  85.48  95.71  95.52  95.46  95.87  96.35

             digital
             bright contr  elast  pixel  jpeg
    FedAvg   96.30  95.76  91.31  95.92  94.13
    +TsmoBN  96.24  96.20  94.37  96.11  94.74
    FedBN    96.11  94.61  87.26  95.47  91.99
    +TsmoBN  96.30  96.17  93.48  96.06  93.77

    types            --config.target=blur    (noise, weather, digital)
    methods          --config.method=fedavg    (fedprox, fednova, fedadam)
    four more unseen clients (E.2.5)    --config.data.domains= --config.target=noise,extra
    samples (Fig. E.2 and E.6)          launch/pictures.py

UniFed's Table 2, all 15 clients internal, divided 0.7, 0.1, 0.2; mean accuracy in percent: FedAvg
73.8, with client-specific batch norm 77.3; PerFedAvg 80.0 and 81.3.

    its setting      --config.target= --config.data.validation=0.1 --config.data.test=0.2
                     --config.patience=0
    its external clients (Table 3)    --config.patience=0
    eight algorithms, both ways, all seeds    launch/sweeps/unifed.py

Images have the papers' 256 pixels a side, with which the cache takes 29 GB (6 GB for 2,000
photographs). Both papers' AlexNet starts from ImageNet's weights: name a file of them with
--config.pretrained=FILE, and the run is the papers'; without them it starts at random, which it
states at its start, in config.json and in its report. It stops when ten rounds bring no better mean
validation accuracy (TsmoBN, E.1; UniFed names no early stop). All clients have as many photographs
as the others, so that cutting them to the smallest (TsmoBN, section 4.1) changes nothing.

Differs from the papers: no photograph of a client's validation set is in another client's training
set.

Small, on a CPU: configs/cifar10_c_small.py.
"""

from ml_collections import ConfigDict

from fedjax_bn.data.sets.cifar10_c import INTERNAL
from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.model = "AlexNet"
    config.rounds = 200  # E.1
    config.local_epochs = 1
    config.batch_size = 32
    config.optimizer.learning_rate = 0.001
    config.target = "noise"
    config.adaptations = ("running", "tsmobn")
    config.patience = 10  # E.1
    config.eval_every = 1  # the round with the best mean validation accuracy is reported
    config.checkpoint_every = 5
    config.data.name = "cifar10_c"
    config.data.image_size = 256  # E.1; AlexNet needs 63
    config.data.domains = INTERNAL
    config.data.severities = ("1",)
    config.data.split = "holdout"
    config.data.validation = 0.2
    return override(config, changes)
