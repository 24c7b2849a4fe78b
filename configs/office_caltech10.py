"""FedBN on Office-Caltech10 (Li et al. 2021, Section 5.2 and D.3): four cameras, a client each.

    python -m fedjax_bn.main --config configs/office_caltech10.py --config.data.path=PATH

PATH is laid out as in fedjax_bn/data/sets/image_folders.py; the decoded images take 0.5 GB in
the folder config.data.cache. Of every domain a fifth tests; the others have 62 training and 50
validation images, as many as dslr.

The paper's Table 1 (300 rounds, 5 runs), accuracy in percent:

              amazon  caltech  dslr  webcam
    SingleSet 54.9    40.2     78.7  86.4
    FedAvg    54.1    44.8     66.9  85.1
    FedProx   54.2    44.5     65.0  84.4
    FedBN     63.0    45.3     83.1  90.5

    --config.method=fedavg    (fedprox:mu=0.001, silobn, singleset)

Small, on a CPU, from random weights:
    --config.model=ResNet10:width=16 --config.data.image_size=64 --config.rounds=15
    --config.eval_every=5 --config.batch_size=32 --config.optimizer.learning_rate=0.03
    --config.optimizer.momentum=0.9

Differs from the paper: its split is a list of its own, here it is drawn by the seed, by class.
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
    config.data.name = "office_caltech10"
    config.data.image_size = 256
    config.data.split = "stratified"
    config.data.test = 0.2  # 32 of dslr's 157 images
    config.data.validation = 0.32  # 50 of them, 0.4 of its training images
    config.data.truncate = True
    config.data.fraction = 0.83  # 62 of the 75 that are left, 0.5 of its training images
    config.data.augment = "office"
    return override(config, changes)
