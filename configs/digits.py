"""FedBN's digits benchmark (Li et al. 2021, Section 5.1 and D.2): five domains, a client each.

    python -m fedjax_bn.main --config configs/digits.py --config.data.path=PATH

PATH is an `.npz` with `DOMAIN__train_images`, `DOMAIN__train_labels` and the same for `test`;
`python launch/convert/digits.py FOLDER PATH` makes it of the five original datasets. Of these the
paper trains on 743 images of each: --config.data.truncate=True --config.data.fraction=0.1

The paper's Table 11 (300 rounds, 743 training images a client, 5 runs), accuracy in percent:

              SVHN   USPS   Synth  MNIST-M  MNIST
    SingleSet 65.25  95.16  80.31  77.77    94.38
    FedAvg    62.86  95.56  82.27  76.85    95.87
    FedProx   63.08  95.58  82.34  76.64    95.75
    FedBN     71.04  96.97  83.19  78.33    96.57

Its other experiments are keys; shares are of the file:

    training loss (Fig. 3)                --config.eval_also=train_loss --config.eval_every=1
                                          (`train_loss` in metrics.jsonl: after aggregation, in
                                          evaluation mode, as the authors' code takes it)
    local epochs (Fig. 4a, Table 5)       --config.local_epochs=4
    amount of data (Fig. 4b, Table 6)     --config.data.fraction=0.05
    heterogeneity (Fig. 4c, Table 7)      --config.data.clients_per_domain=3
                                          --config.data.fraction=0.3    (743 images a client)
    validation samples (it has none)      --config.data.split=official (of the training samples a
                                          tenth, data.validation)
    methods (Fig. 5, Table 11)            --config.method=fedavg    (fedprox, silobn, singleset)

Small, on a CPU: --config.rounds=16 --config.eval_every=4; docs/results/fedbn.md has 30 rounds.
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


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
