"""TsmoBN with momentum 0 to 0.9 (Jiang et al. 2021, Fig. 3b and E.4).

    python -m fedjax_bn.main --config configs/tsmobn_momentum.py --config.data.path=PATH

Batches of 32; momentum 0 tracks nothing. The paper's result: momentum helps, most above 0.5, and
its value matters little, about 1 %.
The paper shows Camelyon17 and CIFAR-10-C; these are digits, PATH as in configs/digits.py.

    plot             plots/unseen-tsmobn-momentum.png in the workdir
    other methods    --config.method=fedbn    (fedprox, fednova, fedadam)
    other targets    --config.target=mnist    (all in turn: each)

A finished run of any method and data is tested so, without training, by

    python -m fedjax_bn.main evaluate --workdir DIR --config configs/tsmobn_momentum.py:CHANGES

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
    config.adaptations = ("running", *(f"tsmobn:momentum={n / 10}" for n in range(10)))
    config.eval_every = 100  # so many adaptations take time
    config.checkpoint_every = 10
    config.data.name = "digits"
    return override(config, changes)
