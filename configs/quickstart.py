"""FedBN beside FedAvg and SingleSet on real handwriting seen by six scanners; no download.

    python -m fedjax_bn.main --config configs/quickstart.py

Five scanners are clients, the sixth is the unseen client.
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.baselines = ("singleset", "fedavg")
    config.model = "SmallDigitCNN"
    config.rounds = 20
    config.data.name = "scanners"
    config.target = "fax"
    config.adaptations = ("running", "batch", "tsmobn")
    return override(config, changes)
