"""FedBN beside SingleSet on real handwriting seen by six scanners; no download.

    python -m fedjax_bn.main --config configs/quickstart.py

Five scanners are clients, the sixth is the unseen client. So that other seeds and machines print
the same, the data are those of seed 0 whatever the seed, and the rate falls to 0: a client's
running statistics, of its own weights, then suit the aggregated ones. Averaged statistics suit no
scanner, and what they give differs by tens of points from seed to seed:

    FedAvg                           --config.baselines=singleset,fedavg
    fax with received statistics     --config.adaptations=running,batch,tsmobn
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.baselines = ("singleset",)
    config.model = "SmallDigitCNN:width=16"
    config.rounds = 20
    config.batch_size = 16
    config.optimizer.learning_rate = 0.02
    config.optimizer.momentum = 0.9
    config.optimizer.schedule = "cosine"
    config.data.name = "scanners:seed=0:shared_test=True"
    config.target = "fax"
    config.adaptations = ("batch", "tsmobn")
    return override(config, changes)
