"""FedBN's synthetic Gaussians (Li et al. 2021, Appendix F, Fig. 9): two clients, generated.

    python -m fedjax_bn.main --config configs/synthetic.py

The clients differ in the covariance of their ten features alone. A network with 100 hidden neurons
makes 600 steps of gradient descent on all samples of a client, and the models are averaged after
each. The paper's result: FedAvg and FedBN both reach an accuracy of 100 %, and the training loss of
FedBN falls significantly faster (`loss` in metrics.jsonl and report.html).

    --config.method=fedavg
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.model = "TwoLayer"
    config.rounds = 600  # one step each
    config.local_epochs = 1
    config.batch_size = 1000  # all samples of a client
    config.optimizer.learning_rate = 0.01  # of the mean loss over a client's samples; ours
    config.weigh = "uniform"
    config.eval_every = 50
    config.checkpoint_every = 100
    config.data.name = "synthetic"
    config.data.validation = 0.0  # all samples of a client train, and the last round is reported
    config.data.split = "official"
    return override(config, changes)
