"""FedBN on ten classes of DomainNet (Li et al. 2021, Section 5.2 and D.3), six clients.

    python -m fedjax_bn.main --config configs/domainnet.py --config.data.path=PATH

PATH is laid out as in fedjax_bn/data/sets/image_folders.py; the decoded images take 5 GB in the
folder config.data.cache. The official test lists test; every client has 105 training and 105
validation images, a twentieth of the smallest domain's.

The paper's Table 1 (300 rounds, 5 runs), accuracy in percent:

              clipart  infograph  painting  quickdraw  real  sketch
    SingleSet 41.0     23.8       36.2      73.1       48.5  34.0
    FedAvg    48.8     24.9       36.5      56.1       46.3  36.6
    FedProx   48.9     24.9       36.6      54.4       47.8  36.9
    FedBN     51.2     26.8       41.5      71.3       54.8  42.1

    methods        --config.method=fedavg    (fedprox:mu=0.001, silobn, singleset)
    other classes  --config.data.classes=airplane,zigzag    (all: every one of the 345)

Small, on a CPU: the keys of configs/office_caltech10.py, which states what they gave on other
images; these were not available.
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.model = "AlexNet"
    config.rounds = 300  # D.3
    config.local_epochs = 1
    config.batch_size = 32
    config.optimizer.learning_rate = 0.01
    config.weigh = "uniform"  # 1/K, as in the authors' code
    config.eval_every = 1  # the round with the best mean validation accuracy is reported
    config.checkpoint_every = 5
    config.data.name = "domainnet"
    config.data.image_size = 256
    config.data.split = "official"
    config.data.validation = 0.05
    config.data.truncate = True
    config.data.fraction = 0.05265  # of the 0.95 that are left, to make 0.05 of the whole
    config.data.augment = "office"
    return override(config, changes)
