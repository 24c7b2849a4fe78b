"""TsmoBN with one batch of 2 to 512 samples (Jiang et al. 2021, Fig. 3a and E.3).

    python -m fedjax_bn.main --config configs/tsmobn_batch_size.py --config.data.path=PATH

Every batch of the unseen client is normalized by its own statistics alone, nothing is tracked.
The paper's result: accuracy rises with the batch and passes plain inference between 2 and 16.
The paper shows Camelyon17 and CIFAR-10-C; these are digits, PATH as in configs/digits.py.

    plot             plots/unseen-batch-batch_size.png in the workdir
    other methods    --config.method=fedbn    (fedprox, fednova, fedadam)
    other targets    --config.target=mnist    (all in turn: each)

A finished run of any method and data is tested so, without training, by

    python -m fedjax_bn.main evaluate --workdir DIR --config configs/tsmobn_batch_size.py:CHANGES

where CHANGES name its data, such as data.name=camelyon17,data.path=PATH,data.image_size=96 and
target=unseen.

Small, on a CPU: --config.model=DigitCNN:width=16 --config.rounds=20
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedavg"
    config.model = "DigitCNN"
    config.rounds = 100
    config.optimizer.learning_rate = 0.01
    config.target = "svhn"
    config.adaptations = ("running", *(f"batch:batch_size={2**n}" for n in range(1, 10)))
    config.eval_every = 100  # so many adaptations take time
    config.checkpoint_every = 10
    config.data.name = "digits"
    return override(config, changes)
