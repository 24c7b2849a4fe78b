"""FedCD's cow on the beach, made of real digits (Ma et al. 2024, Fig. 1); no download.

    python -m fedjax_bn.main --config configs/cow_on_beach.py

Four clients show digits on grounds whose colour mostly predicts the digit; in the zoo it predicts
nothing, on the beach a wrong one (see fedjax_bn/data/sets/cow_on_beach.py). How far a method falls
from the clients' accuracy to theirs is how far it has learned the colour.

    SCI alone      --config.weigh=by_size
    REA alone      --config.method=fedavg --config.weigh=risk_extrapolation:eta=0.5
    FedAvg         --config.method=fedavg    (fedprox, fedbn, fedig)
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedcd"
    config.model = "SmallCNN"
    config.rounds = 60
    config.local_epochs = 1
    config.batch_size = 16
    config.optimizer.learning_rate = 0.1
    config.target = "zoo,beach"
    config.adaptations = ("running", "running:mask=False", "tsmobn")
    config.eval_every = 10
    config.data.name = "cow_on_beach"
    return override(config, changes)
