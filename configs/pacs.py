"""PACS, leaving one domain out (FedIG: Table 5, Section 4.1 and A.2; FedCD: Table 1).

    python -m fedjax_bn.main --config configs/pacs.py --config.data.path=PATH

PATH is laid out as fedjax_bn/data/pacs.py says; the decoded images take 1.5 GB in the folder
config.data.cache. The target, one of photo, art_painting, cartoon and sketch, is the unseen client;
the others train a ResNet-18, from scratch. The papers start from ImageNet's weights, which are
fetched once with --config.pretrained=timm/resnet18.tv_in1k, or come from a file.

FedIG's Table 5 (40 rounds of 200 steps, 4 runs), accuracy on the unseen client in percent:

              photo  art_painting  cartoon  sketch
    FedAvg    90.40  72.52         72.59    73.90
    FedProx   90.49  72.41         73.09    72.93
    FedBN     92.74  77.08         75.08    78.28
    FedIG     92.99  82.17         77.71    83.40
    FedIG-A   94.24  84.30         79.80    83.79

    other methods                     --config.method=fedavg    (fedprox, fedbn, fedig)
    30 clients (A.6, Tables 9 to 11)  --config.data.clients_per_domain=10 --config.rounds=120
                                      --config.clients_per_round=10 --config.local_steps=20
      Dirichlet instead of iid        --config.data.partition=dirichlet --config.data.alpha=0.5

FedCD's Table 1 (40 rounds of 5 epochs, batches of 16, learning rate 0.001):

              photo  art_painting  cartoon  sketch
    FedAvg    92.77  77.29         77.97    81.03
    SCAFFOLD  92.50  78.09         77.23    80.67
    FedNova   94.03  79.93         76.39    79.26
    FedCD     94.42  82.58         79.35    84.00

    FedCD's setting                   --config.local_steps=0 --config.local_epochs=5
                                      --config.batch_size=16 --config.optimizer.learning_rate=0.001

Small, on a CPU: --config.data.image_size=64 --config.local_steps=10 --config.rounds=3
"""

from ml_collections import ConfigDict

from fedjax_bn.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.model = "ResNet18"
    config.rounds = 40
    config.local_steps = 200
    config.batch_size = 64
    config.optimizer.learning_rate = 0.01
    config.optimizer.momentum = 0.5
    config.target = "sketch"
    config.eval_every = 1  # the round with the best mean validation accuracy is reported
    config.checkpoint_every = 1
    config.data.name = "pacs"
    config.data.image_size = 224
    config.data.split = "holdout"  # DomainBed's, not the authors' lists
    config.data.validation = 0.1
    config.data.augment = "domainbed"
    return override(config, changes)
