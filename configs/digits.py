"""FedBN's digits benchmark (Section 5.1 and D.2): five digit domains, a client each.

python -m fedjax_bn.main --config configs/digits.py --config.data.path=FOLDER_OR_NPZ
"""

from ml_collections import ConfigDict

from fedjax_bn.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.model = "DigitCNN"
    config.rounds = 300  # D.2
    config.local_epochs = 1
    config.batch_size = 32
    config.optimizer.learning_rate = 0.01
    config.weigh = "uniform"  # 1/K, as in the authors' code
    config.eval_every = 10
    config.checkpoint_every = 10
    config.data.name = "digits"
    return override(config, changes)
