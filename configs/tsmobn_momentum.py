"""TsmoBN with momentum 0 to 0.9 (Jiang et al. 2021, Fig. 3b and E.4).

    python -m fedjax_bn.main --config configs/tsmobn_momentum.py --config.data.path=PATH

Batches of 32; momentum 0 tracks nothing. The paper's result: momentum helps, most above 0.5, and
its value matters little, about 1 %.
As in the paper the unseen clients are two hospitals of Camelyon17; configs/camelyon17.py has the
setting and describes PATH. They are tested once, in the round with the best mean validation
accuracy.

    plot             plots/unseen-tsmobn-momentum.png in the workdir
    other methods    --config.method=fedbn    (fedprox, fednova, fedadam)

This command tests a finished run of any method and data in this way, without training:

    python -m fedjax_bn.main evaluate --workdir DIR --config configs/tsmobn_momentum.py:CHANGES

where CHANGES name its data, for CIFAR-10-C (E.2.3) such as data.name=cifar10_c,data.path=PATH,
data.image_size=256,data.severities=1,target=noise, for digits data.name=digits,data.path=PATH,
target=mnist.

Small, with no download: the small run of configs/camelyon17.py with --workdir DIR, then
    python -m fedjax_bn.main evaluate --workdir DIR --config
    configs/tsmobn_momentum.py:data.name=scanners,data.split=,data.image_size=28,target=fax
It takes some seconds. Over the seeds 0, 1 and 2 of that run the unseen scanner has 42.0 (0.8) % at
0.9 and 43 to 44 at all others, where running statistics have 12.8 (2.9) (chance 10).
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import override
from fedjax_bn.run.config.file import read


def get_config(changes: str = "") -> ConfigDict:
    config = read("configs/camelyon17.py")
    config.method = "fedavg"
    config.adaptations = ("running", *(f"tsmobn:momentum={n / 10}" for n in range(10)))
    config.eval_also = ()  # so many adaptations take time
    return override(config, changes)
