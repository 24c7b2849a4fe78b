"""Camelyon17, two of five hospitals unseen (TsmoBN: Fig. 2, Tables E.4 and E.7; UniFed: Fig. 5).

    python -m fedjax_bn.main --config configs/camelyon17.py --config.data.path=PATH

PATH is the WILDS folder, laid out as in fedjax_bn/data/sets/camelyon17.py.
--config.data.cache=FOLDER keeps the decoded patches, 12.6 GB, of which training streams what does
not fit on the device. Centers 0, 3 and 4 train a DenseNet-121; centers 1 and 2 ("unseen") are the
papers' hospital4 and hospital5.

TsmoBN's Table E.7 (200 rounds, 3 runs; clients cut to the smallest), accuracy in percent:

              hospital4  +TsmoBN  hospital5  +TsmoBN
    FedAvg    62.62      89.66    59.95      83.44
    FedProx   63.41      89.66    59.99      83.51
    FedNova   80.02      88.72    60.54      84.86
    FedAdam   68.71      89.46    58.41      87.20
    FedBN     59.36      89.98    58.14      78.06

Clients of one size make equally many steps, with which FedNova is FedAvg: a run of either gives the
same numbers up to rounding, unlike the paper's.

    methods                       --config.method=fedavg    (fedprox, fednova, fedadam)
    clients uncut (Table E.4)     --config.data.truncate=False

UniFed's Fig. 5 tests the three hospitals inside too, each with its own model, and has scaffold,
moon, feddc and perfedavg too; Fig. 6 varies batch size, momentum and order of the test. All is
in launch/sweeps/unifed.py. It names no cut and no early stop.

    its setting                   --config.data.validation=0.1 --config.data.test=0.2
                                  --config.data.truncate=False --config.patience=0
                                  --config.weigh=uniform    (1/N: Algorithm 1)
    samples (UniFed, Fig. 4)      launch/pictures.py

A run stops when ten rounds bring no better mean validation accuracy (E.1). Every hospital that
trains is cut to the size of the smallest (section 4.1), which a run prints at its start.

Small, on a CPU, and without these patches, which were not at hand: the embedded scanners in their
place,
    --config.data.name=scanners --config.data.split= --config.data.validation=0
    --config.data.image_size=28 --config.target=fax --config.model=SmallCNN --config.rounds=30
    --config.eval_every=5 --config.batch_size=16 --config.optimizer.learning_rate=0.05
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.model = "DenseNet121"
    config.rounds = 200  # E.1
    config.local_epochs = 1
    config.batch_size = 32
    config.optimizer.learning_rate = 0.001
    config.target = "unseen"
    config.adaptations = ("running", "tsmobn")
    config.patience = 10  # E.1
    config.eval_every = 1  # the round with the best mean validation accuracy is reported
    config.checkpoint_every = 1
    config.data.name = "camelyon17"
    config.data.image_size = 96
    config.data.split = "holdout"
    config.data.validation = 0.2
    config.data.truncate = True
    return override(config, changes)
